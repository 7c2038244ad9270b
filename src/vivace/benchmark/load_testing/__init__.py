"""Load on an OpenAI images server: clients in a loop, and users who come at random.

target      the server: its URL, model and key, and the body of each request
exchange    one HTTP exchange on asyncio
sending     one request, and what became of it
loads       a closed loop of clients, and Poisson arrivals
stages      which loads follow each other, and for how long
rows        what is stored of a load
figures     throughput, latency and goodput
aiperf      a run of AIPerf as a row
load_answer the figures and each request as an answer
"""
