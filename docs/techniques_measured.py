"""The page docs/techniques-measured.md, from the records that `python -m benchmarks.every_technique` writes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.every_technique import (
    COMMON,
    FAMILIES,
    MOST_DRIFT,
    ROUNDS,
    STEPS,
    baseline,
    cases,
    configurations,
    finished,
    first_calls_file,
    full_length,
    key_of,
    num_timed,
    read_records,
    recipe_of,
    record_file,
    rows_with_baselines,
    with_baselines,
)
from docs.models_measured import conditions_of
from vivace.models.catalogue import CATALOGUE
from vivace.report.rows import Row, rows_of
from vivace.report.summary import plus_minus, ratio, seconds, size
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome, Record
from vivace.stats import Interval, Verdict, learn_spread, log_speedup, median_interval, verdict
from vivace.stats.intervals import DEFAULT_SPREAD, MIN_SAMPLES, Spread

_HEADINGS = (
    "recipe", "s/image", "steps timed", "speed-up [95 % interval]", "verdict", "GPU busy", "model memory",
    "peak memory", "first call", "compiling",
)  # fmt: skip
PUBLISHED = {
    "flux-dev": (10.32, 6.93, 6.86, 6.86, 12.20, 5.59, 12.30, 5.46, 5.43, 5.30),
}
"""Seconds of the study's ten configurations on an H100: the baseline, then `CONFIGURATIONS`. Its other models are not
measured here."""


_MOST_PAIRS = 12
"""Recipes may differ in how much their processes do, so each row's own rounds must keep a say."""


@dataclass(frozen=True)
class Line:
    """A measured row at the model's full length: timed so, or scaled to it.

    latency: seconds an image.
    speedup, verdict: over the baseline before it, scaled the same way; None for a baseline.
    """

    row: Row
    steps: int
    latency: Interval
    speedup: Interval | None
    verdict: Verdict | None


def _told_of_hits(records: Sequence[Record]) -> list[str]:
    """Say how often prompts hit `prompt_cache` because a benchmark repeated them: before ADR 0009 they were not new."""
    hits = misses = 0
    for one in (one for r in records if r.trial.workload.text == "prompts" for one in r.rounds):
        hit, missed = (one.evidence.get(f"prompt_cache_{name}", 0) for name in ("hits", "misses"))
        assert isinstance(hit, int)
        assert isinstance(missed, int)
        hits, misses = hits + hit, misses + missed
    told = (
        f"In {hits} of {hits + misses} calls with `prompt_cache` the benchmark had drawn the prompt before."
    )
    return [f"{told} Where prompts are new it does nothing.", ""] if hits else []


