"""Load on an OpenAI images server, and its figures: clients in a loop, and users who come at random."""
