"""FLUX's transformer as few, fused kernels: its weights, its forward, and what both are made of."""
