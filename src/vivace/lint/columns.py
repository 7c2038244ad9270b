"""What the columns of other people's tables mean: a table of synonyms."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vivace.hardware import gpu_in
from vivace.lint.values import UNITS, plain_cell

SYNONYMS: dict[str, tuple[str, ...]] = {
    "label": ("name", "recipe", "technique", "optimization technique", "optimisation technique", "configuration",
              "config", "method", "quant", "quantization", "optimization", "operator"),
    "model": ("model", "pipeline"),
    "gpu": ("gpu", "device name", "hardware", "accelerator"),
    "mean": ("average time", "avg time", "average", "avg", "mean", "mean time", "mean latency", "average latency"),
    "time": ("time", "latency", "total time", "s/image", "time per image", "seconds per image", "s/img",
             "inference time", "generation time"),
    "min": ("min time", "min", "minimum", "fastest", "min latency"),
    "max": ("max time", "max", "maximum", "slowest", "max latency"),
    "p50": ("p50 time", "p50", "median", "median time", "50th percentile"),
    "p90": ("p90 time", "p90", "90th percentile"),
    "p95": ("p95 time", "p95", "95th percentile"),
    "p99": ("p99 time", "p99", "99th percentile"),
    "low": ("ci95 low",),
    "high": ("ci95 high",),
    "n": ("n", "samples", "num samples", "runs", "repeats", "iterations", "number of samples"),
    "step": ("s/step", "step", "time per step", "seconds per step", "step time", "sec/step"),
    "steps": ("steps", "inference steps", "denoising steps"),
    "workload_steps": ("num inference steps",),
    "height": ("height",),
    "width": ("width",),
    "batch": ("batch", "batch size"),
    "speedup": ("speedup", "speed-up", "speed up", "speedup vs baseline"),
    "speedup_low": ("speedup low",),
    "speedup_high": ("speedup high",),
    "throughput": ("throughput", "images/s", "img/s", "images per second", "images per s", "imgs/s"),
    "model_memory": ("vram model", "model memory", "weights memory", "memory after load"),
    "peak_memory": ("vram peak", "peak memory", "peak vram", "inference memory", "max memory", "peak",
                    "vram", "memory"),
    "precision": ("precision", "dtype"),
    "self_cpu_percent": ("self cpu %", "self cpu percent"),
    "self_cpu": ("self cpu",),
    "cpu_percent": ("cpu total %", "cpu total percent"),
    "cpu": ("cpu total",),
    "cpu_avg": ("cpu time avg",),
    "self_cuda_percent": ("self cuda %", "self cuda percent"),
    "self_cuda": ("self cuda",),
    "cuda": ("cuda total",),
    "cuda_avg": ("cuda time avg",),
    "calls": ("# of calls", "num calls", "calls"),
    "clip": ("clip score", "clip"),
    "share": ("gpu utilization", "gpu utilisation", "utilization", "utilisation"),
}  # fmt: skip
"""Headings by what they mean, lower case, without units in brackets, `_s`, `_bytes`, underscores and names of GPUs."""

TIMES = frozenset({"mean", "time", "min", "max", "p50", "p90", "p95", "p99", "low", "high", "step"})
BYTES = frozenset({"model_memory", "peak_memory"})
PROFILE = frozenset({"self_cpu", "cpu", "cpu_avg", "self_cuda", "cuda", "cuda_avg"})
COUNTS = frozenset({"n", "steps", "workload_steps", "batch", "calls", "height", "width"})
TEXTS = frozenset({"label", "model", "gpu", "precision"})
_BY_NAME = {name: role for role, names in SYNONYMS.items() for name in names}
_SUFFIXES = {"s": "s", "ms": "ms", "us": "us", "bytes": "bytes", "gb": "gb", "mb": "mb"}


@dataclass(frozen=True)
class Column:
    """What a column holds.

    Attributes:
        role: a key of SYNONYMS.
        of: the GPU that the heading names, as in "A100 (s)"; empty if none.
        kind, factor: of the unit in the heading: ("time", 0.001) for "(ms)"; (None, 1) without one.
    """

    role: str
    of: str
    kind: str | None
    factor: float


def column_of(heading: str) -> Column | None:
    """Return what a heading means; None if it is not in the table of synonyms."""
    text = " ".join(plain_cell(heading).lower().replace("_", " ").split())
    text = text.rpartition(".")[2] if re.fullmatch(r"[\w .]+", text) else text  # nested JSON
    text = re.sub(r"\s*\[[^\]]*\]", "", text)  # "[95 % interval]"
    text, unit = _without_unit(text)
    kind, factor = UNITS.get(unit, (None, 1.0))
    role = _BY_NAME.get(text)
    if role is not None:
        if role == "model" and kind == "bytes":
            role = "model_memory"
        return Column(role, "", kind, factor) if _fits(role, kind) else None
    gpu, rest = gpu_in(text)
    if gpu:
        role = _BY_NAME.get(rest) if rest else ("mean" if kind == "time" else None)
        if role is not None and _fits(role, kind):
            return Column(role, gpu, kind, factor)
    return None


def _without_unit(text: str) -> tuple[str, str]:
    found = re.fullmatch(r"(.+?)\s*\(([^)]*)\)", text)
    if found is not None:
        return found[1].strip(), found[2].strip()
    first, _, last = text.rpartition(" ")
    return (first, _SUFFIXES[last]) if first and last in _SUFFIXES else (text, "")


def _fits(role: str, kind: str | None) -> bool:
    if kind is None:
        return True
    if role in TIMES or role in PROFILE:
        return kind == "time"
    if role in BYTES:
        return kind == "bytes"
    return role not in TEXTS | COUNTS
