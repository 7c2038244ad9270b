"""The page docs/skipped-work.md, from the records that `python -m benchmarks.skipped_work` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.skipped_work import (
    FAMILIES,
    HALVES,
    Operations,
    read_operations,
    recipes,
    record_file,
    skipping,
)
from benchmarks.technique_cases import baseline, full_length
from benchmarks.technique_records import key_of, read_records, rows_with_baselines
from docgen.models_measured import conditions_of
from docgen.techniques_measured import cpu_notes
from vivace.answers.formatting import plus_minus, ratio, seconds
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Interval, learn_spread, speedup
from vivace.report.rows import Row

LIMIT = 0.05
"""Share of a step that a skipped step may cost beyond what it computes."""
_HEADINGS = (
    "recipe", "s/image", "speed-up [95 % interval]", "steps skipped", "a skipped step computes", "ideal speed-up",
    "overhead of a skipped step [95 % interval]",
)  # fmt: skip


@dataclass(frozen=True)
class Skipping:
    """What a recipe skipped, and what that would save if skipping cost nothing.

    skipped: share of the steps.
    computes: operations of a skipped step over those of a computed one; None for plain fewer steps.
    ideal: speed-up if time fell in proportion to operations.
    overhead: of a skipped step, over a computed step's time; None for plain fewer steps. Its interval follows from
        that of the ratio of both runs' steps.
    """

    skipped: float
    computes: float | None
    ideal: float
    overhead: Interval | None


def page(note: str, results: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
    """
    lines = [
        note,
        "# What skipping saves, measured\n",
        "Step caches on fixed schedules that skip 30, 50 and 65 % of the steps, guidance cut off for as many steps, "
        "and fewer plain steps, on full-size models with **random weights** (`synthetic:NAME`) at their native size "
        "and number of steps, batch 1, text encoders and VAE in the call. [Speed-up against "
        "fidelity](step-curves.md) shows what it does to images, with trained models.\n",
        "FLUX runs eager and is compared with the baseline. On UNets every row captures the step (`cuda_graph`) and "
        "is compared with `cuda_graph` alone: an eager UNet step is bound by kernel launches, and a step that "
        "computes less launches about as many.\n",
        "*A skipped step computes*: its operations in the denoiser over those of a computed step, counted. *Ideal "
        "speed-up*: if the time of the steps fell in proportion to their operations. *Overhead of a skipped step*: "
        "the time it took beyond that, over the time of a computed step; negative if it took less; with its 95 % "
        f"interval, in bold if all of that lies above {LIMIT:.0%}.\n",
    ]
    operations = read_operations()
    by_model = {name: read_records(results / record_file(name).name) for name in FAMILIES}
    for name, records in by_model.items():
        if records:
            lines += _family(name, records, operations.get(name, {}))
    if missing := [name for name, records in by_model.items() if not records]:
        lines.append(f"Still to be measured: {', '.join(missing)}.\n")
    return "\n".join(lines).rstrip() + "\n"


def skipping_of(row: Row, whole: Row, operations: Mapping[str, Operations]) -> Skipping | None:
    """Return what a row skipped, None if its evidence does not tell.

    Args:
        whole: the baseline of the same run, with all steps computed: the row's recipe without what skips.
        operations: by technique.
    """
    length = key_of(whole.record)[1]
    total, steps = _times(whole)
    call = skipping(row.record.trial.recipe, whole.record.trial.recipe)
    if call.name == "steps":
        number = int(str(call.knobs["steps"]))
        return Skipping(1 - number / length, None, total / (total - steps + steps * number / length), None)
    evidence = row.record.rounds[0].evidence
    skipped = 1.0 if call.name == "guidance" else _share_skipped(evidence)
    if skipped is None or call.name not in operations:
        return None
    counted = operations[call.name]
    computes = counted.hit / counted.step
    left = 1 - skipped * (1 - computes)
    overhead = _overhead(_share_of_steps(row, whole), left, skipped) if skipped else None
    return Skipping(skipped, computes, total / (total - steps * (1 - left)), overhead)


def _overhead(took: Interval, left: float, skipped: float) -> Interval:
    """Return the overhead of a skipped step, over a computed step's time.

    Args:
        took: the time of all steps, over that of the same number of computed ones.
        left: what is left of their operations.
        skipped: share of the steps.
    """
    low, high = (None if end is None else (end - left) / skipped for end in (took.low, took.high))
    return Interval((took.point - left) / skipped, low, high)


def _share_of_steps(row: Row, whole: Row) -> Interval:
    """Return the time of a row's steps over those of the baseline's, with the interval that speed-ups have."""
    of_row, of_whole = _steps_by_round(row), _steps_by_round(whole)
    shared = sorted(of_row.keys() & of_whole.keys())
    # "The baseline's over the other's", turned around.
    return speedup(
        [of_row[k] for k in shared], [of_whole[k] for k in shared], learn_spread([of_whole, of_row])
    )


