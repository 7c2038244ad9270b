"""Measuring: stage times, memory, the machine, the environment, the kernels that ran."""
