"""A study becomes rounds: the schedule, the worker that measures, and what it asks for."""