def _steps_by_round(row: Row) -> dict[int, tuple[float, ...]]:
    return {r.index: tuple(s.stages_s.get("steps", 0.0) for s in r.samples) for r in row.record.rounds}


def _times(row: Row) -> tuple[float, float]:
    """Return the seconds of a call, and of its steps."""
    samples = [sample for round_ in row.record.rounds for sample in round_.samples]
    return median(s.total_s for s in samples), median(s.stages_s.get("steps", 0.0) for s in samples)


def _share_skipped(evidence: Mapping[str, object]) -> float | None:
    def number(name: str) -> float:
        return float(str(evidence[name]))

    if "cache_hit_rate" in evidence:
        return number("cache_hit_rate")
    for some, others in (("unguided_steps", "guided_steps"), ("half_batch_calls", "whole_batch_calls")):
        if some in evidence and others in evidence and number(some) + number(others):
            return number(some) / (number(some) + number(others))
    return None


def _family(name: str, records: Sequence[Record], operations: Mapping[str, Operations]) -> list[str]:
    length, entry, own = full_length(name), CATALOGUE[name], baseline(name)
    lines = [
        f"## {name}\n",
        f"{entry.width}x{entry.height}, {length} steps, guidance {entry.guidance_scale:g}. Speed-up, ideal and "
        f"overhead are against `{own}`.\n",
        *conditions_of(records),
        "",
        *markdown_lines(_HEADINGS, ()),
    ]
    rows = rows_with_baselines(records, own)
    whole: Row | None = None
    notes, overheads, halves = [], [], []
    for row in rows:
        if row.is_baseline:
            whole = row
            if row.latency is not None:
                step = _times(row)[1] / key_of(row.record)[1]
                cells = [f"`{own}`", plus_minus(row.latency.median), "1", "-", "-", "-"]
                lines.append(f"| {' | '.join([*cells, f'a step: {seconds(step)}'])} |")
            continue
        if row.latency is None or whole is None or whole.latency is None or row.speedup is None:
            how = "no effect" if row.outcome is Outcome.NO_EFFECT else row.outcome.value
            notes.append(f"- `{row.recipe}`: {how}: {row.reason}")
            continue
        skipped = skipping_of(row, whole, operations)
        cells = [f"`{row.recipe}`", plus_minus(row.latency.median), ratio(row.speedup)]
        if skipped is None:
            cells += ["-"] * 4
        else:
            cells += [
                f"{skipped.skipped:.0%}",
                "-" if skipped.computes is None else f"{skipped.computes:.1%}",
            ]
            cells += [f"{skipped.ideal:.2f}x", _overhead_text(skipped.overhead)]
            if skipped.overhead is not None:
                if skipping(row.record.trial.recipe, whole.record.trial.recipe).name == "guidance":
                    halves = [_of_half_a_batch(row.recipe, skipped.overhead.point)]
                else:
                    overheads.append((skipped.overhead.point, row.recipe, _overhead_text(skipped.overhead)))
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    if overheads:
        least, most = min(overheads), max(overheads)
        lines.append(f"Overhead of a skipped step: {least[2]} (`{least[1]}`) to {most[2]} (`{most[1]}`).\n")
    lines += halves
    if notes:
        lines += ["Not measured:\n", *dict.fromkeys(notes), ""]
    measured = {row.recipe for row in rows}
    if missing := [recipe for recipe in recipes(name) if recipe not in measured]:
        lines.append(f"Still to be measured: {', '.join(f'`{recipe}`' for recipe in missing)}.\n")
    lines += cpu_notes(rows)
    lines.append(
        f"Made by `python -m benchmarks.skipped_work {name}` ([record](../results/{record_file(name).name})).\n"
    )
    return lines


def _of_half_a_batch(recipe: str, overhead: float) -> str:
    left_out = " and ".join(f"`{name}`" for name in HALVES if name != "guidance")
    return (
        f"Half the batch is half the work but takes {0.5 + overhead:.0%} of the time (`{recipe}`), since one row "
        f"fills the GPU less than two. So where half the batch is left out ({left_out}), {overhead:.1%} of a step is "
        "not overhead of skipping.\n"
    )


def _overhead_text(overhead: Interval | None) -> str:
    if overhead is None:
        return "-"
    if overhead.low is None or overhead.high is None:
        return f"{overhead.point:.1%}"
    text = f"{overhead.point:.1%} [{100 * overhead.low:.1f}, {100 * overhead.high:.1f}]"
    return f"**{text}**" if overhead.low > LIMIT else text
