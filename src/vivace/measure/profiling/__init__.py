"""The time and memory of one call by its parts: traces of torch.profiler, read without double counting."""
