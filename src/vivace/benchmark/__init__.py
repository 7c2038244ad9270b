"""Benchmarks: run trials in separate processes, store every round, resume where a run stopped."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.benchmark.comparison import Comparison, comparisons
    from vivace.benchmark.pairs import Paired, compare
    from vivace.benchmark.profiles import Profiled, profile
    from vivace.benchmark.run import Compared, Run
    from vivace.benchmark.run_settings import RunSettings
    from vivace.benchmark.store import Store
    from vivace.benchmark.studies import bench, run_study, start_launcher
    from vivace.foundation.spec.settings import DEFAULT_STORE
    from vivace.foundation.spec.study import QualityRequest, Study, WorkloadRequest
    from vivace.foundation.spec.timing import Timing

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
_MODULES = {
    "Compared": "benchmark.run",
    "Comparison": "benchmark.comparison",
    "DEFAULT_STORE": "foundation.spec.settings",
    "Paired": "benchmark.pairs",
    "Profiled": "benchmark.profiles",
    "QualityRequest": "foundation.spec.study",
    "Run": "benchmark.run",
    "RunSettings": "benchmark.run_settings",
    "Store": "benchmark.store",
    "Study": "foundation.spec.study",
    "Timing": "foundation.spec.timing",
    "WorkloadRequest": "foundation.spec.study",
    "bench": "benchmark.studies",
    "compare": "benchmark.pairs",
    "comparisons": "benchmark.comparison",
    "profile": "benchmark.profiles",
    "run_study": "benchmark.studies",
    "start_launcher": "benchmark.studies",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used: `vivace generate` needs neither the store nor the pages."""
    if name not in _MODULES:
        raise AttributeError(f"module 'vivace.benchmark' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vivace.{_MODULES[name]}"), name)
