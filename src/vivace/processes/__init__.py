"""Worker processes: started, spoken to in lines of JSON, held to limits, and ended.

How a process starts, forks and ends is known here alone, except for the peers of `machinery.multi_gpu`. What workers
are asked, and what follows when they end, is their users' own.
"""
