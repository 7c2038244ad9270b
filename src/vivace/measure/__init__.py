"""Measurement: stage times, memory, image quality, the machine, the environment, the kernels that ran."""
