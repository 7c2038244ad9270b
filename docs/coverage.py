"""The page docs/coverage.md, from the record that `python -m benchmarks.coverage` writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.coverage import NOISES, PROCESS_SDS, ROUNDS
from vivace.stats import DEFAULT_SPREAD
from vivace.stats.intervals import MIN_SAMPLES
from vivace.stats.verdicts import ONE_ROUND_MARGIN, SAME_WITHIN, SURE

Case = dict[str, Any]


_TEXT = """{note}
# How often the intervals hold

Simulated: {repeats} comparisons of known truth for each of {cases} cases. Two or five recipes are timed in rounds, each
in a process of its own. Processes that do the same differ by the given standard deviation, the machine's speed by 5 %
from round to round. Calls are timed 4 or 10 times a round, or as often as the stopping rule asks for. A cell gives the
least and the most of these cases.

## How they are computed

- A round's time is the median of its calls. Its error comes from two order statistics around it (Price and Bonett
  2001), widened by the calls' autocorrelation. Spikes hardly matter.
- Over rounds, the mean of logarithms has a Student interval. Two rounds say little about how much processes differ, so
  the variance starts from an assumed {sd:.0%}, worth {dof:.0f} observations, and learns from the rounds of all recipes
  of the comparison.
- The speed-up is the ratio of two such times, compared round by round. Fewer than {fewest} timed calls have no
  interval.
- *Faster* and *slower* mean beyond {same:.0%} with {sure:.0%} confidence; with a single round, beyond {margin:.0%}.

## Coverage of the 95 % interval of a speed-up

{coverage}

- **One round** describes its own two processes. What another process would take is not in it, nor is a slow phase that
  lasts as long as the round.
- **Processes that differ by less than the assumed {sd:.0%}** get intervals that are too wide; those that differ by 3 %,
  slightly too narrow ones. More rounds, and more recipes side by side, correct both.

## A recipe against itself, called faster or slower

{false}

The most with two or more rounds: {worst}.

## A true gain of 3 %, called faster

{power_3}

## A true gain of 10 %, called faster

{power_10}

Made by `python -m benchmarks.coverage` ([record](../results/{record})).
"""


def page(note: str, record: Path) -> str:
    """Return the page as Markdown."""
    found = json.loads(record.read_text())
    cases: list[Case] = found["rows"]
    worst = max((case for case in cases if case["rounds"] > 1), key=lambda case: case["false"])
    return _TEXT.format(
        note=note,
        repeats=found["repeats"],
        cases=len(cases),
        sd=DEFAULT_SPREAD.sd,
        dof=DEFAULT_SPREAD.dof,
        fewest=MIN_SAMPLES,
        same=SAME_WITHIN,
        sure=SURE,
        margin=ONE_ROUND_MARGIN,
        coverage=_table(cases, "speedup"),
        false=_table(cases, "false"),
        worst=f"{worst['false']:.1%} ({worst['noise']}; processes ±{worst['process_sd']:.0%}, {worst['recipes']} "
        f"recipes, {worst['rounds']} rounds)",
        power_3=_table(cases, "power_3"),
        power_10=_table(cases, "power_10"),
        record=record.name,
    )


def _table(cases: Sequence[Case], name: str) -> str:
    lines = [
        f"| calls vary | processes | {' | '.join(f'{n} round' + 's' * (n > 1) for n in ROUNDS)} |",
        "| --- | --- |" + " --- |" * len(ROUNDS),
    ]
    for noise, process_sd in itertools.product(NOISES, PROCESS_SDS):
        cells = []
        for rounds in ROUNDS:
            case = (noise, process_sd, rounds)
            shares = [c[name] for c in cases if (c["noise"], c["process_sd"], c["rounds"]) == case]
            cells.append(_range(min(shares), max(shares)))
        lines.append(f"| {noise} | ±{process_sd:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(low: float, high: float) -> str:
    least, most = f"{100 * low:.1f}", f"{100 * high:.1f}"
    return f"{least} %" if least == most else f"{least} to {most} %"
