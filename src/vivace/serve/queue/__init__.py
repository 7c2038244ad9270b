"""Jobs that wait, and the worker processes that draw them."""
