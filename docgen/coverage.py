"""The page docs/coverage.md, from the record that `python -m benchmarks.coverage` writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import against_itself, command_coverage
from benchmarks.command_coverage import FAIL_IF, SLOWDOWNS
from benchmarks.coverage import ROUNDS
from benchmarks.noises import NOISES, PROCESS_SDS
from vivace.answers.markdown import markdown_lines
from vivace.benchmark.places.trial_jobs import CANARY_CALLS, MOST_BETWEEN
from vivace.foundation.stats import DEFAULT_SPREAD, Verdict
from vivace.foundation.stats.intervals import MIN_SAMPLES
from vivace.foundation.stats.sequential import DEFAULT_MAX_PAIRS, FALSE_DIFFERENCE, FALSE_SAME, looks
from vivace.foundation.stats.verdicts import ONE_ROUND_MARGIN, SAME_WITHIN, SURE
from vivace.report.host import LEAST_CPU_SHARE

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
  of the comparison. Rounds that contradict it (in one of twenty by chance) stand for themselves: two rounds that
  differ by 26 % have an interval by their own difference alone, which says that they tell little.
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

## Each command, while the machine moves within rounds

Clocks rise and fall, and other programs come and go, at times with a period that is that of a round. So the order of a
round is random, and every second round has that of the one before, rotated: no recipe, the baseline included, has a
place of its own. The first recipe of a round is measured again at its end, and after every {between} others: its
*canary*, {canary_calls} calls in a process of their own. What it shows is used twice: all times of the round are
corrected to one speed of the machine, and the changes widen the spread that all intervals rest on. All commands that
compare do so wherever there are two rounds or more; `tune` leaves canaries out where its time is short, and says so.

Simulated: {command_repeats} comparisons of recipes that do the same, with each command's own schedule and statistics,
for 2 and 4 rounds (`compare`: up to {max_pairs} pairs) whose processes differ by 1 or 3 %. A cell has the least share
of 95 % intervals of a speed-up that hold the truth, and the most that are called faster or slower; such a share may be
off by 5 points.

{commands}

The least is {least_covered}; the most called, {most_called}.

`vivace bench --endpoint` gives no interval: a single load cannot say how far another's figures would be from its own.
With `--repeats` it shows the least and the most of several ([how](bench-endpoint.md)).

### For real

{real}

## A true gain of 3 %, called faster

{power_3}

## A true gain of 10 %, called faster

{power_10}

## `vivace compare`: pairs until the verdict is sure

Simulated: {pair_repeats} comparisons for each of {pair_cases} cases, of at most {max_pairs} pairs. The data is looked
at after {looks} pairs; each look has its share of the allowed error, {false_difference:.0%} for a
difference (one-sided) and {false_same:.0%} for "same". Cells give the least and the most over the machine's movements
above. With `--fail-if {fail_if:.0%}`, "failed" means surely slower by more than that, "passed" surely not.

{pairs}

- A recipe against itself is called faster or slower in {worst_pair:.1%} of comparisons at most, all looks together.
- With `--fail-if {fail_if:.0%}`, one that is slower by exactly as much as allowed fails in {worst_fail:.1%} at most.
- Where processes differ by 3 %, or the machine moves much, {max_pairs} pairs cannot show that two recipes are within
  1 % of each other. The verdict is then "unclear".

Made by `python -m benchmarks.coverage` ([record](../results/{record})).
"""


def page(note: str, record: Path) -> str:
    """Return the page as Markdown."""
    coverage = json.loads(record.read_text(encoding="utf-8"))
    cases: list[Case] = coverage["rows"]
    worst = max((case for case in cases if case["rounds"] > 1), key=lambda case: case["false"])
    return _TEXT.format(
        note=note,
        repeats=coverage["repeats"],
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
        between=MOST_BETWEEN,
        canary_calls=CANARY_CALLS,
        command_repeats=coverage["command_repeats"],
        **_of_commands(coverage["commands"], coverage["pairs"]),
        record=record.name,
        real=_for_real(record.with_name(against_itself.RESULTS.name)),
        **_of_pairs(coverage),
    )


