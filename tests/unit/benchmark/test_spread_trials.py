"""Trials spread over several places: pairing, resuming, and places that are lost. The places are on this CPU."""

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import stub_worker
from tests.make import make_environment, make_round, make_trial
from vivace.benchmark import Run, Store, Study, Timing
from vivace.benchmark.places.local_pool import LocalPool
from vivace.benchmark.places.spread_trials import MAX_ATTEMPTS, SpreadTrials, Ticket
from vivace.benchmark.places.trial_jobs import Done
from vivace.benchmark.progress import Progress
from vivace.benchmark.rounds.worker_requests import WORKER
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.studies import run_study
from vivace.errors import UsageError, WorkerError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment, Place
from vivace.foundation.spec.record import Outcome, Round

RECIPES = ("baseline", "steps(1)", "guidance(1)", "tiny_vae")
TIMING = Timing(rounds=2, repeats=1, max_warmup=1)
PLACES = [Place(uuid=f"cpu-{number}", index=number) for number in range(2)]


def at(number: int) -> Environment:
    return make_environment().at(Place(uuid=f"cpu-{number}", index=number))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.create(tmp_path / "store") as opened:
        yield opened


def spread_of(store: Store, num_places: int | None = 2, **options: Any) -> SpreadTrials:
    trials = [make_trial(recipe) for recipe in RECIPES]
    return SpreadTrials(trials, TIMING, store, [make_environment()], num_places, RunSettings(**options))


def measure(spread: SpreadTrials, ticket: Ticket, stop_after: int | None = None) -> None:
    """Return a ticket's rounds as a place does, each with the baseline last; a place that is lost, only so many."""
    for trial, index in sorted(ticket.job.rounds, key=lambda place: (place[1], -place[0]))[:stop_after]:
        spread.deliver(ticket, Done(trial, now(index)))
    if stop_after is None:
        spread.finish(ticket)


def now(index: int) -> Round:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    return make_round(index).model_copy(update={"started_at": started})


def rounds_at(store: Store, environment: Environment) -> dict[str, list[int]]:
    """Return the stored rounds of a place by recipe."""
    trials = {recipe: make_trial(recipe).key(environment) for recipe in RECIPES}
    return {recipe: list(store.rounds(key)) for recipe, key in trials.items() if store.rounds(key)}


def test_each_place_takes_its_share_with_the_baseline(store: Store) -> None:
    spread = spread_of(store)
    first, second = spread.take(at(0)), spread.take(at(1))
    assert first is not None
    assert second is not None
    assert spread.take(at(0)) is None
    assert (first.members, second.members) == ((0, 1, 2), (0, 3))
    assert [t.recipe.text for t in second.job.trials] == ["baseline", "tiny_vae"]
    assert [index for _, index in second.job.rounds] == [0, 0, 1, 1], "interleaved with its own baseline"
    assert second.job.canaries
    for ticket in (first, second):
        measure(spread, ticket)
    assert rounds_at(store, at(0)) == {"baseline": [0, 1], "steps(1)": [0, 1], "guidance(1)": [0, 1]}
    assert rounds_at(store, at(1)) == {"baseline": [0, 1], "tiny_vae": [0, 1]}
    runs = spread.note_runs("vivace bench", None)
    assert [[r.trial.recipe.text for r in records] for records, _ in runs] == [
        ["baseline", "steps(1)", "guidance(1)"],
        ["baseline", "tiny_vae"],
    ]
    for records, _ in runs:
        assert len({record.environment.place for record in records}) == 1, "a comparison has one place"


def test_a_lost_places_trials_run_elsewhere_and_nothing_is_lost_or_doubled(store: Store) -> None:
    spread = spread_of(store)
    first, second = spread.take(at(0)), spread.take(at(1))
    assert first is not None
    assert second is not None
    # Lost before the last baseline.
    measure(spread, first, stop_after=5)
    spread.lose(first, "its node ended")
    measure(spread, second)
    again = spread.take(at(1))
    assert again is not None
    assert again.members == (0, 1, 2)
    beside = {trial for trial, index in again.job.rounds if index == 2}
    assert beside == {0, 1, 2}, "the baseline is measured again beside them, under new indices"
    measure(spread, again)
    assert rounds_at(store, at(0)) == {"baseline": [0], "steps(1)": [0, 1], "guidance(1)": [0, 1]}, "kept"
    assert rounds_at(store, at(1)) == {
        "baseline": [0, 1, 2, 3],
        "tiny_vae": [0, 1],
        "steps(1)": [2, 3],
        "guidance(1)": [2, 3],
    }
    ((records, _),) = spread.note_runs("vivace bench", None)
    assert [len(r.rounds) for r in records] == [4, 2, 2, 2]
    assert {r.environment.place for r in records} == {PLACES[1]}


