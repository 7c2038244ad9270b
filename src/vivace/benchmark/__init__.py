"""Benchmarks: run trials in separate processes, store every round, resume where a run stopped."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.benchmark.comparison import Comparison, comparisons
    from vivace.benchmark.pairs import Paired, compare
    from vivace.benchmark.profiles import Profiled, profile
    from vivace.benchmark.run import Compared, Run
    from vivace.benchmark.settings import RunSettings
    from vivace.benchmark.store import DEFAULT_STORE, Store
    from vivace.benchmark.studies import bench, run_study, start_launcher
    from vivace.spec.study import QualityRequest, Study, WorkloadRequest
    from vivace.spec.timing import Timing

__all__ = [
    "DEFAULT_STORE",
    "Compared",
    "Comparison",
    "Paired",
    "Profiled",
    "QualityRequest",
    "Run",
    "RunSettings",
    "Store",
    "Study",
    "Timing",
    "WorkloadRequest",
    "bench",
    "compare",
    "comparisons",
    "profile",
    "run_study",
    "start_launcher",
]
_PLACES = {
    "benchmark.comparison": ("Comparison", "comparisons"),
    "benchmark.pairs": ("Paired", "compare"),
    "benchmark.profiles": ("Profiled", "profile"),
    "benchmark.run": ("Compared", "Run"),
    "benchmark.settings": ("RunSettings",),
    "benchmark.store": ("DEFAULT_STORE", "Store"),
    "benchmark.studies": ("bench", "run_study", "start_launcher"),
    "spec.study": ("QualityRequest", "WorkloadRequest", "Study"),
    "spec.timing": ("Timing",),
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `vivace generate` needs neither the store nor the pages."""
    for place, names in _PLACES.items():
        if name in names:
            return getattr(importlib.import_module(f"vivace.{place}"), name)
    raise AttributeError(f"module 'vivace.benchmark' has no attribute {name!r}")
