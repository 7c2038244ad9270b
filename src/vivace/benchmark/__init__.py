"""Benchmarks: run trials in separate processes, store every round, resume where a run stopped."""

from vivace.benchmark.comparison import Comparison, comparisons
from vivace.benchmark.pairs import Paired, compare
from vivace.benchmark.profiles import Profiled, profile
from vivace.benchmark.run import Compared, Run
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.benchmark.studies import bench, run_study, start_launcher
from vivace.spec.study import AskedQuality, AskedWorkload, Study
from vivace.spec.timing import Timing

__all__ = [
    "DEFAULT_STORE",
    "AskedQuality",
    "AskedWorkload",
    "Compared",
    "Comparison",
    "Paired",
    "Profiled",
    "Run",
    "Store",
    "Study",
    "Timing",
    "bench",
    "compare",
    "comparisons",
    "profile",
    "run_study",
    "start_launcher",
]
