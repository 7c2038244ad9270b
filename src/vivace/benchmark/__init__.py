"""Benchmarks: trials in processes of their own, measured, stored, resumed."""

from vivace.benchmark.bench import bench, prepare
from vivace.benchmark.plan import Plan
from vivace.benchmark.store import DEFAULT_STORE, Store

__all__ = ["DEFAULT_STORE", "Plan", "Store", "bench", "prepare"]
