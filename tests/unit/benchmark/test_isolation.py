"""A round that crashes, hangs or runs out of memory has an outcome, and does not affect the next trial."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import vivace
from tests.faulty_worker import COMMAND, Fault
from vivace.benchmark import Store, Timing, studies
from vivace.benchmark.studies import start_launcher
from vivace.errors import WorkerError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.record import Outcome, Record
from vivace.techniques import TECHNIQUES

TIMING = Timing(rounds=1, repeats=1, max_warmup=1, timeout_s=60)
EXPECTED = {
    "segfault": (Outcome.CRASHED, "SIGSEGV"),
    "kill": (Outcome.CRASHED, "SIGKILL"),
    "raise": (Outcome.CRASHED, "RuntimeError: the flux capacitor is empty"),
    "oom": (Outcome.OUT_OF_MEMORY, "allocation failed"),
    "huge": (Outcome.OUT_OF_MEMORY, "allocate"),
    "exit": (Outcome.CRASHED, "ended with status 0"),
    "garbage": (Outcome.MEASURED, ""),
}


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    with studies.start_launcher("cpu", COMMAND) as launcher:
        yield launcher


@pytest.fixture(autouse=True)
def _fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TECHNIQUES, "fault", Fault)


def run(launcher: Launcher, store: Path, *recipes: str, timing: Timing = TIMING) -> list[Record]:
    return vivace.bench(
        "tiny-sd", recipes, num_inference_steps=1, timing=timing, store=store, launcher=launcher, device="cpu",
        quality=False, plan=False, rivals=False,
    )  # fmt: skip


def test_each_fault_has_an_outcome_and_affects_no_other_trial(launcher: Launcher, tmp_path: Path) -> None:
    recipes = [f"fault({kind})" for kind in EXPECTED]
    records = run(launcher, tmp_path / "s", "baseline", *recipes, "tiny_vae")
    by_recipe = {record.trial.recipe.text: record for record in records}
    for kind, (outcome, words) in EXPECTED.items():
        record = by_recipe[f"fault({kind})"]
        assert record.outcome is outcome, kind
        assert words in (record.reason or ""), kind
    assert by_recipe["baseline"].outcome is Outcome.MEASURED
    assert by_recipe["tiny_vae"].outcome is Outcome.MEASURED
    log = next(iter((tmp_path / "s" / "logs").iterdir())).read_text()
    assert "recipe: fault(" in log


@pytest.mark.long
@pytest.mark.parametrize("kind", ["hang", "late_hang", "stubborn"])
@pytest.mark.quick("hang")
@pytest.mark.exhaustive("late_hang", "stubborn")
def test_a_hang_ends_at_the_time_limit(launcher: Launcher, tmp_path: Path, kind: str) -> None:
    timing = TIMING.model_copy(update={"timeout_s": 8.0})
    records = run(launcher, tmp_path / "s", f"fault({kind})", "baseline", timing=timing)
    assert records[0].outcome is Outcome.TIMED_OUT
    assert "8 s" in (records[0].reason or "")
    assert records[1].outcome is Outcome.MEASURED


def test_a_rerun_retries_what_crashed_and_skips_the_rest(launcher: Launcher, tmp_path: Path) -> None:
    first = run(launcher, tmp_path / "s", "baseline", "fault(raise)", "attention(cudnn)")
    started = [record.rounds[0].started_at for record in first]
    with Store.read_only(tmp_path / "s") as store:
        before = [store.rounds(key) for key in store.runs()[0].keys]
    second = run(launcher, tmp_path / "s", "baseline", "fault(raise)", "attention(cudnn)")
    assert second[0] == first[0], "measured: kept"
    assert second[2] == first[2], "unsupported: kept, because it would end the same way"
    assert second[1].rounds[0] != first[1].rounds[0], "crashed: measured again"
    assert len(started) == len(before) == 3


def test_a_worker_that_cannot_start(tmp_path: Path) -> None:
    broken = ("/bin/sh", "-c", "echo no such module >&2; exit 3")
    with (
        start_launcher("auto", broken) as launcher,
        pytest.raises(WorkerError, match="did not start: no such module"),
    ):
        vivace.bench("tiny-sd", ["baseline"], store=tmp_path / "s", launcher=launcher)
