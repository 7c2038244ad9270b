"""Run trials round by round, interleaved, each in a separate process, and store each round as soon as it ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from vivace.benchmark.places.trial_jobs import Done, Job, rounds_of
from vivace.benchmark.rounds.schedule import comparable, missing_rounds
from vivace.benchmark.rounds.worker_requests import (
    EnvironmentRequest,
    LargestBatchRequest,
    RehearsalRequest,
    ask,
)
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.store import Store
from vivace.errors import Unsupported
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial

_ASK_TIMEOUT_S = 600.0


def ask_environment(launcher: Launcher, device: str, threads: int | None) -> Environment:
    """Return the environment, determined by a worker, so that this process does not import torch or touch a GPU."""
    request = EnvironmentRequest(device=device, threads=threads)
    return Environment.model_validate(ask(launcher, request, _ASK_TIMEOUT_S))


def ask_largest_batch(launcher: Launcher, trial: Trial, timing: Timing, sources: str | None = None) -> int:
    """Return the largest batch of the trial's recipe that fits the GPU.

    It is found by trying in one process, then reduced by a sixteenth at a time until a rehearsal of a round completes
    in a fresh process.
    """
    if trial.device != "cuda":
        raise Unsupported(
            "--batch max needs a GPU: a CPU's memory has no hard limit, and batches do not make it faster; give numbers"
        )
    request = LargestBatchRequest(trial=trial, threads=timing.threads, sources=sources)
    largest = int(ask(launcher, request, _ASK_TIMEOUT_S)["batch"])

    def holds(batch: int) -> bool:
        rehearsal = RehearsalRequest(
            trial=with_batch(trial, batch), timing=timing, threads=timing.threads, sources=sources
        )
        return ask(launcher, rehearsal, timing.timeout_s)["why_not"] is None

    largest = reduce_until(largest, holds)
    if largest == 0:
        raise Unsupported(f"not even one image of {trial.model.name} fits this GPU with {trial.recipe.text}")
    return largest


def with_batch(trial: Trial, batch: int) -> Trial:
    return trial.model_copy(update={"workload": trial.workload.model_copy(update={"batch": batch})})


def run_trials(
    trials: list[Trial],
    environment: Environment,
    timing: Timing,
    store: Store,
    settings: RunSettings,
    *,
    largest_batch: bool = False,
    rival_of: Mapping[int, tuple[int, ...]] | None = None,
) -> list[Record]:
    """Measure the rounds that are not stored yet and return the trials' Records, in the trials' order.

    Rounds are interleaved, and their order is random, so that movement of the machine affects all trials alike. The
    baseline is measured again beside trials that the store lacks (see `benchmark.rounds.schedule`). A trial that fails
    in a round is not tried again in later rounds of this run.

    Args:
        trials: the first is the baseline.
        settings: with a running launcher.
        largest_batch: the batch was found by `ask_largest_batch` for the first trial; a round that runs out of memory
            says so in its reason.
        rival_of: by the index of a rival of step caches, those of the caches: it does not run if none of them can.
    """
    assert settings.launcher is not None
    progress, rivals = settings.progress, dict(rival_of or {})
    keys = [trial.key(environment) for trial in trials]
    stored = [store.rounds(key) for key in keys]
    todo = missing_rounds(
        stored, timing, goes_on=store.goes_on(keys), rerun=settings.rerun, seed="/".join(keys)
    )
    # In the first round rivals come last: they run only where the cache itself can.
    first = todo[0][1] if todo else 0
    todo.sort(key=lambda round_: (round_[1], round_[1] == first and round_[0] in rivals))
    progress.begin(trials, timing, todo)
    job = Job(
        trials=tuple(trials),
        rounds=tuple(todo),
        timing=timing,
        pictures=store.images,
        drawn=tuple(not settings.rerun and any(r.pictures for r in of.values()) for of in stored),
        rival_of=rivals,
        largest_batch=largest_batch,
        sources=store.sources,
        canaries=settings.canaries,
    )
    try:
        for done in rounds_of(
            job, settings.launcher, progress.start_round, progress.event, settings.deadline
        ):
            keep(done, trials[done.trial], keys[done.trial], store)
            if not done.is_update:
                progress.end_round(done.trial, done.round)
    finally:
        progress.end()
    records = [store.record(key) for key in keys]
    if settings.deadline is not None and records[0] is None:
        return []  # it passed before the baseline was measured
    return comparable(records, timing.rounds)


def keep(done: Done, trial: Trial, key: str, store: Store) -> None:
    """Store a finished round, and the log of one that crashed."""
    store.append(key, done.round)
    if done.round.outcome is Outcome.CRASHED:
        with contextlib.suppress(OSError):
            folder = store.folder / "logs"
            folder.mkdir(exist_ok=True)
            (folder / f"{trial.recipe.digest()[:12]}.log").write_text(
                f"recipe: {trial.recipe.text}\n\n{done.log}", encoding="utf-8"
            )


LARGEST = 4096


def largest(fits: Callable[[int], bool], guess: Callable[[], int] | None = None, limit: int = LARGEST) -> int:
    """Return the largest batch up to a limit that fits, 0 if not even one image does. It tries the guess, or doubles
    the batch until it does not fit, then bisects until the gap is under a sixteenth: batches of 61 and 63 take the same
    time per image."""
    good, bad = 0, limit + 1

    def try_batch(batch: int) -> bool:
        nonlocal good, bad
        if fits(batch):
            good = batch
        else:
            bad = batch
        return good == batch

    def is_open() -> bool:
        return bad - good > max(1, good // 16)

    if not (try_batch(1) and try_batch(2)):
        return good
    step = good
    if guess is not None:
        near = min(max(guess(), good + 1), limit)
        step = max(1, near // 16)
        is_held = try_batch(near)
        while not is_held and is_open():
            is_held = try_batch(max(bad - step, good + 1))
            step *= 2
    while bad > limit and is_open():
        try_batch(min(good + step, limit))
        step *= 2
    while is_open():
        try_batch((good + bad) // 2)
    return good


def reduce_until(batch: int, holds: Callable[[int], bool]) -> int:
    while batch and not holds(batch):
        batch -= max(1, batch // 16)
    return batch


def largest_batch(trial: Trial, report: Callable[[dict[str, Any]], None], sources: Path | None = None) -> int:
    """Return the largest batch of a trial that fits in this process, 0 if not even one image does. Runs in the worker,
    and tries calls of one step plus decoding: the denoiser needs the same memory at every step."""
    import gc

    import torch

    from vivace.benchmark.rounds.round import OpenTrial, explain
    from vivace.foundation.spec.record import Outcome

    opened = OpenTrial(trial, sources)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        report({"event": "phase", "phase": "batch", "done": batch})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call = trial.workload.model_copy(update={"batch": batch}).calls()[0]
        try:
            opened.try_call(call)
        except Exception as error:
            # Libraries with their own allocators raise other exceptions for it.
            if explain(error)[0] is not Outcome.OUT_OF_MEMORY:
                raise
            # The traceback keeps the tensors of the failed call alive.
            gc.collect()
            return False
        peaks[batch] = torch.cuda.max_memory_allocated()
        return True

    def guess() -> int:
        """Extrapolate from batches of 1 and 2, leaving 5 % for fragmentation."""
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        each = max(1, peaks[2] - peaks[1])
        return int(1 + (free + torch.cuda.memory_reserved() - peaks[1]) * 0.95 / each)

    return largest(fits, guess)
