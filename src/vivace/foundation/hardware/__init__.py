"""Knowledge about GPUs: chips by their data sheets, names as people write them, and this machine's GPU."""

from vivace.foundation.hardware.chip import Chip, Gpu, shared_memory_bytes
from vivace.foundation.hardware.names import (
    CHIPS,
    Near,
    architecture_of,
    capability_of,
    counted,
    gpu_in,
    known_gpu,
    named_gpu,
    near,
    nearest_gpus,
)
from vivace.foundation.hardware.this_machine import Present, present_gpu, this_gpu

__all__ = [
    "CHIPS",
    "Chip",
    "Gpu",
    "Near",
    "Present",
    "architecture_of",
    "capability_of",
    "counted",
    "gpu_in",
    "known_gpu",
    "named_gpu",
    "near",
    "nearest_gpus",
    "present_gpu",
    "shared_memory_bytes",
    "this_gpu",
]
