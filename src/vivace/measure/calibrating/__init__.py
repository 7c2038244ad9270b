"""Calibrating models that score images, for `vivace calibrate witness`: draw, damage, score, choose a limit."""
