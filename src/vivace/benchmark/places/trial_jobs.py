"""A job: trials with their baseline, whose rounds run in one place, one after the other."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import Field

from vivace.benchmark.progress import Deadline
from vivace.benchmark.rounds.worker_requests import RoundRequest
from vivace.foundation.processes.launcher import Ending, Launcher, last_line
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.record import Canary, Outcome, Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.models.reading_limits import complaint


class Job(Spec):
    """What one place measures. Rounds of a trial and of its baseline are never divided between places.

    Attributes:
        trials: the first is the baseline.
        rounds: as (trial, index), in the order in which they run.
        images: the folder to save images below; None to save none.
        sources: the folder of the images that trials start from; None if none does.
        drawn: of each trial, whether its images are stored already.
        rival_of: by the index of a rival of step caches, those of the caches: it does not run if none of them can.
        largest_batch: the batch was found by `--batch max` for the first trial; a round that runs out of memory says so
            in its reason.
        canaries: measure the first trial of each round briefly once more at its end.
    """

    trials: tuple[Trial, ...]
    rounds: tuple[tuple[int, int], ...]
    timing: Timing
    pictures: str | None
    drawn: tuple[bool, ...]
    rival_of: dict[int, tuple[int, ...]] = Field(default={})
    largest_batch: bool = False
    sources: str | None = None
    canaries: bool = False


@dataclass(frozen=True)
class Done:
    """A finished round of the job's trial with that index, and the end of its log.

    `is_update`: it was yielded before, and now has a canary.
    """

    trial: int
    round: Round
    log: str = ""
    is_update: bool = False


CANARY_CALLS, CANARY_WARMUP = 3, 4
MOST_BETWEEN = 3
"""Trials between two measurements of a round's first one, at most."""


def rounds_of(
    job: Job,
    launcher: Launcher,
    start: Callable[[int, int], None] = lambda trial, index: None,
    event: Callable[[dict[str, Any]], None] = lambda event: None,
    deadline: Deadline | None = None,
) -> Iterator[Done]:
    """Run a job's rounds and yield each as soon as it ends. A trial that fails in a round is not tried again.

    Args:
        start: called with (trial, index) before each round.
        event: called with what the worker reports during rounds.
        deadline: rounds that do not fit are left out; one that is under way when it passes is stopped, and is none.
    """
    failed: set[int] = set()
    drawn = list(job.drawn)
    position = 0
    for index, group in itertools.groupby(job.rounds, key=lambda place: place[1]):
        order = [trial for trial, _ in group]
        anchor: Done | None = None
        since = 0
        for place, trial in enumerate(order):
            position += 1
            if trial in failed or (trial in job.rival_of and failed.issuperset(job.rival_of[trial])):
                continue
            if deadline is not None and not deadline.allows(
                trial, index, [other for other in order[place:] if other not in failed]
            ):
                continue
            if anchor is not None and since >= MOST_BETWEEN:
                yield (anchor := _with_canary(job, anchor, launcher, event, deadline, position - 1))
                since = 0
            if deadline is not None:
                deadline.begin()
            start(trial, index)
            images = None if drawn[trial] else job.pictures
            round_, log = _run_round(job, trial, index, launcher, event, images, deadline)
            if deadline is not None:
                if round_.outcome is Outcome.TIMED_OUT and deadline.left_for_rounds_s <= 0:
                    return
                deadline.end(trial, index)
            drawn[trial] |= bool(round_.pictures)
            if job.largest_batch and round_.outcome is Outcome.OUT_OF_MEMORY:
                why = _why_not_largest(job.trials[trial], None if trial == 0 else job.trials[0])
                round_ = round_.model_copy(update={"reason": f"{round_.reason}; {why}"})
            done = Done(trial, round_, log)
            yield done
            if round_.outcome is not Outcome.MEASURED:
                failed.add(trial)
            elif anchor is None:
                anchor = done if job.canaries else None
            else:
                since += 1
        if anchor is not None and since:
            yield _with_canary(job, anchor, launcher, event, deadline, position)


