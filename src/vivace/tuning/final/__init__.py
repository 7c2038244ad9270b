"""Measurements by the benchmark, and the final that proves the pick: its images, rounds and judges."""
