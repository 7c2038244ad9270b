"""One file an architecture: its fused form."""
