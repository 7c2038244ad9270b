"""The page docs/models-measured.md, from the record that `python -m benchmarks.every_model` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.every_model import plan_file, read_records
from benchmarks.overhead import ratios, read_cases
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.report.rows import ONE_ROUND, RANDOM_WEIGHTS, Row, rows_of
from vivace.report.summary import plus_minus, ratio, seconds, size
from vivace.spec.environment import Environment
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Record
from vivace.stats import median_interval

_HEADINGS = (
    "model", "size", "steps, guidance", "recipe", "s/image", "speed-up [95 % interval]", "model memory", "peak memory",
    "first call", "built in",
)  # fmt: skip
Planned = dict[tuple[str, str], dict[str, Any]]


def page(record: Path, note: str, overhead: Path | None = None) -> str:
    """Markdown.

    Args:
        record: a file that exists.
        note: what stands above the heading: that the page is generated.
        overhead: what `python -m benchmarks.overhead` wrote, if it did.
    """
    records = read_records(record)
    predicted = _predictions(plan_file(record))
    headings = [*_HEADINGS, *(["peak by plan"] if predicted else [])]
    lines = [
        note,
        "# Every model, measured\n",
        "The models of the catalogue at their published architecture with **random weights** (`synthetic:NAME`), drawn "
        "as their entries say: native size, steps, guidance, scheduler. Times and memory are the architecture's; "
        "pictures, and so quality, there are none.\n",
        *conditions_of(records.values()),
        f"- {_workload([row for rows in _tables(records) for row in rows])}\n",
        f"| {' | '.join(headings)} |",
        "|" + " --- |" * len(headings),
    ]
    notes = []
    for rows in _tables(records):
        for number, row in enumerate(rows):
            lines.append(f"| {' | '.join(_cells(row, number == 0, predicted))} |")
            notes += _notes(row)
    lines += ["", *notes, *([""] if notes else [])]
    lines.append(
        "The interval is of the calls that were timed, not of what another process or day would give. *Built in*: "
        "random weights, filled where they run; reading real ones from a disk takes longer. *First call*: with "
        "whatever is compiled on the way; short where the compiler's cache on the disk held the same graph already, as "
        "for the second SDXL of a size."
    )
    if any(len(record.rounds) == 1 for record in records.values()):
        lines.append(f"\nWith {ONE_ROUND}.")
    if predicted:
        lines.append(
            "*Peak by plan*: what [`vivace plan`](memory.md) predicts, and its error; compiled components count as "
            "eager ones."
        )
    lines.append(f"\nMade by `python -m benchmarks.every_model` ([record](../results/{record.name})).")
    if overhead is not None and overhead.exists():
        lines += ["", *_overhead(overhead)]
    return "\n".join(lines) + "\n"


def _overhead(path: Path) -> list[str]:
    headings = ("model", "mode", "steps", "plain script", "vivace", "vivace / plain [95 % interval]", "pairs")
    lines = [
        "## What the harness costs\n",
        "vivace's timed calls beside a plain script's, by turns in one process with the same weights; embeddings are "
        "given. Each pair of neighbouring calls gives a ratio, and the median of them is shown. Eager UNets wait for "
        "Python, so their calls are as noisy as the host's CPU; there many short calls tell more than few long ones.\n",
        f"| {' | '.join(headings)} |",
        "|" + " --- |" * len(headings),
    ]
    for case in read_cases(path).values():
        found = median_interval([ratios(case)])
        between = "" if found.low is None or found.high is None else f" [{found.low:.3f}, {found.high:.3f}]"
        lines.append(
            f"| {_plain(case['model'])} | {case['mode']} | {case['num_inference_steps']} "
            f"| {seconds(median(case['plain_s']))} | {seconds(median(case['vivace_s']))} | {found.point:.3f}{between} "
            f"| {len(case['plain_s'])} |"
        )
    return [*lines, f"\nMade by `python -m benchmarks.overhead` ([record](../results/{path.name}))."]


def _tables(records: dict[Any, Any]) -> list[list[Row]]:
    """The rows of each model, models in the catalogue's order."""
    order = {SYNTHETIC + name: place for place, name in enumerate(CATALOGUE)}
    found = sorted(
        records.values(),
        key=lambda record: (
            order.get(record.trial.model.name, len(order)),
            record.trial.recipe.text != BASELINE,  # whenever it was measured, the others are compared with it
        ),
    )
    return [rows_of(list(group)) for _, group in groupby(found, key=lambda record: record.trial.model.name)]


