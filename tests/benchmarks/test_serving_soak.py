"""The soak's record: what it goes on with, and what its growth is."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks import serving_soak
from benchmarks.record_files import read_list
from benchmarks.serving_soak import Soak, soak_leaving, soak_memory, soak_overload
from benchmarks.serving_soak_rows import MemoryPoint, SoakRow, growth
from vivace.measure.this_environment import environment

HERE = environment("cpu")


def soak(record: Path, revision: str = "abc") -> Soak:
    here = HERE.model_copy(update={"source_revision": revision})
    return Soak("tiny-sd", "tiny_vae", here, record, ("64x64",), None, read_list(record, SoakRow))


def keep(of: Soak, part: str, began: str, number: int) -> None:
    of.keep(of.row(part, began, seconds=1.0, statuses={"200": number}))


def test_runs_of_one_commit_add_up_and_those_of_others_are_replaced(tmp_path: Path) -> None:
    record = tmp_path / "soak.json"
    keep(soak(record, "old"), "memory", "1", 50)
    keep(soak(record, "old"), "leaving", "2", 7)
    for number in (10, 20):
        keep(soak(record), "memory", "3", number)
    keep(soak(record), "memory", "4", 5)
    assert sum(row.requests for row in soak(record).of("memory")) == 25
    assert soak(record).of("leaving") == []
    assert [row.began for row in soak(record, "old").of("leaving")] == ["2"], "until this commit has its own"
    assert soak(record, "old").of("memory") == []


def test_what_the_record_has_starts_no_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(serving_soak, "server", start)
    of = soak(tmp_path / "soak.json")
    for part in ("memory", "leaving", "overload"):
        keep(of, part, part, 100)
    soak_memory(of, 100)
    soak_leaving(of, 60)
    soak_overload(of, 60)
    with pytest.raises(AssertionError, match="a server was started"):
        soak_memory(of, 101)


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
