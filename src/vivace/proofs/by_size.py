"""Images of several sizes: how close B's are at each, and what is worse at only one size.

An attention kernel, a tile of a decoder or a table of positions may be wrong for one aspect ratio and right for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vivace.proofs.as_good import Standing, WitnessResult, witness_results
from vivace.proofs.pair_figures import PairFigures
from vivace.proofs.same import means
from vivace.proofs.verdict import ProofAnswer


@dataclass(frozen=True)
class SizeFigures:
    """The mean metrics of B's images of one size against A's."""

    size: str
    num_pairs: int
    metrics: dict[str, float]


def figures_by_size(pairs: Sequence[PairFigures]) -> tuple[SizeFigures, ...]:
    """Return the figures of each size, the worst first; empty if all images have the same size."""
    groups = _by_size([pair for pair in pairs if pair.against])
    if len(groups) < 2:
        return ()
    figures = [
        SizeFigures(size, len(part), means([p.against for p in part])) for size, part in groups.items()
    ]
    return tuple(sorted(figures, key=lambda each: each.metrics["match"]))


def with_worst_size(same: ProofAnswer, sizes: Sequence[SizeFigures]) -> ProofAnswer:
    """Return the answer to "Same image?" with the name of the size at which images differ most."""
    if not sizes or sizes[0].metrics["match"] == sizes[-1].metrics["match"]:
        return same
    worst = f"the worst size is {sizes[0].size} (mean match {sizes[0].metrics['match']:.3f})"
    return replace(same, reason=f"{same.reason}; {worst}")


def worse_at_a_size(pairs: Sequence[PairFigures], limits: dict[str, float]) -> list[WitnessResult]:
    """Return what witnesses call worse at some sizes only."""
    groups = _by_size([pair for pair in pairs if pair.is_complete])
    if len(groups) < 2:
        return []
    worse = [
        (size, result)
        for size, part in groups.items()
        for result in witness_results(part, limits)
        if result.standing is Standing.WORSE
    ]
    times = Counter(result.witness for _, result in worse)
    return [
        replace(result, witness=f"{result.witness} at {size}")
        for size, result in worse
        if times[result.witness] < len(groups)
    ]


def _by_size(pairs: Sequence[PairFigures]) -> dict[str, list[PairFigures]]:
    groups: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        groups.setdefault(pair.size or "{}x{}".format(*(pair.a.size or (0, 0))), []).append(pair)
    return groups
