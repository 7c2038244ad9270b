"""vivace's own Triton kernels."""
