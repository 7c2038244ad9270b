"""What of a module is captured in CUDA graphs."""

RECORDED = "_vivace_recorded"
"""Attribute of a denoiser whose steps are captured: what captures and replays them."""
