"""Weights kept in host memory and copied to the GPU when they are needed."""
