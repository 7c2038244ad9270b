"""Load on an OpenAI images server: clients in a loop, and users who come at random.

images_endpoint  the server: one HTTP exchange, its model, the images of an answer; `prove` uses it too
load_target      the body of each request, and what became of it
stages           a closed loop of clients, Poisson arrivals, which follow each other for how long
load_rows        what is stored of a load
load_figures     throughput, latency and goodput
load_answer      the figures and each request as an answer
aiperf           a run of AIPerf as a row
"""
