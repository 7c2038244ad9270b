"""The page docs/techniques-measured.md, from the records that `python -m benchmarks.every_technique` writes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.every_technique import MOST_DRIFT, finished
from benchmarks.technique_cases import (
    FAMILIES,
    STEPS,
    baseline,
    cases,
    configurations,
    first_calls_file,
    full_length,
    record_file,
)
from benchmarks.technique_records import by_gpu, key_of, num_timed, read_records, rows_with_baselines
from docgen.models_measured import conditions_of
from docgen.technique_claims import claims
from docgen.technique_lines import Line, best_lines, has_interval, lines_of, measured_lines
from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Verdict
from vivace.foundation.stats.intervals import MIN_SAMPLES
from vivace.report.rows import Row, rows_of

_HEADINGS = (
    "recipe", "s/image", "steps timed", "speed-up [95 % interval]", "verdict", "GPU busy", "model memory",
    "peak memory", "first call", "compiling",
)  # fmt: skip
PUBLISHED = {
    "flux-dev": (10.32, 6.93, 6.86, 6.86, 12.20, 5.59, 12.30, 5.46, 5.43, 5.30),
}
"""Seconds of the study's ten configurations on an H100: the baseline, then `CONFIGURATIONS`. Its other models are not
measured here."""


def _cache_hits_note(records: Sequence[Record]) -> list[str]:
    """Say how often prompts hit `prompt_cache` because a benchmark repeated them: before ADR 0009 they were not new."""
    hits = misses = 0
    for round_ in (round_ for r in records if r.trial.workload.text == "prompts" for round_ in r.rounds):
        hit, missed = (round_.evidence.get(f"prompt_cache_{name}", 0) for name in ("hits", "misses"))
        assert isinstance(hit, int)
        assert isinstance(missed, int)
        hits, misses = hits + hit, misses + missed
    sentence = (
        f"In {hits} of {hits + misses} calls with `prompt_cache` the benchmark had drawn the prompt before."
    )
    return [f"{sentence} Where prompts are new it does nothing.", ""] if hits else []


def page(note: str, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
    """
    lines = [
        note,
        "# Every technique, measured\n",
        "Each technique that keeps the image, alone and, where it matters, with `compile`; and marked ‡ a few recipes "
        "that may change it, by another decoder, schedule or number of steps. On full-size models with **random "
        "weights** (`synthetic:NAME`) at their native size, batch 1, text encoders in the call. Times and "
        "memory are those of the real model; images mean nothing, so quality is not judged.\n",
        f"- Steps timed: if fewer than the model's own number (mostly {STEPS}), the time of the steps is scaled up, "
        "that of the text encoders and the VAE is not. Each row is compared with the baseline before it in the same "
        "run, scaled alike.",
        "- The eager steps of UNets are bound by the CPU that launches kernels, so their baseline is `cuda_graph`, "
        "and every recipe that goes with it has it too. Each row is two rounds of the recipe between two of the "
        "baseline (A B B A; up to three recipes share one, A B C D D C B A), each in its own process. A row is "
        f"refused, and measured again, if the host's speed changed its time by more than {MOST_DRIFT - 1:.0%} "
        "meanwhile.",
        f"- Verdict: with one process a recipe (FLUX), differences under 10 % may be drift and are "
        f"*{Verdict.UNCLEAR}*. So are rows with fewer than {MIN_SAMPLES} timed calls, which have no interval; a row "
        "over fewer steps that has one is shown instead.",
        "- GPU busy: the share of the timed call in which the GPU works; the rest of the time it waits for the CPU.",
        "- First call: includes compilation, with graphs already in the compiler's cache. Compiling: the first call "
        "with an empty cache, while others compiled at the same time.\n",
    ]
    lines += claims(
        {name: lines_of(name, read_records(results / record_file(name).name)) for name in FAMILIES}
    )
    for name in FAMILIES:
        records = read_records(results / record_file(name).name)
        if records:
            lines += _family(name, records, read_records(results / first_calls_file(record_file(name)).name))
    return "\n".join(lines).rstrip() + "\n"