def page(note: str, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
    """
    lines = [
        note,
        "# Every technique, measured\n",
        "Each technique that keeps the image, alone and, where it matters, with `compile`, on full-size models with "
        "**random weights** (`synthetic:NAME`) at their native size, batch 1, text encoders in the call. Times and "
        "memory are those of the real model; images mean nothing, so quality is not judged.\n",
        f"- Steps timed: if fewer than the model's own number (mostly {STEPS}), the time of the steps is scaled up, "
        "that of the text encoders and the VAE is not. Each row is compared with the baseline before it in the same "
        "run, scaled alike.",
        "- The eager steps of UNets are bound by the CPU that launches kernels, so their baseline is `cuda_graph`, "
        "and every recipe that goes with it has it too. Each row is two rounds of the recipe between two of the "
        "baseline (A B B A), each in its own process. A row is refused, and measured again, if the host's speed "
        f"changed by more than {MOST_DRIFT - 1:.0%} meanwhile.",
        f"- Verdict: with one process a recipe (FLUX), differences under 10 % may be drift and are "
        f"*{Verdict.UNCLEAR}*. So are rows with fewer than {MIN_SAMPLES} timed calls, which have no interval; a row "
        "over fewer steps that has one is shown instead.",
        "- GPU busy: the share of the timed call in which the GPU works; the rest of the time it waits for the CPU.",
        "- First call: includes compilation, with graphs already in the compiler's cache. Compiling: the first call "
        "with an empty cache, while others compiled at the same time.\n",
    ]
    lines += _claims(
        {name: lines_of(name, read_records(results / record_file(name).name)) for name in FAMILIES}
    )
    for name in FAMILIES:
        records = read_records(results / record_file(name).name)
        if records:
            lines += _family(name, records, read_records(results / first_calls_file(record_file(name)).name))
    return "\n".join(lines).rstrip() + "\n"


@dataclass(frozen=True)
class Claim:
    """A published claim, and the rows here that test it.

    models: those of the claim, and others that it may hold for.
    at_least, at_most: limits of each row's speed-up for the claim to hold.
    beats: a recipe that each row must be faster than for the claim to hold.
    why: the explanation of what is measured here.
    """

    says: str
    models: tuple[str, ...]
    recipes: tuple[str, ...]
    why: str
    at_least: float = 0.0
    at_most: float = math.inf
    beats: str | None = None

    def holds(self, line: Line, rival: Line | None) -> bool | None:
        """Return whether a row confirms the claim; None if its interval does not tell.

        Args:
            rival: the row of `beats`.
        """
        if line.speedup is None or line.speedup.low is None or line.speedup.high is None:
            return None
        low, high = line.speedup.low, line.speedup.high
        least, most = self.at_least, self.at_most
        if self.beats is not None:
            beaten = None if rival is None else rival.speedup
            if beaten is None or beaten.low is None or beaten.high is None:
                return None
            if low > beaten.high:
                return True
            return False if high < beaten.low else None
        if low >= least and high <= most:
            return True
        return False if high < least or low > most else None


CLAIMS = (
    Claim(
        "8-bit weights without compiling are slower than 16-bit ones (FLUX.1 [dev] on an H100: 12.20 s against "
        "10.32 s)",
        FAMILIES,
        ("quantize(int8)",),
        "the weights are dequantised in a separate pass before each matmul, and nothing fuses the two",
        at_most=0.95,
    ),
    Claim(
        "8-bit weights and compiling are faster than compiling alone (FLUX.1 [dev] on an H100: 5.46 s against 6.93 s)",
        ("flux-dev",),
        ("quantize(int8)+compile",),
        "matmuls of 4,608 tokens are compute-bound, and the compute is bf16 with either weights; dequantising them "
        "comes on top. vivace avoids inductor's kernel for a few rows ([footguns](footguns.md#quantisation))",
        beats="compile",
    ),
    Claim(
        "fp8 with static scales is twice as fast as fp16 on FLUX.1 [dev] (4.75 s against 9.45 s on a Blackwell)",
        ("flux-dev",),
        ("quantize(fp8_static)", "quantize(fp8_static)+compile"),
        "uncompiled, torchao's matmul scales, clamps and casts its inputs in separate passes",
        at_least=1.8,
    ),
    Claim(
        "every quantiser is slower than fp16 on SDXL",
        ("sdxl",),
        (
            *(
                f"quantize({scheme})"
                for scheme in ("int8", "int8_dynamic", "fp8_weight", "fp8_static", "nf4", "int4")
            ),
            "dtype(bf16)+quantize(fp8)",
        ),
        "convolutions are not quantised, and the kernels that dequantise and scale come on top of a step that is "
        "bound by kernel launches",
        at_most=0.95,
    ),
    Claim(
        "torchao's fp8 without compiling is no faster on FLUX.1 [dev] (7.28 s against 7.23 s on an H100)",
        ("flux-dev",),
        ("quantize(fp8)", "quantize(fp8_weight)"),
        "scaling the inputs in each call costs what the matmuls gain; weight-only fp8 is dequantised in each call",
        at_most=1.05,
    ),
)


def _claims(measured: Mapping[str, Sequence[Line]]) -> list[str]:
    """Compare published claims with the rows here; empty without rows."""
    told = []
    for claim in CLAIMS:
        found = {
            name: [
                line
                for recipe in claim.recipes
                for line in measured[name]
                if line.row.recipe == recipe_of(name, recipe) and line.speedup is not None
            ]
            for name in claim.models
        }
        if not any(found.values()):
            continue
        holds = []
        for name, lines in found.items():
            rivals = [
                one
                for one in measured[name]
                if claim.beats and one.row.recipe == recipe_of(name, claim.beats)
            ]
            holds += [claim.holds(line, rivals[0] if rivals else None) for line in lines]
        seen = "; ".join(
            f"{name}: {', '.join(f'`{line.row.recipe}` {ratio(line.speedup)}' for line in lines if line.speedup)}"
            for name, lines in found.items()
            if lines
        )
        missing = [
            recipe
            for recipe in claim.recipes
            if not any(
                line.row.recipe == recipe_of(name, recipe) for name, lines in found.items() for line in lines
            )
        ]
        still = (
            f" (still to be measured: {', '.join(f'`{recipe}`' for recipe in missing)})" if missing else ""
        )
        told.append(f"- *{claim.says}*: **{_judged(holds)}**{still}. {seen}. Why: {claim.why}.")
    return ["## Published claims, tested here\n", *told, ""] if told else []


def _judged(holds: Sequence[bool | None]) -> str:
    """Return the verdict on a claim from what its rows say: None where an interval does not tell."""
    if all(holds):
        return "confirmed"
    if all(one is False for one in holds):
        return "not confirmed"
    if True in holds and False in holds:
        return "confirmed in part"
    if True in holds:
        return "confirmed where the intervals tell"
    return "not confirmed where the intervals tell" if False in holds else "the intervals do not tell"


def line_of(row: Row, baseline: Row, length: int, spread: Spread = DEFAULT_SPREAD) -> Line:
    """Return a measured row scaled to `length` steps.

    Args:
        baseline: measured, over as many steps as the row.
        spread: how much processes differ that do the same.
    """
    steps = key_of(row.record)[1]
    mine, theirs = (_scaled(one, length / steps) for one in (row, baseline))
    gain = None if row.is_baseline else log_speedup(list(theirs.values()), [mine[k] for k in theirs], spread)
    return Line(
        row,
        steps,
        median_interval(list(mine.values()), spread),
        None if gain is None else gain.interval(),
        None if gain is None else verdict(gain, len(mine)),
    )


def _scaled(row: Row, factor: float) -> dict[int, list[float]]:
    """Return the seconds of each timed call by the index of its round, with its steps scaled by `factor`."""
    return {
        round_.index: [s.total_s + (factor - 1) * s.stages_s.get("steps", 0.0) for s in round_.samples]
        for round_ in row.record.rounds
        if round_.samples
    }


def lines_of(name: str, records: Sequence[Record]) -> list[Line]:
    """Return the best measurement of each recipe, fastest first; at full length if it was timed often enough."""
    return _best(_measured(name, records))


def _measured(name: str, records: Sequence[Record]) -> dict[tuple[str, int], Line]:
    """By recipe and number of steps."""
    measured: dict[tuple[str, int], Line] = {}
    latest: dict[int, Row] = {}
    spread = _spread(name, records)
    for row in rows_with_baselines(records, baseline(name)):
        steps = key_of(row.record)[1]
        if row.is_baseline:
            latest[steps] = row
        if row.latency is not None and latest[steps].latency is not None:
            measured[row.recipe, steps] = line_of(row, latest[steps], full_length(name), spread)
    return measured


def _spread(name: str, records: Sequence[Record]) -> Spread:
    """Return how much processes differ, learnt from the pairs of rounds in which the host does not decide."""
    spread = DEFAULT_SPREAD
    for record, beside in with_baselines(records, baseline(name)):
        own = [call.name for call in record.trial.recipe.techniques]
        if beside is None or COMMON.get(name) not in own or spread.dof >= DEFAULT_SPREAD.dof + _MOST_PAIRS:
            continue
        trials = [{r.index: [s.total_s for s in r.samples] for r in one.rounds} for one in (beside, record)]
        if all(len(trial) == ROUNDS and all(trial.values()) for trial in trials):
            spread = learn_spread(trials, spread)
    return spread


def _best(measured: Mapping[tuple[str, int], Line]) -> list[Line]:
    # Rows at full length need no scaling; but without an interval they cannot be compared.
    ordered = sorted(measured.items(), key=lambda item: (_has_interval(item[1]), item[0][1]))
    best = {recipe: line for (recipe, _), line in ordered}
    return sorted(best.values(), key=lambda line: -(line.speedup.point if line.speedup else 1.0))


def _has_interval(line: Line) -> bool:
    return (line.speedup or line.latency).low is not None


def _family(name: str, records: Sequence[Record], compiling: Sequence[Record]) -> list[str]:
    length = full_length(name)
    rows = rows_with_baselines(records, baseline(name))
    first_calls = {
        row.recipe: row.first_call_s for row in rows_of(list(compiling)) if row.latency is not None
    }
    measured = _measured(name, records)
    ordered = _best(measured)
    best = {line.row.recipe for line in ordered}
    entry = CATALOGUE[name]
    lines = [
        f"## {name}\n",
        f"{entry.width}x{entry.height}, {length} steps, guidance {entry.guidance_scale:g}.\n",
        *conditions_of(records),
        "",
        f"| {' | '.join(_HEADINGS)} |",
        "|" + " --- |" * len(_HEADINGS),
        *(f"| {' | '.join(_cells(line, first_calls.get(line.row.recipe)))} |" for line in ordered),
        "",
    ]
    notes = [_told(row) for row in rows if row.latency is None and row.recipe not in best]
    if notes:
        lines += ["Not measured:\n", *dict.fromkeys(notes), ""]
    known = {key_of(record) for record in records}
    done = {key_of(record) for record in finished(name, records)}
    seldom = [key[0] for key in cases(name) if key in known - done]
    missing = [key[0] for key in cases(name) if key not in known]
    for told, recipes in (("Still to be measured", missing), ("To be measured again", seldom)):
        if recipes:
            lines += [f"{told}: {', '.join(f'`{recipe}`' for recipe in dict.fromkeys(recipes))}.", ""]
    lines += _told_of_hits(records)
    lines += told_of_the_cpu(rows)
    lines += _study(name, measured, length)
    lines.append(
        f"Made by `python -m benchmarks.every_technique {name}` ([record](../results/{record_file(name).name})).\n"
    )
    return lines


def _cells(line: Line, compiling_s: float | None) -> list[str]:
    row = line.row
    gain, told = ("1", "baseline") if line.speedup is None else (ratio(line.speedup), str(line.verdict))
    if not _has_interval(line):
        calls = num_timed(row.record)
        told += f": {calls} timed call{'s' if calls != 1 else ''}"
    memory = ["-", "-"]
    if row.memory is not None:
        memory = [size(row.memory.model_bytes), size(row.memory.peak_bytes)]
    times = ["-" if value is None else seconds(value) for value in (row.first_call_s, compiling_s)]
    recipe = f"`{row.recipe}`".replace("|", "\\|")
    busy = "-"
    if row.gpu_busy_s is not None and row.latency is not None:
        busy = f"{row.gpu_busy_s / row.latency.median.point:.0%}"
    return [recipe, plus_minus(line.latency), str(line.steps), gain, told, busy, *memory, *times]


def _told(row: Row) -> str:
    how = "no effect" if row.outcome is Outcome.NO_EFFECT else row.outcome.value
    return f"- `{row.recipe}`: {how}: {row.reason}"


def told_of_the_cpu(rows: Sequence[Row]) -> list[str]:
    """Warn of measured rows whose CPU speed differed from the baseline's; empty if there are none."""
    recipes: dict[str, dict[str, None]] = {}
    for row in rows:
        for warning in row.warnings:
            if row.latency is not None and warning.startswith("the CPU ran"):
                recipes.setdefault(warning, {})[f"`{row.recipe}`"] = None
    if not recipes:
        return []
    told = (f"- {', '.join(named)}: {warning}" for warning, named in sorted(recipes.items()))
    return ["Read with care:\n", *told, ""]


def _study(name: str, measured: dict[tuple[str, int], Line], length: int) -> list[str]:
    """Return the ten configurations in the study's order, with its figures if it measured this model."""
    recipes = [BASELINE, *configurations(name)]
    if not all((recipe, length) in measured for recipe in recipes):
        return []
    published = PUBLISHED.get(name)
    headings = ["configuration", "s/image", "speed-up", "model memory", "peak memory"]
    headings += ["published, H100", "published speed-up"] if published else []
    lines = [
        f"### Ten configurations of 8-bit weights and compile, {length} steps\n",
        f"| {' | '.join(headings)} |",
        "|" + " --- |" * len(headings),
    ]
    for place, recipe in enumerate(recipes):
        line = measured[recipe, length]
        memory = line.row.memory
        cells = [f"`{recipe}`", plus_minus(line.latency), ratio(line.speedup) if line.speedup else "1"]
        cells += [size(memory.model_bytes), size(memory.peak_bytes)] if memory else ["-", "-"]
        if published:
            cells += [f"{published[place]:.2f} s", f"{published[0] / published[place]:.2f}x"]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]
