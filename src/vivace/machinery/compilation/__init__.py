"""Compiled code and captured graphs: how they are made, counted and kept."""
