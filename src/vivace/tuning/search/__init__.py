"""The search: its space, budget and measurements, and how it chooses what to measure next."""