def test_a_trial_that_loses_its_place_too_often_has_crashed(store: Store) -> None:
    spread = spread_of(store, 1)
    for attempt in range(MAX_ATTEMPTS):
        ticket = spread.take(at(attempt))
        assert ticket is not None
        assert ticket.members == (0, 1, 2, 3)
        spread.lose(ticket, "the power went out")
    assert spread.take(at(0)) is None
    ((records, _),) = spread.note_runs("vivace bench", None)
    assert [r.outcome for r in records] == [Outcome.CRASHED] * 3, "the baseline was never measured"
    assert records[0].reason == f"its place was lost {MAX_ATTEMPTS} times, at last because the power went out"


def test_a_rerun_of_the_command_goes_on(store: Store) -> None:
    spread = spread_of(store)
    first, second = spread.take(at(0)), spread.take(at(1))
    assert first is not None
    assert second is not None
    measure(spread, first)
    measure(spread, second, stop_after=2)
    spread.note_runs("vivace bench", None)  # interrupted
    spread = spread_of(store)
    assert spread.waiting == 1
    ticket = spread.take(at(1))
    assert ticket is not None
    assert ticket.members == (0, 3)
    measure(spread, ticket)
    assert spread.take(at(0)) is None
    again = spread_of(store)
    assert again.waiting == 0, "all is stored"
    assert [
        [r.trial.recipe.text for r in records] for records, _ in again.note_runs("vivace bench", None)
    ] == [
        ["baseline", "steps(1)", "guidance(1)"],
        ["baseline", "tiny_vae"],
    ]
    assert spread_of(store, rerun=True).waiting == 3
    newer = make_environment().model_copy(update={"libraries": {"torch": "2.14.0"}})
    stale = SpreadTrials([make_trial(r) for r in RECIPES], TIMING, store, [newer], 2, RunSettings())
    assert stale.waiting == 3, "measured with another PyTorch"


def test_a_round_from_another_gpu_is_refused(store: Store) -> None:
    spread = spread_of(store)
    gpu = make_environment().at(Place(uuid="GPU-1", index=1))
    ticket = spread.take(gpu)
    assert ticket is not None
    wrong = now(0).model_copy(update={"conditions": {"gpu_uuid": "GPU-0"}})
    with pytest.raises(WorkerError, match=r"a round for GPU 1 \(GPU-1\) ran on GPU-0"):
        spread.deliver(ticket, Done(0, wrong))
    right = now(0).model_copy(update={"conditions": {"gpu_uuid": "GPU-1"}})
    spread.deliver(ticket, Done(0, right))
    assert rounds_at(store, gpu) == {"baseline": [0]}


def test_a_place_is_part_of_a_key_and_no_place_changes_none() -> None:
    trial, environment = make_trial("baseline"), make_environment()
    assert "place" not in environment.model_dump()
    assert len({trial.key(environment), trial.key(at(0)), trial.key(at(1))}) == 3
    assert Environment.model_validate_json(at(1).model_dump_json()) == at(1)
    pinned = environment.model_copy(
        update={"variables": {"CUDA_VISIBLE_DEVICES": "GPU-1", "OMP_NUM_THREADS": "1"}}
    )
    assert pinned.at(None).variables == {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gpus": 2, "ray": "auto"}, "--gpus and --ray exclude each other"),
        ({"gpus": 2, "device": "cpu"}, "--device cpu has no GPUs"),
        ({"gpus": 0}, "give a number from 1, or all"),
        ({"gpus": "all", "batches": (1, "max")}, "--gpus: --batch max is found on one GPU"),
        ({"ray": "auto", "recipes": ("baseline", "parallel(cfg)")}, "takes several GPUs for one image"),
    ],
)
def test_what_does_not_go_with_several_places_is_refused(
    arguments: dict[str, Any], message: str, tmp_path: Path
) -> None:
    options = {name: arguments.pop(name) for name in ("gpus", "ray") if name in arguments}
    study = Study.of("tiny-sd", arguments.pop("recipes", RECIPES), **arguments)
    with pytest.raises(UsageError, match=message.replace("(", r"\(")):
        run_study(study, RunSettings(store=tmp_path / "store", **options))


