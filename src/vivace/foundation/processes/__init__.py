"""Worker processes: started, spoken to in lines of JSON, held to limits, and ended.

How a process starts, forks and ends is known here alone, except for the peers of `machinery.multi_gpu`. What workers
do, and what follows when they end, is up to their users.
"""
