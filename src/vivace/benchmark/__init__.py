"""Benchmarks: trials in processes of their own, measured, stored, resumed."""

from vivace.benchmark.plan import Plan
from vivace.benchmark.prepare import prepare
from vivace.benchmark.store import DEFAULT_STORE, Store
from vivace.benchmark.sweep import bench

__all__ = ["DEFAULT_STORE", "Plan", "Store", "bench", "prepare"]