class Killing(Progress):
    """Kills a worker process, and all below it, when so many rounds have ended."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.ended: list[tuple[int, Round]] = []

    def end_round(self, index: int, round_: Round) -> None:
        self.ended.append((index, round_))
        if len(self.ended) == self.after:
            (victim, *_) = workers()
            for process in [*victim.children(recursive=True), victim]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)


def workers() -> list[psutil.Process]:
    """Return the worker processes of the simulated places."""
    children = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("VIVACE_TEST_PLACE"):
                children.append(child)
    return children


def bench(store: Path, worker: Sequence[str], progress: Progress | None = None) -> Run:
    study = Study.of(
        "tiny-sd", RECIPES, num_inference_steps=2, quality=False, device="cpu", timing=TIMING, rivals=False
    )

    def launcher_at(place: Place) -> Launcher:
        return Launcher(worker, tries_gpu=False, variables={"VIVACE_TEST_PLACE": place.uuid})

    pool = LocalPool(PLACES, "cpu", launcher_at)
    with contextlib.closing(pool):
        return run_study(
            study, RunSettings(store=store, progress=progress or Progress(), pool=pool, canaries=False)
        )


def check_pairing(run: Run) -> None:
    assert len(run.comparisons) == 2
    check_comparisons(run)


def check_comparisons(run: Run) -> None:
    """Every comparison is of one place, and each recipe's rounds have the baseline's beside them."""
    for compared in run.comparisons:
        assert len({record.environment.place for record in compared.records}) == 1
        baseline, *others = compared.records
        assert baseline.trial.recipe.text == "baseline"
        if any(r.outcome is not Outcome.MEASURED for r in baseline.rounds):
            continue  # it was the one that was hit, which leaves this place without speed-ups
        for record in others:
            measured = {r.index for r in record.rounds if r.outcome is Outcome.MEASURED}
            assert measured <= {r.index for r in baseline.rounds}
        assert all(row.speedup is not None for row in compared.rows()[1:] if row.latency is not None)
    texts = [record.trial.recipe.text for record in run if record.trial.recipe.text != "baseline"]
    assert sorted(texts) == sorted(RECIPES[1:]), "each trial once"


@pytest.mark.parametrize("worker", [stub_worker.COMMAND, WORKER], ids=["stub", "real"])
@pytest.mark.exhaustive("real")
def test_two_workers_share_the_trials_and_one_is_killed(tmp_path: Path, worker: Sequence[str]) -> None:
    progress = Killing(after=2)
    run = bench(tmp_path / "store", worker, progress)
    check_pairing(run)
    crashed = [(trial, r) for trial, r in progress.ended if r.outcome is not Outcome.MEASURED]
    assert len(crashed) == 1, "one round was hit, and the others of both places went on"
    assert "SIGKILL" in (crashed[0][1].reason or "")
    assert not workers(), "no worker is left"
    with Store.read_only(tmp_path / "store") as store:
        kept = {
            (key, index): round_
            for invocation in store.runs()
            for key in invocation.keys
            for index, round_ in store.rounds(key).items()
        }
    assert len(kept) == len(progress.ended), "every finished round is stored once"
    # What crashed is measured again beside its baseline, or a baseline beside its place's two recipes; nothing else.
    again = Killing(after=0)
    run = bench(tmp_path / "store", worker, again)
    check_comparisons(run)  # the other place may have taken what crashed
    assert all(record.outcome is Outcome.MEASURED for record in run)
    assert 0 < len(again.ended) <= (2 if crashed[0][0] else 3) * TIMING.rounds
    with Store.read_only(tmp_path / "store") as store:
        for (key, index), round_ in kept.items():
            assert store.rounds(key)[index] == round_ or round_.outcome is not Outcome.MEASURED


class Interrupting(Progress):
    def __init__(self) -> None:
        self.ended = 0

    def end_round(self, index: int, round_: Round) -> None:
        self.ended += 1
        if self.ended == 3:
            raise KeyboardInterrupt


def test_an_interrupt_keeps_finished_rounds_and_ends_the_workers(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        bench(tmp_path / "store", stub_worker.COMMAND, Interrupting())
    assert not workers()
    with Store.read_only(tmp_path / "store") as store:
        kept = {key: store.rounds(key) for run in store.runs() for key in run.keys}
    assert sum(map(len, kept.values())) == 3, "what came after the interrupt is not stored"
    following = Killing(after=0)
    run = bench(tmp_path / "store", stub_worker.COMMAND, following)
    check_pairing(run)
    assert all(len(r.rounds) == TIMING.rounds for c in run.comparisons for r in c.records[1:])
    with Store.read_only(tmp_path / "store") as store:
        for key, rounds in kept.items():
            assert rounds.items() <= store.rounds(key).items(), "finished rounds are kept as they were"
