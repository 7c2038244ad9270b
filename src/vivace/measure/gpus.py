"""GPUs by name: the same one under several names, and its generation."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass
from enum import IntEnum

CPU = "CPU"


class Near(IntEnum):
    """How near a device is to the one that is asked about; lower is nearer."""

    SAME = 0
    GENERATION = 1
    OTHER = 2


@dataclass(frozen=True)
class Generation:
    """A generation of NVIDIA GPUs with one compute capability."""

    name: str
    capability: tuple[int, int]
    models: str
    """A regular expression for the words by which its GPUs are known."""


GENERATIONS = (
    # Names that contain other generations' come first: "RTX 6000 Ada", "RTX PRO 6000".
    Generation("Blackwell", (12, 0), r"RTX PRO \d{4}|(?:RTX )?50[5-9]0"),
    Generation("Blackwell", (10, 0), r"G?B[23]00"),
    Generation("Hopper", (9, 0), r"G?H[12]00|H20|H800"),
    Generation("Ada", (8, 9), r"(?:RTX )?40[5-9]0|RTX \d{4} Ada|L40S?|L4|L20"),
    Generation("Ampere", (8, 0), r"A100|A800|A30"),
    Generation("Ampere", (8, 6), r"(?:RTX )?30[5-9]0|(?:RTX )?A[2-6]0{3}|A40|A10G?|A16|A2"),
    Generation("Turing", (7, 5), r"T4|(?:RTX )?20[6-8]0|(?:GTX )?16[5-6]0"),
    Generation("Volta", (7, 0), r"G?V100"),
)


def model_of(name: str) -> tuple[str, Generation] | None:
    """Return the word that identifies a GPU, and its generation: "NVIDIA A100-SXM4-80GB" is an "A100".

    None for a GPU that is not in the list.
    """
    text = re.sub(r"[-_\s]+", " ", name)
    for generation in GENERATIONS:
        if found := re.search(rf"(?<![A-Za-z0-9])(?:{generation.models})(?![A-Za-z0-9])", text, re.I):
            word = re.sub(r"^(RTX|GTX) (?=[1-5]\d{3}$)", "", found.group().upper())
            return (f"{word} LAPTOP" if "laptop" in text.lower() else word), generation
    return None


def near(wanted: str, seen: str) -> Near:
    """Return how near two GPUs are, by their names."""
    here, there = model_of(wanted), model_of(seen)
    if here is None or there is None:
        return Near.SAME if _plain(wanted) == _plain(seen) else Near.OTHER
    if here[0] == there[0]:
        return Near.SAME
    return Near.GENERATION if here[1].name == there[1].name else Near.OTHER


def _plain(name: str) -> str:
    return re.sub(r"[\W_]+", " ", name.removeprefix("NVIDIA ")).strip().lower()


def capability_of(name: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU by its name; None if it is not known."""
    found = model_of(name)
    return None if found is None else found[1].capability


def this_gpu() -> str | None:
    """Return the name of this machine's first visible GPU, from NVML, without torch; None without one."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if not visible or visible == "-1":
        return None
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    index = ctypes.c_uint(int(visible) if visible.isdecimal() else 0)
    try:
        if nvml.nvmlInit_v2() != 0:
            return None
        found = nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) == 0 and (
            nvml.nvmlDeviceGetName(handle, name, ctypes.c_uint(len(name))) == 0
        )
        nvml.nvmlShutdown()
    except AttributeError:  # a library of that name without these functions
        return None
    return name.value.decode(errors="replace") if found else None
