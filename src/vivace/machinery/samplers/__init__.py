"""Limits and steps of diffusers' samplers: the calls of a step, and the step counts and predictions that they take."""
