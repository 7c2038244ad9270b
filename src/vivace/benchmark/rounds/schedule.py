"""Choose the rounds that a comparison still needs, and the stored rounds that it consists of.

A speed-up compares a recipe's round with the baseline's round of the same index. Both are measured in one sitting:
where a recipe is added to a store, the baseline is measured again beside it, under new indices.

Within a round the order is random, so that changes of the machine do not meet the same recipe every time, whatever
their period: no recipe, the baseline included, has a place of its own. The order follows from the trials' keys and the
round's index alone, so a run that is resumed keeps it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import UTC, datetime

from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.timing import Timing

Stored = dict[int, Round]
"""The stored rounds of a trial by index."""
SITTING_S = 3600.0
"""An interrupted comparison that goes on within this time completes the rounds that it began."""


def missing_rounds(
    stored: Sequence[Stored],
    timing: Timing,
    *,
    goes_on: bool = False,
    rerun: bool = False,
    least_index: int = 0,
    seed: str = "",
) -> list[tuple[int, int]]:
    """Return the rounds to run as (trial, index), interleaved.

    Args:
        stored: by trial, the baseline first.
        goes_on: the store's last run compared the same trials, so rounds that it began may be completed.
        rerun: measure all rounds again.
        least_index: of new rounds.
        seed: of the random order within rounds.
    """
    baseline = stored[0]
    needed = [0 if _has_failed(of) and not rerun else timing.rounds for of in stored]
    todo: list[tuple[int, int]] = []
    if not rerun:
        begun = _begun(stored) if goes_on else set()
        partners = {index for index in baseline if _is_measured(baseline[index], timing)}
        alone = {
            index
            for of, lacks in zip(stored[1:], needed[1:], strict=True)
            for index in _alone(of, partners, begun, lacks, timing)
        }
        partners |= alone
        for trial, of in enumerate(stored):
            needed[trial] -= min(needed[trial], len(_paired(of, partners, timing)))
        for index in sorted(begun, key=lambda index: (index not in alone, index)):
            for trial in order_within(len(stored), index, seed):
                is_wanted = needed[trial] or (trial == 0 and index in alone and not _has_failed(baseline))
                if is_wanted and not _is_measured(stored[trial].get(index), timing):
                    todo.append((trial, index))
                    needed[trial] = max(0, needed[trial] - 1)
        todo.sort(key=lambda place: place[1])
    if not _has_failed(baseline) or rerun:
        needed[0] = max(needed)
    first = max(least_index, 1 + max((index for of in stored for index in of), default=-1))
    for index in range(first, first + max(needed)):
        todo += [
            (trial, index)
            for trial in order_within(len(stored), index, seed)
            if needed[trial] > index - first
        ]
    return todo


def comparable(records: Sequence[Record | None], rounds: int | None = None) -> list[Record]:
    """Return the records with the rounds that are compared: those that a recipe shares with the baseline.

    A failed attempt is left out if a later one was measured. Trials without a round are left out. Images belong to the
    trial: they are kept even if the round that stored them is left out.

    Args:
        rounds: the latest so many of each; None for all.
    """
    if not records or records[0] is None:
        return [_with(record, record.rounds) for record in records if record is not None]
    stored = [{} if record is None else {r.index: r for r in record.rounds} for record in records]
    baseline = stored[0]
    partners = {index for index in baseline if _is_measured(baseline[index])}
    chosen = [_chosen(of, partners, rounds) for of in stored]
    shared = {r.index for of in chosen[1:] for r in of} & partners
    if shared:
        chosen[0] = [
            r for r in baseline.values() if r.index in shared or (r == _latest(baseline) and _failed(r))
        ]
    pairs = zip(records, chosen, strict=True)
    return [_with(record, rounds_) for record, rounds_ in pairs if record is not None and rounds_]


def _chosen(of: Stored, partners: set[int], rounds: int | None) -> list[Round]:
    measured = sorted(_paired(of, partners))
    kept = set(measured if rounds is None else measured[-rounds:])
    latest = _latest(of)
    if latest is not None and _failed(latest):
        kept.add(latest.index)
    return [of[index] for index in sorted(of) if index in kept]


def _with(record: Record, rounds: Sequence[Round]) -> Record:
    images = next((r.pictures for r in reversed(record.rounds) if r.pictures), ())
    first, *others = rounds
    if images and not any(r.pictures for r in rounds):
        first = first.model_copy(update={"pictures": images})
    return record.model_copy(update={"rounds": (first, *others)})


def _paired(of: Stored, partners: set[int], timing: Timing | None = None) -> list[int]:
    """Return the indices of measured rounds that have a partner; of all, if there are no partners."""
    measured = [index for index, round_ in of.items() if _is_measured(round_, timing)]
    return [index for index in measured if index in partners] if partners else measured


def _alone(of: Stored, partners: set[int], begun: set[int], num_rounds: int, timing: Timing) -> list[int]:
    """Return the latest rounds of a trial without a round of the baseline's, as many as pairs are missing."""
    pairs = len([index for index in _paired(of, partners, timing) if index in partners])
    lonely = [index for index in sorted(of) if index in begun - partners and _is_measured(of[index], timing)]
    return lonely[max(0, len(lonely) - max(0, num_rounds - pairs)) :]


def _begun(stored: Sequence[Stored]) -> set[int]:
    return {index for of in stored for index, round_ in of.items() if _is_recent(round_)}


def _is_measured(round_: Round | None, timing: Timing | None = None) -> bool:
    if round_ is None or round_.outcome is not Outcome.MEASURED:
        return False
    return timing is None or timing.repeats is None or len(round_.samples) >= timing.repeats


def _has_failed(of: Stored) -> bool:
    """Whether the trial failed in a way that another attempt would not change."""
    latest = _latest(of)
    return latest is not None and latest.outcome.is_final and _failed(latest)


def _failed(round_: Round) -> bool:
    return round_.outcome is not Outcome.MEASURED


def _latest(of: Stored) -> Round | None:
    return max(of.values(), key=lambda r: (_time(r), r.index), default=None)


def _is_recent(round_: Round) -> bool:
    return (datetime.now(UTC) - _time(round_)).total_seconds() < SITTING_S


def _time(round_: Round) -> datetime:
    started = datetime.fromisoformat(round_.started_at)
    return started if started.tzinfo else started.replace(tzinfo=UTC)


def order_within(num_trials: int, index: int, seed: str) -> list[int]:
    """Return the order of a round's trials: random, and every second time that of the round before, rotated at random.

    So each trial changes its place, and two rounds already differ by what its place in a round does to it.
    """
    drawn = random.Random(f"{seed}/{index // 2}")
    order = drawn.sample(range(num_trials), num_trials)
    first = drawn.randrange(1, max(2, num_trials)) if index % 2 else 0
    return order[first:] + order[:first]