def _for_real(record: Path) -> str:
    """Say what real comparisons of a recipe with itself came to; one line where there are none."""
    if not record.exists():
        return "Still to be measured: `python -m benchmarks.against_itself`."
    cases: list[Case] = json.loads(record.read_text(encoding="utf-8"))
    paragraphs = []
    for busy in (True, False):
        of = [case for case in cases if case["busy"] is busy]
        if not of:
            continue
        wrong = sum(case["verdict"] in (Verdict.FASTER, Verdict.SLOWER) for case in of)
        outside = sum(not case["low"] <= 1 <= case["high"] for case in of if case["low"] is not None)
        starved = sum(min(case["cpu_shares"]) < LEAST_CPU_SHARE for case in of)
        loads = [case["load"] for case in of]
        ratios = [case["ratio"] for case in of]
        paragraphs.append(
            f"{len(of)} comparisons of tiny-sd's baseline with itself, two rounds and one thread, on "
            f"{of[0]['cores']} CPU cores, "
            f"{'one of them kept busy' if busy else 'none kept busy'} (load {min(loads):g} to {max(loads):g}). "
            f"**{wrong} of {len(of)} were called faster or slower.** In {starved} a process got less "
            f"than {LEAST_CPU_SHARE:.0%} of its threads' time, which alone makes the verdict *unclear*. The ratios "
            f"were {min(ratios):.2f} to {max(ratios):.2f}; {outside} of {len(of)} 95 % intervals do not contain 1."
        )
    return "\n\n".join(
        [*paragraphs, f"Made by `python -m benchmarks.against_itself` ([record](../results/{record.name}))."]
    )


def _of_pairs(coverage: dict[str, Any]) -> dict[str, Any]:
    """Return what the page says of `vivace compare`."""
    cases: list[Case] = coverage["pairs"]
    return {
        "pair_repeats": coverage["pair_repeats"],
        "pair_cases": len(cases),
        "max_pairs": DEFAULT_MAX_PAIRS,
        "looks": ", ".join(map(str, looks())),
        "false_difference": FALSE_DIFFERENCE,
        "false_same": FALSE_SAME,
        "fail_if": FAIL_IF,
        "pairs": _pair_table(cases),
        "worst_pair": max(case["faster"] + case["slower"] for case in cases if case["slowdown"] == 0),
        "worst_fail": max(case["failed"] for case in cases if case["slowdown"] == FAIL_IF),
    }


def _of_commands(cases: Sequence[Case], pairs: Sequence[Case]) -> dict[str, str]:
    """Return what the page says of all commands while the machine moves."""
    designs = command_coverage.DESIGNS
    rows = []
    for move in command_coverage.MOVES:
        cells = []
        for name in designs:
            of = [case for case in cases if (case["move"], case["command"]) == (move, name)]
            if name == "compare":
                of = [
                    case | {"false": case["faster"] + case["slower"]}
                    for case in pairs
                    if case["move"] == move
                ]
                cells.append(f"{max(case['false'] for case in of if case['slowdown'] == 0):.0%} called")
                continue
            cells.append(f"{min(c['covered'] for c in of):.0%}, {max(c['false'] for c in of):.0%} called")
        rows.append([move, *cells])

    def where(case: Case) -> str:
        return (
            f"{designs[case['command']].title}; {case['move']}; processes ±{case['process_sd']:.0%}; "
            f"{case['rounds']} rounds"
        )

    least, most = min(cases, key=lambda c: c["covered"]), max(cases, key=lambda c: c["false"])
    return {
        "commands": "\n".join(
            markdown_lines(["the machine's movement", *(design.title for design in designs.values())], rows)
        ),
        "least_covered": f"{least['covered']:.0%} ({where(least)})",
        "most_called": f"{most['false']:.0%} ({where(most)})",
    }


def _pair_table(cases: Sequence[Case]) -> str:
    lines = [
        f"| true slowdown | processes | slower | same | unclear | pairs | failed at {FAIL_IF:.0%} | passed | pairs |",
        "|" + " --- |" * 9,
    ]
    for slowdown, process_sd in itertools.product(SLOWDOWNS, command_coverage.PROCESS_SDS):
        of = [c for c in cases if (c["slowdown"], c["process_sd"]) == (slowdown, process_sd)]
        cells = []
        for name in ("slower", "same", "unclear", "pairs", "failed", "passed", "fail_if_pairs"):
            values = [c[name] for c in of]
            cells.append(_range(min(values), max(values)) if "pairs" not in name else _numbers(values))
        lines.append(f"| {slowdown:.0%} | ±{process_sd:.0%} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _numbers(values: Sequence[float]) -> str:
    low, high = round(min(values)), round(max(values))
    return f"{low}" if low == high else f"{low} to {high}"


def _table(cases: Sequence[Case], name: str) -> str:
    rows = []
    for noise, process_sd in itertools.product(NOISES, PROCESS_SDS):
        cells = []
        for rounds in ROUNDS:
            case = (noise, process_sd, rounds)
            shares = [c[name] for c in cases if (c["noise"], c["process_sd"], c["rounds"]) == case]
            cells.append(_range(min(shares), max(shares)))
        rows.append([str(noise), f"±{process_sd:.0%}", *cells])
    headings = ("calls vary", "processes", *(f"{n} round" + "s" * (n > 1) for n in ROUNDS))
    return "\n".join(markdown_lines(headings, rows))


def _range(low: float, high: float) -> str:
    least, most = f"{100 * low:.1f}", f"{100 * high:.1f}"
    return f"{least} %" if least == most else f"{least} to {most} %"
