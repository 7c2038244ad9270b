"""The meaning of columns in tables from any source: a table of synonyms, and the words in headings."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vivace.evidence.lint.values import plain_cell, unit_of
from vivace.foundation.hardware import gpu_in

SYNONYMS: dict[str, tuple[str, ...]] = {
    "label": ("name", "recipe", "technique", "optimization technique", "optimisation technique", "configuration",
              "config", "method", "quant", "quantization", "optimization", "operator", "command", "variant", "setting",
              "settings", "setup", "test", "benchmark", "case", "optimisation", "optimizations", "optimisations"),
    "model": ("model", "pipeline", "checkpoint"),
    "gpu": ("gpu", "device name", "hardware", "accelerator", "card", "device"),
    "mean": ("average time", "avg time", "average", "avg", "mean", "mean time", "mean latency", "average latency"),
    "time": ("time", "latency", "total time", "s/image", "time per image", "seconds per image", "s/img",
             "inference time", "generation time", "elapsed", "duration", "runtime", "wall time"),
    "min": ("min time", "min", "minimum", "fastest", "min latency"),
    "max": ("max time", "max", "maximum", "slowest", "max latency"),
    "p50": ("p50 time", "p50", "median", "median time", "50th percentile"),
    "p90": ("p90 time", "p90", "90th percentile"),
    "p95": ("p95 time", "p95", "95th percentile"),
    "p99": ("p99 time", "p99", "99th percentile"),
    "low": ("ci95 low",),
    "high": ("ci95 high",),
    "n": ("n", "samples", "num samples", "runs", "repeats", "iterations", "number of samples", "num runs", "trials"),
    "step": ("s/step", "step", "time per step", "seconds per step", "step time", "sec/step", "per step"),
    "steps": ("steps", "inference steps", "denoising steps"),
    "workload_steps": ("num inference steps",),
    "height": ("height",),
    "width": ("width",),
    "batch": ("batch", "batch size"),
    "speedup": ("speedup", "speed-up", "speed up", "speedup vs baseline", "speed-up vs baseline",
                "speedup over baseline", "speedup factor", "faster"),
    "speedup_low": ("speedup low",),
    "speedup_high": ("speedup high",),
    "relative": ("relative", "relative time", "relative to baseline", "vs baseline", "vs. baseline", "ratio", "change"),
    "throughput": ("throughput", "images/s", "img/s", "images per second", "images per s", "imgs/s"),
    "rate": ("speed", "rate", "performance"),
    "model_memory": ("vram model", "model memory", "weights memory", "memory after load"),
    "peak_memory": ("vram peak", "peak memory", "peak vram", "inference memory", "max memory", "peak",
                    "vram", "memory", "max vram", "peak gpu memory", "gpu memory"),
    "precision": ("precision", "dtype"),
    "size": ("size", "resolution", "image size"),
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
    "reward": ("imagereward", "image reward"),
    "share": ("gpu utilization", "gpu utilisation"),
}  # fmt: skip
"""Headings by their meaning, lower case, without units in brackets, `_s`, `_bytes`, underscores and names of GPUs."""

TIMES = frozenset({"mean", "time", "min", "max", "p50", "p90", "p95", "p99", "low", "high", "step"})
BYTES = frozenset({"model_memory", "peak_memory"})
PROFILE = frozenset({"self_cpu", "cpu", "cpu_avg", "self_cuda", "cuda", "cuda_avg"})
COUNTS = frozenset({"n", "steps", "workload_steps", "batch", "calls", "height", "width"})
TEXTS = frozenset({"label", "model", "gpu", "precision", "size"})
_BY_NAME = {name: role for role, names in SYNONYMS.items() for name in names}
_SUFFIXES = frozenset({"s", "ms", "us", "bytes", "gb", "mb", "gib", "mib", "sec", "secs", "seconds", "milliseconds",
                       "%", "x"})  # fmt: skip
_STATISTICS = {
    "mean": "mean", "avg": "mean", "average": "mean", "median": "p50", "p50": "p50", "p90": "p90", "p95": "p95",
    "p99": "p99", "min": "min", "minimum": "min", "fastest": "min", "best": "min", "max": "max", "maximum": "max",
    "slowest": "max", "worst": "max",
}  # fmt: skip
_OF_A_CALL = frozenset({
    "time", "times", "latency", "duration", "inference", "generation", "wall", "clock", "e2e", "end", "to", "elapsed",
    "runtime", "run", "per", "an", "a", "image", "img", "call", "request", "prompt", "pipeline", "of", "the", "value",
    "in", "wallclock",
})  # fmt: skip
"""Words that may stand in a heading of a statistic of a whole call's time."""
_TIME_WORDS = frozenset({"time", "times", "latency", "duration", "elapsed", "runtime", "wall", "wallclock"})
_PATH = re.compile(r"([\w .-]*\w)\.(?:\w[\w ]*)?[A-Za-z][\w ]*")
"""A key of nested JSON with those above it."""
_ABOVE_TIMES = frozenset({"timing", "timings", "stats", "statistics", "results", "s", "sec", "seconds"})
_NEUTRAL = re.compile(
    r"[^a-z]*(?:(?:lower|higher|less|more|smaller|larger) is better|lower|higher|better|n ?= ?\d+"
    r"|\d[\d.,]* ?(?:steps?|px|images?|prompts?|runs?|samples?)?|\d+ ?[x×] ?\d+(?: ?px)?"
    r"|\d+ ?% ?(?:ci|interval|confidence interval)|ci|±|std|± ?(?:std|σ|sd)|σ)[^a-z]*$"
)
"""Words in brackets that do not change the meaning of a heading."""


