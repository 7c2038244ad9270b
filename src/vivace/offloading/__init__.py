"""Weights kept in pinned host memory and copied to the GPU when they are needed."""
