"""Rules for speed-ups: a column of ratios is compared with the times beside it."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from vivace.evidence.lint.findings import Fault, Reading
from vivace.evidence.lint.values import Number

_COMPARED = ("p50", "mean", "time", "min", "step")
_TOLERANCE = 0.02
_SLOWER = re.compile(r"slow|longer", re.IGNORECASE)
_SIGNED = re.compile(r"^\W*[-+−–]|faster|quicker|less|lower|reduc|improve|slow|longer", re.IGNORECASE)
Ends = tuple[float, float]
_CHANGES: tuple[Callable[[float], float], ...] = (
    lambda share: 1 + share,  # more speed
    lambda share: 1 / (1 - share) if share < 1 else math.inf,  # less time
    lambda share: 1 / (1 + share) if share > -1 else math.inf,  # more time
    lambda share: 1 - share,  # less speed
)
_OF_THE_BASELINE: tuple[Callable[[float], float], ...] = (
    lambda share: share,  # its speed
    lambda share: 1 / share if share > 0 else math.inf,  # its time
)
"""What a percentage can mean, as the baseline's time over the row's."""


def speedup_fits_times(rows: Sequence[Reading]) -> Iterator[Fault]:
    """A speed-up is the baseline's time over the row's, or the increase in percent."""
    groups: dict[tuple[str, ...], list[Reading]] = {}
    for row in rows:
        batch = row["batch"].text if row.has("batch") else ""
        texts = row.texts.get("model", ""), row.texts.get("gpu", "")
        groups.setdefault((row.section, *texts, row.of, batch), []).append(row)
    for group, role in itertools.product(groups.values(), ("speedup", "relative")):
        yield from _of_group([row for row in group if row.centre and row[row.centre].least > 0], role)


def _of_group(timed: Sequence[Reading], role: str) -> Iterator[Fault]:
    stated = [row for row in timed if row.has(role)]
    # Where a column has a zero, or a negative number, it is in percent even if it does not say so.
    is_percent = any(row[role].value <= 0 and row[role].kind is None for row in stated)
    bases = [row for row in stated if _is_baseline(row[role], is_percent)]
    bases = bases or [row for row in timed if not row.has(role)]
    if not stated or not bases or not bases[0].label:  # without names nothing says that these are recipes
        return
    base = bases[0]
    others = [row for row in stated if row not in bases]
    wrong = [row for row in others if not any(_fits(row, each, role, is_percent) for each in bases)]
    is_upside_down = len(wrong) == len(others) and role == "speedup"
    if is_upside_down and all(_fits_upside_down(row, bases) for row in wrong):
        why = "all figures of this column are the row's time over the baseline's: a relative time, not a speed-up"
        for row in wrong[:1]:
            yield row.fault((role, row.centre), why, "the heading", _beside(base, row), sure=False)
        return
    for row in wrong:
        is_paired = row[role].interval is not None or row.has("speedup_low", "speedup_high")
        other = next((each for each in timed if each is not row and _fits(row, each, role, is_percent)), None)
        ratio = base[row.centre].value / row[row.centre].value if base.has(row.centre) else float("nan")
        why = f"these times give {ratio:.3g}x"
        why += "" if other is None else f"; it fits {other.label} as its baseline"
        # One that has its own interval was measured in pairs, perhaps with another run of the baseline.
        yield row.fault(
            (role, row.centre),
            why,
            "which run of which baseline the speed-up refers to",
            _beside(base, row),
            sure=not is_paired and other is None,
        )


def _beside(base: Reading, row: Reading) -> str:
    text = base[row.centre].text if base.has(row.centre) else "no such time"
    return f"; {base.label or 'the first row'}: {text}"


def _is_baseline(number: Number, is_percent: bool) -> bool:
    if number.kind == "percent" or (is_percent and number.kind is None):
        return number.value == 0 or (number.value == 100 and not _SIGNED.search(number.text))
    return number.value == 1


def _fits(row: Reading, base: Reading, role: str, is_percent: bool) -> bool:
    """Whether any reading of the ratio fits any time that both rows have."""
    stated = list(_ratios(row[role], role, is_percent))
    if role == "speedup" and row.has("speedup_low", "speedup_high"):
        stated.append((row["speedup_low"].least, row["speedup_high"].most))
    return any(_overlap(ends, measured) for ends in stated for measured in _measured(row, base))


def _fits_upside_down(row: Reading, bases: Sequence[Reading]) -> bool:
    number = row["speedup"]
    if number.kind == "percent" or number.least <= 0:
        return False
    stated = 1 / (number.most * (1 + _TOLERANCE)), 1 / (number.least * (1 - _TOLERANCE))
    return any(_overlap(stated, measured) for base in bases for measured in _measured(row, base))


def _ratios(number: Number, role: str, is_percent: bool) -> Iterator[Ends]:
    """Yield what a figure can mean as the baseline's time over the row's: "+25%" is 1.25, or 1.33 of time saved."""
    least, most = number.least, number.most
    if number.interval is not None:
        least, most = min(least, number.interval[0]), max(most, number.interval[1])
    is_share = number.kind == "percent" or (is_percent and number.kind is None)
    if not is_share:
        direct = least * (1 - _TOLERANCE), most * (1 + _TOLERANCE)
        turned = (1 / direct[1], 1 / direct[0]) if direct[0] > 0 else None
        is_slower = bool(_SLOWER.search(number.text))
        if not is_slower or role == "relative":
            yield direct
        if turned is not None and (is_slower or role == "relative"):
            yield turned
        if number.text.lstrip("*` ").startswith("+"):
            yield (1 + least) * (1 - _TOLERANCE), (1 + most) * (1 + _TOLERANCE)
    if is_share or number.kind is None:
        shares = least / 100, most / 100
        meanings = _CHANGES if _SIGNED.search(number.text) else (*_CHANGES, *_OF_THE_BASELINE)
        if not is_share:  # a number without a unit may be in percent if it is too large for a ratio
            meanings = _CHANGES[:1] if number.value >= 20 else ()
        for meaning in meanings:
            low, high = sorted(meaning(share) for share in shares)
            yield low * (1 - _TOLERANCE), high * (1 + _TOLERANCE)


def _measured(row: Reading, base: Reading) -> Iterator[Ends]:
    """Yield how many times as fast a row is as another one, by each figure that both have."""
    for role in (*_COMPARED, "throughput"):
        if row.has(role) and base.has(role):
            (base_least, base_most), (row_least, row_most) = _ends(base[role]), _ends(row[role])
            if role == "throughput" and base_most > 0:
                yield row_least / base_most, row_most / max(base_least, 1e-12)
            elif role != "throughput" and row_most > 0:
                yield base_least / row_most, base_most / max(row_least, 1e-12)


def _ends(number: Number) -> Ends:
    """Return the interval that a cell gives, else what rounding allows."""
    return number.interval or (number.least, number.most)


def _overlap(ends: Ends, other: Ends) -> bool:
    return ends[0] <= other[1] and other[0] <= ends[1]
