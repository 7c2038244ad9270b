"""Attention kernels: their requirements, and how calls are redirected to them."""