@dataclass(frozen=True)
class Column:
    """The meaning of a column.

    Attributes:
        of: the GPU that the heading names, as in "A100 (s)"; empty if none.
        kind, factor: of the unit in the heading: ("time", 0.001) for "(ms)"; (None, 1) without one.
        path: the keys above a time in JSON: times below different keys measure different things.
    """

    role: str
    of: str
    kind: str | None
    factor: float
    path: str = ""


def column_of(heading: str) -> Column | None:
    """Return the meaning of a heading; None if neither it nor its words are in the table of synonyms."""
    text = " ".join(plain_cell(heading).lower().replace("_", " ").split()).strip(" :")
    text = text.rpartition(".")[2] if _PATH.fullmatch(text) else text
    text, kind, factor = _without_unit(text)
    role = _role(text, kind)
    if role is not None:
        if role == "model" and kind == "bytes":
            role = "model_memory"
        return Column(role, "", kind, factor) if _fits(role, kind) else None
    gpu, rest = gpu_in(text)
    if gpu:
        # Below the name of a card alone, cells say what they are.
        role = _role(rest, kind) if rest else {"time": "mean", None: "rate"}.get(kind)
        if role is not None and _fits(role, kind):
            return Column(role, gpu, kind, factor)
    return None


def path_of(heading: str) -> str:
    """Return the keys above a figure in nested JSON: "latency" of "latency.median_s"; empty for other headings."""
    match = _PATH.fullmatch(heading.strip())
    return match[1] if match is not None else ""


def is_of_time(key: str) -> bool:
    """Return whether figures below a key of JSON are times of a call, unless something else names them."""
    words = set(re.findall(r"[a-z0-9]+", key.lower()))
    return bool(words) and words <= _OF_A_CALL | _ABOVE_TIMES


def says_time(heading: str) -> bool:
    """Return whether a heading says that its figures are times, with a unit or without."""
    words = set(re.findall(r"[a-z0-9]+", heading.lower()))
    return bool(words & (_TIME_WORDS | {"step"}))


def role_of_cell(role: str, kind: str | None) -> str | None:
    """Return the meaning of a cell by its unit, such as "2.3 it/s" in "speed"; None if the unit does not fit."""
    if role in TIMES | {"rate", "throughput"}:
        if kind in ("steps a second", "time a step"):
            return "step" if role in ("time", "mean", "step", "rate", "throughput") else None
        if kind == "images a second":
            return "throughput" if role != "step" else None
        if kind == "time an image":
            return ("time" if role in ("rate", "throughput") else role) if role != "step" else None
        if role == "rate":
            return {"time": "time", "ratio": "relative", "percent": "relative"}.get(kind or "")
        if role == "throughput":
            return role if kind is None else None
    if role in TIMES | PROFILE:
        return role if kind in (None, "time") else None
    if role in BYTES:
        return role if kind in (None, "bytes") else None
    if role in COUNTS:
        return role if kind is None else None
    return role if kind in (None, "percent", "ratio") else None


def _role(text: str, kind: str | None) -> str | None:
    if text in _BY_NAME:
        return _BY_NAME[text]
    if not text:
        return {"steps a second": "step", "time a step": "step", "images a second": "throughput",
                "time an image": "time", "time": "time"}.get(kind or "")  # fmt: skip
    words = re.findall(r"[a-z0-9]+", text.replace("50th percentile", "p50").replace("90th percentile", "p90"))
    statistics = [_STATISTICS[word] for word in words if word in _STATISTICS]
    others = {word for word in words if word not in _STATISTICS}
    is_time = bool(others & _TIME_WORDS) or kind in ("time", "time an image")
    if len(statistics) > 1 or not words or "".join(words) != re.sub(r"[^a-z0-9]", "", text):
        return None
    if others <= _OF_A_CALL and (statistics or is_time):
        return statistics[0] if statistics else "time"
    return None


def _without_unit(text: str) -> tuple[str, str | None, float]:
    kind, factor = None, 1.0
    if (whole := unit_of(text)) is not None and whole[0] not in ("ratio", "percent") and text not in _BY_NAME:
        return ("", *whole) if text not in ("min", "samples") else (text, None, 1.0)
    for inside in re.findall(r"[(\[]([^()\[\]]*)[)\]]", text):
        unit = unit_of(inside)
        if unit is not None and kind is None:
            kind, factor = unit
            text = _removed(text, inside)
        elif unit is not None or _NEUTRAL.fullmatch(inside.strip()):
            text = _removed(text, inside)
    text = " ".join(re.sub(r"[()\[\]]", " ", text).split()).strip(" ,:±")
    if kind is None and text not in _BY_NAME:
        for pattern in (
            r"(.+?)\s*,\s*(\S.*)",
            r"(\S+(?: \S+)*?)\s+(\S+ per .+|\S+ ?/ ?\S+)",
            r"(.+?)\s+in\s+(\S+)",
            r"(.+?\S)\s+/\s+(\S+)",
            r"(.+)\s+(\S+)",
        ):
            match = re.fullmatch(pattern, text)
            unit = unit_of(match[2]) if match is not None else None
            if match is None or unit is None or (pattern.endswith(r"\s+(\S+)") and match[2] not in _SUFFIXES):
                continue
            text, (kind, factor) = match[1].strip(" ,±"), unit
            break
    return re.sub(r"\s*(?:±\s*(?:σ|std|sd)?|\+/-)$", "", text), kind, factor


def _removed(text: str, inside: str) -> str:
    return re.sub(r"\s*[(\[]" + re.escape(inside) + r"[)\]]", "", text, count=1).strip()


def _fits(role: str, kind: str | None) -> bool:
    return kind is None or (role not in TEXTS | COUNTS and role_of_cell(role, kind) is not None)