def _family(name: str, records: Sequence[Record], compiling: Sequence[Record]) -> list[str]:
    length = full_length(name)
    entry = CATALOGUE[name]
    lines = [
        f"## {name}\n",
        f"{entry.width}x{entry.height}, {length} steps, guidance {entry.guidance_scale:g}.\n",
    ]
    gpus = by_gpu(records)
    if len(gpus) > 1:
        lines += ["Measured on several GPUs, each row beside a baseline on its own GPU.\n"]
    for gpu, part in gpus.items():
        if len(gpus) > 1:
            lines += [f"### {name} on {gpu}\n"]
        lines += _on_one_gpu(name, part, by_gpu(compiling).get(gpu, []), records)
    keys = {key_of(record) for record in records}
    done = {key_of(record) for record in finished(name, records)}
    seldom = [key[0] for key in cases(name) if key in keys - done]
    missing = [key[0] for key in cases(name) if key not in keys]
    where = " on any GPU" if len(gpus) > 1 else ""
    for heading, recipes in (("Still to be measured", missing), ("To be measured again", seldom)):
        if recipes:
            lines += [
                f"{heading}{where}: {', '.join(f'`{recipe}`' for recipe in dict.fromkeys(recipes))}.",
                "",
            ]
    for part in gpus.values():
        lines += _study(name, measured_lines(name, part), length)
    lines.append(
        f"Made by `python -m benchmarks.every_technique {name}` ([record](../results/{record_file(name).name})).\n"
    )
    return lines


def _on_one_gpu(
    name: str, records: Sequence[Record], compiling: Sequence[Record], everywhere: Sequence[Record]
) -> list[str]:
    """Return the conditions, the table, and what the table lacks.

    Args:
        compiling: the first calls of recipes that compile, on this GPU.
        everywhere: the records of all GPUs.
    """
    rows = rows_with_baselines(records, baseline(name))
    first_calls = {
        row.recipe: row.first_call_s for row in rows_of(list(compiling)) if row.latency is not None
    }
    ordered = best_lines(measured_lines(name, records))
    measured = {key_of(record)[0] for record in everywhere if record.outcome is Outcome.MEASURED}
    lines = [
        *conditions_of(records),
        "",
        *markdown_lines(_HEADINGS, [_cells(line, first_calls.get(line.row.recipe)) for line in ordered]),
        "",
    ]
    notes = [_reason_item(row) for row in rows if row.latency is None and row.recipe not in measured]
    if notes:
        lines += ["Not measured:\n", *dict.fromkeys(notes), ""]
    lines += _cache_hits_note(records)
    lines += cpu_notes(rows)
    return lines


def _cells(line: Line, compiling_s: float | None) -> list[str]:
    row = line.row
    gain, verdict = ("1", "baseline") if line.speedup is None else (ratio(line.speedup), str(line.verdict))
    if not has_interval(line):
        calls = num_timed(row.record)
        verdict += f": {calls} timed call{'s' if calls != 1 else ''}"
    memory = ["-", "-"]
    if row.memory is not None:
        memory = [size(row.memory.model_bytes), size(row.memory.peak_bytes)]
    times = ["-" if value is None else seconds(value) for value in (row.first_call_s, compiling_s)]
    recipe = f"`{row.recipe}`".replace("|", "\\|") + ("" if row.record.trial.recipe.same_picture else " ‡")
    busy = "-"
    if row.gpu_busy_s is not None and row.latency is not None:
        busy = f"{row.gpu_busy_s / row.latency.median.point:.0%}"
    return [recipe, plus_minus(line.latency), str(line.steps), gain, verdict, busy, *memory, *times]


def _reason_item(row: Row) -> str:
    how = "no effect" if row.outcome is Outcome.NO_EFFECT else row.outcome.value
    return f"- `{row.recipe}`: {how}: {row.reason}"


def cpu_notes(rows: Sequence[Row]) -> list[str]:
    """Warn of measured rows whose CPU speed differed from the baseline's; empty if there are none."""
    recipes: dict[str, dict[str, None]] = {}
    for row in rows:
        for warning in row.warnings:
            if row.latency is not None and warning.startswith("the CPU ran"):
                recipes.setdefault(warning, {})[f"`{row.recipe}`"] = None
    if not recipes:
        return []
    items = (f"- {', '.join(named)}: {warning}" for warning, named in sorted(recipes.items()))
    return ["Read with care:\n", *items, ""]


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
        *markdown_lines(headings, ()),
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
