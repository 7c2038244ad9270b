"""Rules that hold rows of a table against each other: recipes that grow, weights that shrink, GPUs in their order."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from vivace.evidence.lint.findings import Fault, Reading, is_above, written
from vivace.evidence.lint.model_limits import EIGHT_BITS, FULL_PRECISION
from vivace.evidence.lint.values import Number
from vivace.foundation.hardware import Chip, known_gpu

_LABEL = re.compile(r"([^()]+?)\s*(?:\(([\d.]+)\))?((?:\+[^()]+)?)$")
_MUCH = 1.1
_HARDLY = 1.02
"""Times with a technique over those without: a clear effect in one place, and hardly any in another."""
_OUT_OF_ORDER = 1.5
_ORDERED_ROWS = 8
_ORDERED_SHARE = 0.8


def techniques_add_alike(rows: Sequence[Reading]) -> Iterator[Fault]:
    """One technique adds about the same to two recipes of a table: "A+B (0.2)" over "A (0.2)"."""
    named = [(row, *techniques) for row in rows if (techniques := _techniques(row)) is not None]
    added: list[tuple[Reading, Reading, str, frozenset[str]]] = []
    for (base, fewer, number), (grown, more, other_number) in itertools.permutations(named, 2):
        is_alike = number == other_number and (base.section, base.of) == (grown.section, grown.of)
        if is_alike and fewer < more:
            centre = next(
                (role for role in ("p50", "mean", "time") if base.has(role) and grown.has(role)), None
            )
            if centre is not None and base[centre].least > 0:
                added.append((base, grown, centre, more - fewer))
    for base, grown, centre, extra in added:
        elsewhere = [
            (its_base, its_grown)
            for its_base, its_grown, its_centre, its_extra in added
            if its_extra == extra
            and its_grown[its_centre].least <= its_base[its_centre].most * _HARDLY
            and its_base.label != base.label
        ]
        if grown[centre].least > base[centre].most * _MUCH and elsewhere:
            its_base, its_grown = elsewhere[0]
            yield Fault(
                grown, f"{written(grown, centre)}; {base.label}: {base[centre].text}",
                f"{' and '.join(sorted(extra))} makes it {grown[centre].value / base[centre].value:.2f} times as long, "
                f"and does not so in {its_grown.label} over {its_base.label}",
                "whether the labels are right (a threshold), and both rows of one machine in one state",
                "doubtful",
            )  # fmt: skip


def _time_of(row: Reading) -> Number | None:
    centre = next((role for role in ("p50", "mean", "time") if row.has(role) and row[role].value > 0), None)
    return None if centre is None else row[centre]


def _has_half(weak: Chip, strong: Chip) -> bool:
    return 2 * weak.half <= strong.half and 1.5 * weak.bandwidth_gb_s <= strong.bandwidth_gb_s


def _techniques(row: Reading) -> tuple[frozenset[str], str] | None:
    """Return the techniques of a label and the number in brackets: "FBCache+FA2 (0.2)"; None if it is not like that."""
    match = _LABEL.match(row.texts.get("label", ""))
    if match is None or not match[2]:
        return None
    parts = f"{match[1]}{match[3]}".split("+")
    return frozenset(part.strip().lower() for part in parts), match[2]


def quantised_weights_are_smaller(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A model in eight or four bits takes less memory than the same model in sixteen."""
    whole: dict[tuple[str, str], Reading] = {}
    for row in rows:
        if (
            row.has("model_memory")
            and FULL_PRECISION.search(_said(row))
            and not EIGHT_BITS.search(_said(row))
        ):
            whole.setdefault(_of(row), row)
    for row in rows:
        base = whole.get(_of(row))
        if base is None or not row.has("model_memory") or not EIGHT_BITS.search(_said(row)):
            continue
        if is_above(row["model_memory"], base["model_memory"]):
            yield Fault(
                row, f"{written(row, 'model_memory')}; {base.label}: {base['model_memory'].text}",
                "with fewer bits the weights are smaller",
                "whether the original weights were kept beside the quantised ones, or nothing was quantised",
                "doubtful",
            )  # fmt: skip


def _of(row: Reading) -> tuple[str, str]:
    return row.texts.get("model", "") or row.section, row.of


def _said(row: Reading) -> str:
    return f"{row.texts.get('precision', '')} {row.texts.get('label', '')}"


def gpus_keep_their_order(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A GPU that is the faster one in nearly all rows is not far slower in a few, and never one with half of all."""
    by_gpu: dict[str, dict[tuple[int, str], Reading]] = {}
    for row in rows:
        if row.of and _time_of(row) is not None:
            by_gpu.setdefault(row.of, {})[row.line, row.section] = row
    for weak, strong in itertools.permutations(by_gpu, 2):
        pair = known_gpu(weak), known_gpu(strong)
        if pair[0] is None or pair[1] is None or not _has_half(pair[0].chip, pair[1].chip):
            continue
        for key, row in by_gpu[weak].items():
            other = by_gpu[strong].get(key)
            times = _time_of(row), other and _time_of(other)
            if times[0] and times[1] and times[0].most * _MUCH < times[1].least:
                yield Fault(
                    row, f"{weak}: {times[0].text}; {strong}: {times[1].text}",
                    f"the {weak} has half of the {strong}'s arithmetic or less, and a slower memory, and is "
                    f"{times[1].value / times[0].value:.2f} times as fast here",
                    "whether the columns are swapped, and both ran the same recipe, size and steps",
                    "doubtful",
                )  # fmt: skip
    reported: set[int] = set()
    for slow, fast in itertools.permutations(by_gpu, 2):
        both = [(by_gpu[slow][key], row) for key, row in by_gpu[fast].items() if key in by_gpu[slow]]
        both = [(other, row) for other, row in both if row.has("mean") and other.has("mean")]
        is_faster = sum(row["mean"].value < other["mean"].value for other, row in both)
        if len(both) < _ORDERED_ROWS or is_faster < _ORDERED_SHARE * len(both):
            continue
        for other, row in both:
            if row["mean"].least > other["mean"].most * _OUT_OF_ORDER and row.line not in reported:
                reported.add(row.line)
                yield Fault(
                    row, f"mean {row['mean'].text}; {other.of}: {other['mean'].text}",
                    f"{fast} is the faster one in {is_faster} of {len(both)} rows, and here "
                    f"{row['mean'].value / other['mean'].value:.1f} times slower",
                    "whether another kernel ran there, or the host was slow; measure the row again",
                    "doubtful",
                )  # fmt: skip
