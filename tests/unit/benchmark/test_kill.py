"""SIGKILL at random moments: no finished round is lost or duplicated, and a rerun continues.

CI runs 10 kills of workers and 5 of the whole bench; `make soak` 200 and 100.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import vivace
from vivace.benchmark import Store, Timing
from vivace.benchmark.progress import Progress
from vivace.benchmark.rounds.worker_requests import WORKER
from vivace.benchmark.studies import start_launcher
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome, Round

RECIPES = ("baseline", "steps(2)", "guidance(1)", "channels_last", "tiny_vae")
TIMING = Timing(rounds=2, repeats=1, max_warmup=1)
COMMAND = [sys.executable, "-m", "vivace", "bench", "--num-inference-steps", "1"]
COMMAND += ["--rounds", "2", "--repeats", "1", "--warmup", "1", "--format", "json"]
for _recipe in RECIPES:
    COMMAND += ["--recipe", _recipe]


class Killer(Progress):
    """Kills the process of each round a random time after it reports its start."""

    def __init__(self, generator: random.Random, kills: int) -> None:
        self.generator = generator
        self.kills = kills
        self.stored: list[tuple[int, int]] = []

    def event(self, event: dict[str, Any]) -> None:
        if event["event"] == "started" and self.kills:
            self.kills -= 1
            timer = threading.Timer(self.generator.uniform(0.0, 0.5), _kill, (event["pid"],))
            timer.daemon = True
            timer.start()

    def end_round(self, index: int, round_: Round) -> None:
        if round_.outcome is Outcome.MEASURED:
            self.stored.append((index, round_.index))


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill_workers(store: Path, kills: int, seed: int) -> int:
    """Run benches while each round's process is killed; return the number of kills that hit one."""
    generator = random.Random(seed)
    measured: set[tuple[int, int]] = set()
    struck = 0
    killer = Killer(generator, kills)
    with start_launcher("cpu") as launcher:
        while killer.kills:
            struck += _bench_once(store, launcher, killer)
            assert len(killer.stored) == len(set(killer.stored)), "no round measured twice"
            measured |= set(killer.stored)
            with Store.read_only(store) as opened:
                kept = {
                    (i, r)
                    for i, key in enumerate(opened.runs()[0].keys)
                    for r in _measured(opened.rounds(key))
                }
            assert kept == measured, "the store has exactly the rounds that were reported as finished"
            if len(measured) == len(RECIPES) * TIMING.rounds:
                # All rounds finished before all kills: start again with a new store.
                store = store.with_name(store.name + "+")
                measured, killer.stored = set(), []
        _bench_once(store, launcher, killer)
    with Store.read_only(store) as opened:
        assert all(len(_measured(opened.rounds(key))) == TIMING.rounds for key in opened.runs()[0].keys)
    return struck


def _bench_once(store: Path, launcher: Launcher, killer: Killer) -> int:
    records = vivace.bench(
        "tiny-sd",
        RECIPES,
        num_inference_steps=1,
        timing=TIMING,
        store=store,
        launcher=launcher,
        progress=killer,
    )
    crashed = [r for record in records for r in record.rounds if r.outcome is not Outcome.MEASURED]
    for round_ in crashed:
        assert round_.outcome is Outcome.CRASHED
        assert "SIGKILL" in (round_.reason or "")
    return len(crashed)


def _measured(rounds: dict[int, Round]) -> list[int]:
    return [index for index, round_ in rounds.items() if round_.outcome is Outcome.MEASURED]


def kill_benches(folder: Path, kills: int, seed: int) -> int:
    """Kill the whole bench at random moments until one finishes; check the store after each kill.

    Returns how many kills struck it at work.
    """
    struck = 0
    generator = random.Random(seed)
    store = folder / "s0"
    kept: dict[tuple[str, int], str] = {}
    for kill in range(kills):
        process = subprocess.Popen(
            [*COMMAND, "--store", str(store)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        workers: list[psutil.Process] = []
        deadline = time.monotonic() + generator.uniform(0.0, 7.0)
        while time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.02)
            workers = _children(process.pid) or workers
        struck += process.poll() is None
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(workers, timeout=10)
        assert not alive, "a killed bench leaves no worker behind"
        after = _rows(store)
        for row, text in kept.items():
            assert after.get(row) == text, "a finished round was lost or changed"
        kept = after
        if len(kept) == len(RECIPES) * TIMING.rounds:
            store, kept = folder / f"s{kill + 1}", {}
    done = subprocess.run([*COMMAND, "--store", str(store)], capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)
    # One or two steps do not generate a proper image, so the gate may fail it; it is measured all the same.
    assert {row["outcome"] for row in rows} <= {"measured", "failed_quality"}
    assert all(row["latency"]["n"] == TIMING.rounds for row in rows)
    assert all(row["rounds"] == TIMING.rounds for row in rows)
    after = _rows(store)
    assert len(after) == len(RECIPES) * TIMING.rounds
    assert all(after[row] == text for row, text in kept.items()), (
        "the rerun continued, it did not begin again"
    )
    return struck


def _children(pid: int) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def _rows(store: Path) -> dict[tuple[str, int], str]:
    """Return all measured rounds as stored, by (key, round); empty if there is no store yet."""
    if not (store / "records.sqlite").exists():
        return {}
    with Store.create(store) as opened:
        keys = {key for run in opened.runs() for key in run.keys}
        return {
            (key, index): round_.model_dump_json()
            for key in keys
            for index, round_ in opened.rounds(key).items()
            if round_.outcome is Outcome.MEASURED
        }


@pytest.mark.soak
def test_killed_workers(tmp_path: Path) -> None:
    assert kill_workers(tmp_path / "s", kills=10, seed=1) >= 3, "the kills must hit a process"


def test_a_worker_whose_parent_died_first_ends() -> None:
    """Before it is ready, it has not yet asked the system to end it with its parent."""
    with subprocess.Popen([*WORKER, "--fork"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read() == b"", "it never reports ready"
        assert process.wait() == 0


@pytest.mark.timeout(600)
@pytest.mark.soak
def test_killed_benches(tmp_path: Path) -> None:
    assert kill_benches(tmp_path, kills=2, seed=2) >= 1, "the kills must hit a process"


@pytest.mark.soak
def test_killed_workers_soak(tmp_path: Path) -> None:
    struck = kill_workers(tmp_path / "s", kills=200, seed=3)
    assert struck >= 50, "the kills must hit a process"
    print(f"\n200 kills of workers, {struck} struck a round in progress: nothing lost, nothing doubled")


@pytest.mark.soak
def test_killed_benches_soak(tmp_path: Path) -> None:
    struck = kill_benches(tmp_path, kills=100, seed=4)
    assert struck >= 30, "the kills must hit a process"
    print(
        f"\n100 kills of the whole bench, {struck} at work: nothing lost, nothing doubled, no process left behind"
    )
