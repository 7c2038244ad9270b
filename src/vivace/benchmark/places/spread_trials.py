"""Spread the trials of a comparison over several places: the GPUs of a host, or the nodes of a Ray cluster.

A place takes trials together with their baseline and returns their rounds, so that every place measures its own
baseline. Its records have keys of their own (`Environment.place`), and comparisons are made within a place alone.

Only this process writes the store, and it assigns the rounds' indices when a place has said where it is. So nothing is
stored twice when a place is lost and its trials run elsewhere.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

from vivace.benchmark.places.trial_jobs import Done, Job
from vivace.benchmark.rounds.runner import keep
from vivace.benchmark.rounds.schedule import comparable, missing_rounds
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Invocation, Purpose
from vivace.benchmark.store.images import save_image
from vivace.errors import WorkerError
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial

MAX_ATTEMPTS = 3
"""Places on which a trial is tried before it counts as crashed."""


class Pool(Protocol):
    """Places that each take a trial with its baseline and return rounds."""

    @property
    def num_places(self) -> int | None:
        """The number of places, each of which takes its share of the trials at once, with one baseline. None if
        unknown: then a place takes one trial."""
        ...

    def environments(self, threads: int | None) -> list[Environment]:
        """Return the environments of the places, each without its place, to find what was measured there before."""
        ...

    def run(self, spread: SpreadTrials) -> None:
        """Let places take work from `spread`, in the caller's thread, until no work or no place is left."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Ticket:
    """The work that a place has taken: a job, the indices of its trials in the comparison, and their keys."""

    job: Job
    environment: Environment
    members: tuple[int, ...]
    keys: tuple[str, ...]


