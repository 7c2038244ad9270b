"""Attention kernels: what each needs, and how calls are routed to it."""