def _with_canary(
    job: Job,
    anchor: Done,
    launcher: Launcher,
    event: Callable[[dict[str, Any]], None],
    deadline: Deadline | None,
    position: int,
) -> Done:
    """Measure the round's first trial briefly once more; return it with its calls, or the reason for having none."""
    round_ = anchor.round
    rest = [trial for trial, _ in job.rounds[position:]]
    if deadline is not None and not deadline.has_time_for([anchor.trial, *rest]):
        why = (
            "no time was left to follow the machine's speed through the round; its interval may be too narrow"
        )
        return replace(
            anchor, round=round_.model_copy(update={"warnings": (*round_.warnings, why)}), is_update=True
        )
    warmup = min(CANARY_WARMUP, job.timing.max_warmup)
    short = job.model_copy(
        update={"timing": job.timing.model_copy(update={"repeats": CANARY_CALLS, "max_warmup": warmup})}
    )
    brief, _ = _run_round(short, anchor.trial, round_.index, launcher, event, None, deadline)
    if brief.outcome is Outcome.MEASURED:
        canary = Canary(started_at=brief.started_at, samples_s=tuple(s.total_s for s in brief.samples))
        update: dict[str, Any] = {"canaries": (*round_.canaries, canary)}
    else:
        why = f"the recipe's canary {brief.outcome.value.replace('_', ' ')}: {brief.reason}"
        update = {"warnings": (*round_.warnings, why)}
    return replace(anchor, round=round_.model_copy(update=update), is_update=True)


def _run_round(
    job: Job,
    trial: int,
    round_index: int,
    launcher: Launcher,
    event: Callable[[dict[str, Any]], None],
    images: str | None,
    deadline: Deadline | None = None,
) -> tuple[Round, str]:
    timing = job.timing
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    request = RoundRequest(
        trial=job.trials[trial],
        round=round_index,
        timing=timing,
        pictures=images,
        threads=timing.threads,
        sources=job.sources,
    )
    kills_before = _kernel_oom_kills()
    limit_s = timing.timeout_s if deadline is None else min(timing.timeout_s, deadline.left_for_rounds_s)
    ending = launcher.run(request, limit_s, event)
    if ending.value is not None:
        round_ = Round.model_validate(ending.value)
    else:
        outcome, reason = _explain(ending, job.trials[trial], timing, _kernel_oom_kills() > kills_before)
        round_ = Round(index=round_index, outcome=outcome, reason=reason, started_at=started)
    return round_, ending.log


def _why_not_largest(trial: Trial, searched: Trial | None) -> str:
    batch = trial.workload.batch
    if searched is not None:
        return f"--batch max found {batch} for {searched.recipe.text}, and this recipe needs more memory: give a number"
    return (
        f"--batch max found that {batch} fits, in a rehearsal of this round in another process: memory fragments "
        "differently each time, or another process uses this GPU; give a smaller number"
    )


def _explain(ending: Ending, trial: Trial, timing: Timing, oom_killed: bool) -> tuple[Outcome, str]:
    if ending.excess is not None:
        return Outcome.CRASHED, complaint(trial.model.name, ending.excess)
    if ending.timed_out:
        return (
            Outcome.TIMED_OUT,
            f"the round took longer than {timing.timeout_s:g} s and was killed; give a longer --timeout",
        )
    if ending.ended_by == "SIGKILL" and oom_killed:
        return Outcome.OUT_OF_MEMORY, "the system ran out of memory and killed the process"
    if (name := ending.ended_by) is not None:
        message = last_line(ending.log)
        return Outcome.CRASHED, f"the process was ended by {name}" + (f" ({message})" if message else "")
    message = last_line(ending.log) or "none"
    return (
        Outcome.CRASHED,
        f"the process ended with status {ending.status}; the last line of its log: {message}",
    )


def _kernel_oom_kills() -> int:
    """Return how many processes Linux's out-of-memory killer has killed; 0 if unknown."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text(encoding="utf-8").splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total