class SpreadTrials:
    """The trials of one comparison that still need rounds, and where the others were measured.

    Args:
        trials: the first is the baseline.
        live: the environments of the pool's places, without the place. Measurements in other environments are stale.
        num_places: see `Pool`.
    """

    def __init__(
        self,
        trials: Sequence[Trial],
        timing: Timing,
        store: Store,
        live: Sequence[Environment],
        num_places: int | None,
        settings: RunSettings,
    ) -> None:
        self._canaries, self._rerun, self._progress = settings.canaries, settings.rerun, settings.progress
        self._trials = tuple(trials)
        self._timing = timing
        self._store = store
        self._attempts: dict[int, int] = {}
        self._measured_at: dict[int, Environment] = {}
        self._next_index: dict[str, int] = {}
        self._taken: list[Ticket] = []
        self._delivered: set[tuple[str, int]] = set()
        places = list(range(1, len(trials))) or [0]
        for trial in places:
            finished = None if self._rerun else self._finished_at(trial, live)
            if finished is not None:
                self._measured_at[trial] = finished
        self._waiting = [trial for trial in places if trial not in self._measured_at]
        self._share = 1 if num_places is None else math.ceil(len(self._waiting) / max(1, num_places))
        self._begin(num_places)

    @property
    def waiting(self) -> int:
        """The number of trials that no place has taken."""
        return len(self._waiting)

    def take(self, environment: Environment) -> Ticket | None:
        """Return work for a place; None if there is none."""
        while self._waiting:
            # Those first that were begun here.
            begun = [t for t in self._waiting if self._store.rounds(self._trials[t].key(environment))]
            chosen = [*begun, *(t for t in self._waiting if t not in begun)][: max(1, self._share)]
            self._waiting = [t for t in self._waiting if t not in chosen]
            ticket = self._ticket(sorted({0, *chosen}), environment)
            if ticket.job.rounds:
                self._taken.append(ticket)
                return ticket
            self._measured_at |= dict.fromkeys(chosen, environment)
        return None

    def deliver(self, ticket: Ticket, done: Done, images: Mapping[str, bytes] | None = None) -> None:
        """Store a finished round, with the PNG files of a place that does not share this host's files."""
        place, ran_on = ticket.environment.place, done.round.conditions.get("gpu_uuid")
        if place is not None and place.uuid.startswith("GPU-") and ran_on not in (None, place.uuid):
            raise WorkerError(f"a round for {place.name} ran on {ran_on}; is CUDA_VISIBLE_DEVICES changed?")
        for image in (images or {}).values():
            save_image(self._store.folder / "pictures", image)
        trial = ticket.members[done.trial]
        if done.is_update:
            keep(done, self._trials[trial], ticket.keys[done.trial], self._store)
            return
        self._progress.start_round(trial, done.round.index)
        keep(done, self._trials[trial], ticket.keys[done.trial], self._store)
        self._delivered.add((ticket.keys[done.trial], done.round.index))
        self._progress.end_round(trial, done.round)

    def finish(self, ticket: Ticket) -> None:
        self._measured_at |= dict.fromkeys(self._awaited_trials(ticket), ticket.environment)

    def lose(self, ticket: Ticket, why: str) -> None:
        """Note that a place was lost, and why. Finished rounds stay; trials that lack some run elsewhere."""
        place = ticket.environment.place
        again: list[int] = []
        given_up: list[int] = []
        for trial in self._awaited_trials(ticket):
            if not self._lacks(trial, ticket.environment, rerun=self._rerun):
                self._measured_at[trial] = ticket.environment
                continue
            self._attempts[trial] = self._attempts.get(trial, 0) + 1
            (again if self._attempts[trial] < MAX_ATTEMPTS else given_up).append(trial)
        self._waiting += again
        self._progress.event(
            {
                "lost": "a place" if place is None else place.name,
                "why": why,
                "again": self._delivered_of(ticket, {0, *again} if again else set()),
            }
        )
        for trial in given_up:
            key = ticket.keys[ticket.members.index(trial)]
            reason = f"its place was lost {MAX_ATTEMPTS} times, at last because {why}"
            self._store.append(
                key,
                Round(
                    index=1 + max(self._store.rounds(key), default=-1),
                    outcome=Outcome.CRASHED,
                    reason=reason,
                    started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                ),
            )
            self._measured_at[trial] = ticket.environment

    def note_runs(
        self,
        command: str,
        scorer: str | None,
        purpose: Purpose = Purpose.COMPARISON,
        *,
        interrupted: bool = False,
    ) -> list[tuple[list[Record], Invocation]]:
        """Store a run for each place that measured a trial (if interrupted, any round); return it with the records,
        their baseline first."""
        runs = []
        for environment, members in self._by_place(interrupted):
            trials = [self._trials[member] for member in members]
            run = self._store.start_run(command, trials, environment, scorer, self._timing.rounds, purpose)
            stored = [self._store.record(trial.key(environment)) for trial in trials]
            if records := comparable(stored, self._timing.rounds):
                runs.append((records, run))
        return runs

    def _begin(self, num_places: int | None) -> None:
        num_jobs = len(self._waiting) if num_places is None else min(num_places, len(self._waiting))
        expected = [(0, index) for index in range(num_jobs * self._timing.rounds)]
        expected += [(t, index) for t in self._waiting if t for index in range(self._timing.rounds)]
        self._progress.begin(list(self._trials), self._timing, expected)

    def _ticket(self, members: Sequence[int], environment: Environment) -> Ticket:
        trials = tuple(self._trials[member] for member in members)
        keys = self._store.add_trials(list(trials), environment)
        stored = [self._store.rounds(key) for key in keys]
        rounds = missing_rounds(
            stored,
            self._timing,
            goes_on=self._goes_on(keys),
            rerun=self._rerun,
            # Another place with this environment may be about to return the indices before.
            least_index=self._next_index.get(keys[0], 0),
            seed="/".join(keys),
        )
        if rounds:
            self._next_index[keys[0]] = 1 + max(index for _, index in rounds)
        job = Job(
            trials=trials,
            rounds=tuple(rounds),
            timing=self._timing,
            pictures=self._store.images,
            drawn=tuple(not self._rerun and any(r.pictures for r in of.values()) for of in stored),
            sources=self._store.sources,
            canaries=self._canaries,
        )
        return Ticket(job, environment, tuple(members), keys)

    def _goes_on(self, keys: Sequence[str]) -> bool:
        """Whether the last run with this baseline compared the same trials, so that rounds may be completed."""
        before = [run.keys for run in self._store.runs() if run.keys[0] == keys[0]]
        return bool(before) and set(keys) <= set(before[-1])

    def _delivered_of(self, ticket: Ticket, members: Collection[int]) -> dict[int, int]:
        returned = Counter(
            ticket.members[trial]
            for trial, index in ticket.job.rounds
            if (ticket.keys[trial], index) in self._delivered
        )
        return {member: number for member, number in returned.items() if member in members}

    def _awaited_trials(self, ticket: Ticket) -> list[int]:
        """Return the trials that a ticket is for: all but the baseline, unless it is alone."""
        return [member for member in ticket.members if member or len(self._trials) == 1]

    def _lacks(self, trial: int, environment: Environment, *, rerun: bool = False) -> bool:
        """Whether a trial lacks rounds beside its baseline in an environment."""
        keys = [self._trials[member].key(environment) for member in sorted({0, trial})]
        stored = [
            {i: r for i, r in self._store.rounds(key).items() if not rerun or (key, i) in self._delivered}
            for key in keys
        ]
        return bool(missing_rounds(stored, self._timing))

    def _finished_at(self, trial: int, live: Sequence[Environment]) -> Environment | None:
        """Return where a trial was measured before, in an environment that a place still has."""
        for environment in self._store.environments(self._trials[trial]):
            if environment.place is None or environment.at(None) not in live:
                continue
            if not self._lacks(trial, environment):
                return environment
        return None

    def _by_place(self, interrupted: bool) -> list[tuple[Environment, list[int]]]:
        pairs = [(environment, trial) for trial, environment in self._measured_at.items()]
        if interrupted:
            pairs += [(ticket.environment, trial) for ticket in self._taken for trial in ticket.members]
        groups: dict[str, tuple[Environment, set[int]]] = {}
        for environment, trial in pairs:
            groups.setdefault(environment.digest(), (environment, {0}))[1].add(trial)
        return [(environment, sorted(members)) for environment, members in groups.values()]
