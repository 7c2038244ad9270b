"""Measurement: stage times, memory, image quality, the machine, the environment, and the kernels that ran."""
