"""Run trials round by round, interleaved, each in a separate process, and store each round as soon as it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from vivace.benchmark.fitting import reduce_until
from vivace.benchmark.launcher import Ending, Launcher, ask, last_line
from vivace.benchmark.requests import (
    EnvironmentRequest,
    LargestBatchRequest,
    RaceRequest,
    RehearsalRequest,
    RoundRequest,
)
from vivace.benchmark.schedule import comparable, missing_rounds
from vivace.benchmark.store import Store
from vivace.errors import Unsupported
from vivace.spec.environment import Environment
from vivace.spec.record import Outcome, Record, Round
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial

_ASK_TIMEOUT_S = 600.0


class Progress(Protocol):
    """Receives events while trials run, for a terminal or a log.

    `index` is that of the trial; the baseline is 0. `todo` lists the rounds that will run, as (trial, index).
    """

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


class Silent:
    """A Progress that shows nothing."""

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


def ask_environment(launcher: Launcher, device: str, threads: int | None) -> Environment:
    """Return the environment, determined by a worker, so that this process imports no torch and touches no GPU."""
    request = EnvironmentRequest(device=device, threads=threads)
    return Environment.model_validate(ask(launcher, request, _ASK_TIMEOUT_S))


def ask_race(
    launcher: Launcher, model: str, recipes: Sequence[str], device: str, threads: int
) -> dict[str, float]:
    """Return the seconds of a short call of each recipe that can run here (see `benchmark.race`)."""
    request = RaceRequest(model=model, recipes=tuple(recipes), device=device, threads=threads)
    return {name: float(value) for name, value in ask(launcher, request, _ASK_TIMEOUT_S).items()}


def ask_largest_batch(launcher: Launcher, trial: Trial, timing: Timing) -> int:
    """Return the largest batch of the trial's recipe that fits the GPU.

    It is found by trying in one process, then reduced by a sixteenth at a time until a rehearsal of a round completes
    in a fresh process.

    Raises:
        Unsupported: the device is a CPU, or not even one image fits.
        WorkerError: a process died, or took longer than a round may.
    """
    if trial.device != "cuda":
        raise Unsupported(
            "--batch max needs a GPU: a CPU's memory has no hard limit, and batches do not make it faster; give numbers"
        )
    request = LargestBatchRequest(trial=trial, threads=timing.threads)
    found = int(ask(launcher, request, _ASK_TIMEOUT_S)["batch"])

    def holds(batch: int) -> bool:
        rehearsal = RehearsalRequest(trial=with_batch(trial, batch), timing=timing, threads=timing.threads)
        return ask(launcher, rehearsal, timing.timeout_s)["why_not"] is None

    found = reduce_until(found, holds)
    if found == 0:
        raise Unsupported(f"not even one image of {trial.model.name} fits this GPU with {trial.recipe.text}")
    return found


def with_batch(trial: Trial, batch: int) -> Trial:
    """Return the trial with another batch."""
    return trial.model_copy(update={"workload": trial.workload.model_copy(update={"batch": batch})})


def run_trials(
    trials: list[Trial],
    environment: Environment,
    timing: Timing,
    store: Store,
    launcher: Launcher,
    *,
    rerun: bool = False,
    largest_batch: bool = False,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure the rounds that are not stored yet and return the trials' Records, in the trials' order.

    Rounds are interleaved, every second one in reverse order (A B B A), so that drift of the machine affects all trials
    alike. The baseline is measured again beside trials that the store lacks (see `benchmark.schedule`). A trial that
    fails in a round is not tried again in later rounds of this run.

    Args:
        trials: the first is the baseline.
        rerun: measure stored rounds again.
        largest_batch: the batch was found by `ask_largest_batch` for the first trial; a round that runs out of memory
            says so in its reason.
    """
    progress = progress or Silent()
    keys = [trial.key(environment) for trial in trials]
    stored = [store.rounds(key) for key in keys]
    todo = missing_rounds(stored, timing, goes_on=store.goes_on(keys), rerun=rerun)
    progress.begin(trials, timing, todo)
    has_pictures = [not rerun and any(r.pictures for r in of.values()) for of in stored]
    failed: set[int] = set()
    try:
        for index, round_index in todo:
            if index in failed:
                continue
            progress.start_round(index, round_index)
            pictures = None if has_pictures[index] else store.folder / "pictures"
            round_ = _run_round(trials[index], round_index, timing, store, launcher, progress, pictures)
            has_pictures[index] |= bool(round_.pictures)
            if largest_batch and round_.outcome is Outcome.OUT_OF_MEMORY:
                why = _why_not_largest(trials[index], None if index == 0 else trials[0])
                round_ = round_.model_copy(update={"reason": f"{round_.reason}; {why}"})
            store.append(keys[index], round_)
            if round_.outcome is not Outcome.MEASURED:
                failed.add(index)
            progress.end_round(index, round_)
    finally:
        progress.end()
    return comparable([store.record(key) for key in keys], timing.rounds)


def _run_round(
    trial: Trial,
    round_index: int,
    timing: Timing,
    store: Store,
    launcher: Launcher,
    progress: Progress,
    pictures: Path | None,
) -> Round:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    request = RoundRequest(
        trial=trial,
        round=round_index,
        timing=timing,
        pictures=None if pictures is None else str(pictures.absolute()),
        threads=timing.threads,
    )
    kills_before = _kernel_oom_kills()
    ending = launcher.run(request, timing.timeout_s, progress.event)
    if ending.value is not None:
        round_ = Round.model_validate(ending.value)
    else:
        outcome, reason = _explain(ending, timing, _kernel_oom_kills() > kills_before)
        round_ = Round(index=round_index, outcome=outcome, reason=reason, started_at=started)
    if round_.outcome is Outcome.CRASHED:
        _keep_log(store, trial, ending.log)
    return round_


def _why_not_largest(trial: Trial, searched: Trial | None) -> str:
    """Return why a trial runs out of memory at the batch that `--batch max` found.

    Args:
        searched: the trial that the batch was found for; None if it is this one.
    """
    batch = trial.workload.batch
    if searched is not None:
        return f"--batch max found {batch} for {searched.recipe.text}, and this recipe needs more memory: give a number"
    return (
        f"--batch max found that {batch} fits, in a rehearsal of this round in another process: memory fragments "
        "differently each time, or another process uses this GPU; give a smaller number"
    )


def _explain(ending: Ending, timing: Timing, oom_killed: bool) -> tuple[Outcome, str]:
    if ending.timed_out:
        return (
            Outcome.TIMED_OUT,
            f"the round took longer than {timing.timeout_s:g} s and was killed; give a longer --timeout",
        )
    if ending.signal == signal.SIGKILL and oom_killed:
        return Outcome.OUT_OF_MEMORY, "the system ran out of memory and killed the process"
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        message = last_line(ending.log)
        return Outcome.CRASHED, f"the process was ended by {name}" + (f" ({message})" if message else "")
    message = last_line(ending.log) or "none"
    return (
        Outcome.CRASHED,
        f"the process ended with status {ending.status}; the last line of its log: {message}",
    )


def _kernel_oom_kills() -> int:
    """Return how many processes Linux's out-of-memory killer has killed; 0 where that is not known."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total


def _keep_log(store: Store, trial: Trial, log: str) -> None:
    """Save the worker's log in the store, for debugging the crash."""
    with contextlib.suppress(OSError):
        folder = store.folder / "logs"
        folder.mkdir(exist_ok=True)
        (folder / f"{trial.recipe.digest()[:12]}.log").write_text(f"recipe: {trial.recipe.text}\n\n{log}")
