"""Where the time and memory of one call go: traces of torch.profiler, read without double counting."""