def _cells(row: Row, is_first: bool, predicted: Planned) -> list[str]:
    workload = row.record.trial.workload
    steps = "1 step" if workload.num_inference_steps == 1 else f"{workload.num_inference_steps} steps"
    guidance = f"guidance {workload.guidance_scale:g}" if workload.guidance_scale > 1 else "none"
    cells = [_plain(row.model), f"{workload.width}x{workload.height}", f"{steps}, {guidance}"]
    cells = cells if is_first else ["", "", ""]
    cells.append(f"`{row.recipe}`".replace("|", "\\|"))
    if row.latency is None:
        missing = len(_HEADINGS) - len(cells) - 1 + bool(predicted)
        return [*cells, row.outcome.value, *["-"] * missing]
    gain = "1" if row.is_baseline else "-" if row.speedup is None else ratio(row.speedup)
    memory = ["-", "-"]
    if row.memory is not None:
        memory = [size(row.memory.model_bytes), size(row.memory.peak_bytes)]
    times = ["-" if value is None else seconds(value) for value in (row.first_call_s, row.load_s)]
    cells += [plus_minus(row.latency.median), gain, *memory, *times]
    if predicted:
        said = predicted.get((row.model, row.recipe), {}).get("peak_bytes")
        cells.append("-" if said is None or row.memory is None else _beside(said, row.memory.peak_bytes))
    return cells


def _beside(predicted: int, measured: int) -> str:
    error = round(100 * (predicted / measured - 1), 1) + 0.0  # no "-0.0"
    return f"{size(predicted)}, {error:+.1f} %"


def _plain(model: str) -> str:
    return model.removeprefix(SYNTHETIC)


def _predictions(path: Path) -> Planned:
    if not path.exists():
        return {}
    return {(row["model"], row["recipe"]): row for row in json.loads(path.read_text())}


def conditions_of(records: Iterable[Record]) -> list[str]:
    """List items: where the records were measured. Each text once: a record that was resumed may span environments that
    differ in what is not told here, such as the commit or the number of cores."""
    return [f"- {told}" for told in dict.fromkeys(_conditions(record.environment) for record in records)]


def _conditions(environment: Environment) -> str:
    driver = f", driver {environment.driver}" if environment.driver else ""
    libraries = ", ".join(f"{name} {version}" for name, version in environment.libraries.items())
    return f"{environment.device_name}{driver}; {libraries}; vivace {environment.vivace}"


def _workload(rows: Sequence[Row]) -> str:
    """How often and with what: the range over all rows."""
    workloads = [row.record.trial.workload for row in rows]
    told = {"prompts": "text encoders inside the call", "embeddings": "prompts encoded before the call"}
    texts = " or ".join(sorted({told[workload.text] for workload in workloads}))
    rounds = _range([len(row.record.rounds) for row in rows])
    calls = _range([row.latency.n for row in rows if row.latency is not None])
    return (
        f"batch {_range([w.batch for w in workloads])}; {texts}; rounds (processes) a recipe: {rounds}; "
        f"timed calls a recipe: {calls}"
    )


def _notes(row: Row) -> list[str]:
    """What a reader must know before believing the row; that its weights are random stands above the table."""
    where = f"- {_plain(row.model)}, `{row.recipe}`: "
    if row.latency is None:
        return [f"{where}{row.outcome.value}: {row.reason}"]
    return [f"{where}{warning}" for warning in row.warnings if warning not in (RANDOM_WEIGHTS, ONE_ROUND)]


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
