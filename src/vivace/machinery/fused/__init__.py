"""FLUX's transformer, UNets and VAEs as few, fused kernels: their weights, their forwards, and their shared parts."""
