"""The soak's record: what it goes on with, and what its growth is."""

from pathlib import Path

import numpy as np

from benchmarks.record_files import read_list
from benchmarks.serving_soak import Soak
from benchmarks.serving_soak_rows import MemoryPoint, SoakRow, growth
from vivace.measure.this_environment import environment

HERE = environment("cpu")


def soak(record: Path, revision: str = "abc") -> Soak:
    here = HERE.model_copy(update={"source_revision": revision})
    return Soak("tiny-sd", "tiny_vae", here, record, ("64x64",), None, read_list(record, SoakRow))


def test_growth_is_that_of_a_thousand_requests_once_settled() -> None:
    requests = list(range(100, 10_100, 100))
    noise = np.random.default_rng(0).normal(0, 2e5, 100)
    filling = [5e8 - 1e8 * max(0.0, 1 - number / 2000) for number in requests]
    steady = growth(requests, filling + noise)
    assert steady.low is not None
    assert steady.low < 0 < steady.high, "what fills at first does not count"
    leaking = growth(requests, filling + noise + 1e5 * np.array(requests) / 1000)
    assert leaking.low > 0
    assert leaking.low < 1e5 < leaking.high


def test_a_row_says_what_its_run_came_to() -> None:
    points = tuple(
        MemoryPoint(requests=n, worker_bytes=500_000_000, server_bytes=70_000_000) for n in range(1, 41)
    )
    row = soak(Path("none")).row(
        "memory", "1", seconds=61.0, statuses={"200": 30, "499": 10}, points=points, restarts=0
    )
    first, worker, server = row.lines
    assert first == "memory: 40 requests in 61 s (30 of 200, 10 of 499), 0 workers lost"
    assert worker.startswith("  worker: 500.0 MB at first, 500.0 MB at last; once settled ")
    assert server.startswith("  server: 70.0 MB")
