"""The page docs/models-measured.md, from the record that `python -m benchmarks.every_model` writes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.committed_tables import cards_of, table_of_models
from benchmarks.every_model import plan_file, read_records
from benchmarks.overhead import ratios, read_cases
from docgen import fastest
from docgen.fastest import Measurement
from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.answers.markdown import markdown_lines
from vivace.architectures import CATALOGUE
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Record
from vivace.foundation.stats import ONE_ROUND_MARGIN, median_interval
from vivace.models.find import SYNTHETIC
from vivace.report.rows import ONE_ROUND, RANDOM_WEIGHTS, Row, rows_of

_HEADINGS = (
    "model", "size", "steps, guidance", "recipe", "s/image", "speed-up [95 % interval]", "GPU busy", "model memory",
    "peak memory", "first call", "built in",
)  # fmt: skip
Planned = dict[tuple[str, str], dict[str, Any]]


def page(
    record: Path, note: str, overhead: Path | None = None, measurements: Sequence[Measurement] | None = None
) -> str:
    """Return the page as Markdown.

    Args:
        record: a file that exists.
        note: the line above the heading that says the page is generated.
        overhead: the record of `python -m benchmarks.overhead`, if there is one.
        measurements: what other records say of the same models; None for this record alone.
    """
    records = read_records(record)
    predicted = _predictions(plan_file(record))
    headings = [*_HEADINGS, *(["peak by plan"] if predicted else [])]
    lines = [
        note,
        "# Every model, measured\n",
        "The models of the catalogue at their published architecture with **random weights** (`synthetic:NAME`), at "
        "their native size, guidance and scheduler, and over their own number of steps where the table names no "
        "other. Times and memory are those of the real model; images mean nothing, so quality is not judged.\n",
        *conditions_of(records.values()),
        f"- {_workload([row for rows in _tables(records) for row in rows])}\n",
    ]
    tables = _tables(records)
    if measurements is None:
        measurements = [m for rows in tables for m in fastest.of_table(table_of_models(rows, record))]
    lines += _at_a_glance(measurements)
    for purpose in _PURPOSES:
        of_it = [rows for rows in tables if _purpose(rows[0]) == purpose]
        if of_it:
            cells = [
                _cells(row, number == 0, predicted, rows) for rows in of_it for number, row in enumerate(rows)
            ]
            lines += [f"## {purpose}\n", *markdown_lines(headings, cells)]
        lines += [""] if of_it else []
    lines.append("## How to read this\n")
    notes = _notes(tables)
    lines += [*notes, *([""] if notes else [])]
    lines.append(
        "The interval covers the timed calls, not other processes or days. *Built in*: the time to make random "
        "weights on the GPU; loading real ones from disk takes longer. *First call*: includes compilation; short "
        "where the compiler's cache on disk already had the same graph, as for the second SDXL of a size. *GPU "
        "busy*: the share of the call in which the GPU works; the rest of the time it waits for the CPU."
    )
    if any(_is_elsewhere(row, rows) for rows in tables for row in rows):
        lines.append(
            "\n†: measured on another card of the kind than the baseline that it is compared with. Cards of one kind "
            "differ, which the interval does not allow for."
        )
    if any(record.trial.workload.task != "text" for record in records.values()):
        lines.append(
            "\nModels that edit get source images that ship with vivace, scaled up to the size of the table."
        )
    if any(len(record.rounds) == 1 for record in records.values()):
        lines.append(f"\nWith {ONE_ROUND}.")
    if predicted:
        lines.append(
            "*Peak by plan*: the prediction of [`vivace plan`](memory.md) and its error; compiled components count as "
            "eager ones, and the memory of `cuda_graph`'s pool is not predicted."
        )
    lines.append(f"\nMade by `python -m benchmarks.every_model` ([record](../results/{record.name})).")
    if overhead is not None and overhead.exists():
        lines += ["", *_overhead(overhead)]
    return "\n".join(lines) + "\n"


def _overhead(path: Path) -> list[str]:
    headings = ("model", "mode", "steps", "plain script", "vivace", "vivace / plain [95 % interval]", "pairs")
    lines = [
        "## What the harness costs\n",
        "vivace's timed calls and a plain script's, alternating in one process with the same weights and given "
        "embeddings. Each pair of neighbouring calls gives a ratio; the table shows the median. Eager UNets are "
        "bound by the CPU, so their calls are as noisy as the host, and many short calls tell more than few long "
        "ones.\n",
        *markdown_lines(headings, ()),
    ]
    for case in read_cases(path).values():
        interval = median_interval([ratios(case)])
        between = (
            ""
            if interval.low is None or interval.high is None
            else f" [{interval.low:.3f}, {interval.high:.3f}]"
        )
        lines.append(
            f"| {_plain(case['model'])} | {case['mode']} | {case['num_inference_steps']} "
            f"| {seconds(median(case['plain_s']))} | {seconds(median(case['vivace_s']))} "
            f"| {interval.point:.3f}{between} | {len(case['plain_s'])} |"
        )
    return [*lines, f"\nMade by `python -m benchmarks.overhead` ([record](../results/{path.name}))."]


def _tables(records: dict[Any, Any]) -> list[list[Row]]:
    """Return the rows of each model, in the catalogue's order."""
    order = {SYNTHETIC + name: place for place, name in enumerate(CATALOGUE)}
    ordered = sorted(
        records.values(),
        key=lambda record: (
            order.get(record.trial.model.name, len(order)),
            record.trial.recipe.text != BASELINE,  # the others are compared with it, whenever it was measured
        ),
    )
    return [rows_of(list(group)) for _, group in groupby(ordered, key=lambda record: record.trial.model.name)]


_MANY, _FEW, _EDITS = "Text to image, many steps", "Text to image, ten steps or fewer", "Models that edit"
_PURPOSES = (_MANY, _FEW, _EDITS)
_FEW_STEPS = 10


def _purpose(row: Row) -> str:
    if row.record.trial.workload.task == "edit":
        return _EDITS
    return _FEW if CATALOGUE[_plain(row.model)].num_inference_steps <= _FEW_STEPS else _MANY


def _at_a_glance(measurements: Iterable[Measurement]) -> list[str]:
    """Return a table with one line a model and card: its baseline, and the fastest recipe that computes every step."""
    return [
        "## At a glance\n",
        "Of each model and card the baseline and the fastest known recipe that leaves out no step's work, from all "
        "records: [choosing](choosing.md) and the README show the same. Weights in eight bits count; step caches do "
        "not, since what they cost in quality cannot be seen with random weights. *50, from 8*: 8 steps were timed, "
        "and the time is scaled to 50. *Not proven*: the interval holds 1, or the gain is one that a single round "
        f"cannot tell from drift ({ONE_ROUND_MARGIN:.0%}).\n",
        *fastest.table(fastest.fastest_known(measurements)),
        "",
        fastest.MARKS,
        "",
    ]


def _recipe(row: Row, rows: Sequence[Row]) -> str:
    """Return the recipe, marked if it was measured on another card than the baseline that it is compared with."""
    text = f"`{row.recipe}`".replace("|", "\\|")
    return f"{text} †" if _is_elsewhere(row, rows) else text


def _is_elsewhere(row: Row, rows: Sequence[Row]) -> bool:
    baseline = next((other for other in rows if other.is_baseline), None)
    return baseline is not None and not cards_of(row.record) <= cards_of(baseline.record)


def _gain_of(row: Row) -> str:
    return "1" if row.is_baseline else "-" if row.speedup is None else ratio(row.speedup)


def _cells(row: Row, is_first: bool, predicted: Planned, rows: Sequence[Row]) -> list[str]:
    workload = row.record.trial.workload
    steps = _steps(row.model, workload.num_inference_steps)
    guidance = _guidance(row.model, workload.guidance_scale)
    starts = "" if workload.task == "text" else f", {workload.task_in_words}"
    cells = [_plain(row.model), f"{workload.width}x{workload.height}", f"{steps}, {guidance}{starts}"]
    cells = cells if is_first else ["", "", ""]
    cells.append(_recipe(row, rows))
    if row.latency is None:
        missing = len(_HEADINGS) - len(cells) - 1 + bool(predicted)
        return [*cells, row.outcome.value, *["-"] * missing]
    gain = _gain_of(row)
    memory = ["-", "-"]
    if row.memory is not None:
        memory = [size(row.memory.model_bytes), size(row.memory.peak_bytes)]
    busy = "-" if row.gpu_busy_s is None else f"{row.gpu_busy_s / row.latency.median.point:.0%}"
    times = ["-" if value is None else seconds(value) for value in (row.first_call_s, row.load_s)]
    cells += [plus_minus(row.latency.median), gain, busy, *memory, *times]
    if predicted:
        predicted_bytes = predicted.get((row.model, row.recipe), {}).get("peak_bytes")
        cells.append(
            "-"
            if predicted_bytes is None or row.memory is None
            else _beside(predicted_bytes, row.memory.peak_bytes)
        )
    return cells


def _steps(model: str, number: int) -> str:
    """Say how many steps were timed, and of how many where the model takes another number."""
    native = CATALOGUE[_plain(model)].num_inference_steps
    plural = "" if number == 1 else "s"
    return f"{number} step{plural}" if number == native else f"{number} of {native} steps"


def _guidance(model: str, scale: float) -> str:
    true_cfg = CATALOGUE[_plain(model)].arguments.get("true_cfg_scale")
    if true_cfg is not None:
        return f"true CFG {true_cfg:g}"
    return f"guidance {scale:g}" if scale > 1 else "none"


def _beside(predicted: int, measured: int) -> str:
    error = round(100 * (predicted / measured - 1), 1) + 0.0  # no "-0.0"
    return f"{size(predicted)}, {error:+.1f} %"


def _plain(model: str) -> str:
    return model.removeprefix(SYNTHETIC)


def _predictions(path: Path) -> Planned:
    if not path.exists():
        return {}
    return {(row["model"], row["recipe"]): row for row in json.loads(path.read_text(encoding="utf-8"))}


def conditions_of(records: Iterable[Record]) -> list[str]:
    """Return list items that say where the records were measured.

    Each text appears once: a resumed record may span environments that differ in what is not shown, such as the commit
    or the number of cores.
    """
    return [
        f"- {conditions}"
        for conditions in dict.fromkeys(describe_environment(record.environment) for record in records)
    ]


def describe_environment(environment: Environment) -> str:
    """Say where something was measured: device, driver and libraries."""
    driver = f", driver {environment.driver}" if environment.driver else ""
    libraries = ", ".join(f"{name} {version}" for name, version in environment.libraries.items())
    return f"{environment.device_name}{driver}; {libraries}; vivace {environment.vivace}"


def _workload(rows: Sequence[Row]) -> str:
    """Describe batch, text, rounds and calls, as ranges over all rows."""
    workloads = [row.record.trial.workload for row in rows]
    wordings = {"prompts": "text encoders inside the call", "embeddings": "prompts encoded before the call"}
    texts = " or ".join(sorted({wordings[workload.text] for workload in workloads}))
    rounds = _range([len(row.record.rounds) for row in rows])
    calls = _range([row.latency.n for row in rows if row.latency is not None])
    return (
        f"batch {_range([w.batch for w in workloads])}; {texts}; rounds (processes) a recipe: {rounds}; "
        f"timed calls a recipe: {calls}"
    )


def _notes(tables: Sequence[list[Row]]) -> list[str]:
    """Return list items: why rows have no figures, and each warning once, with the rows that it is about.

    That weights are random is said above the table, that there was one round below.
    """
    notes = [
        f"- {_plain(row.model)}, `{row.recipe}`: {row.outcome.value}: {row.reason}"
        for rows in tables
        for row in rows
        if row.latency is None
    ]
    notes += [note for rows in tables for note in (*_captures(rows), *_no_less_work(rows))]
    measured = [[row for row in rows if row.latency is not None] for rows in tables]
    warnings = dict.fromkeys(
        warning for rows in measured for row in rows for warning in _shared_warnings(row)
    )
    for warning in warnings:
        names = [_names([row for row in rows if warning in _shared_warnings(row)], rows) for rows in measured]
        notes.append(f"- {warning[0].upper()}{warning[1:]}: {'; '.join(name for name in names if name)}.")
    for comparable, then in (
        (False, "so times that wait for the CPU are not comparable"),
        (True, "which the interval allows for, since it is known how long the GPU waited"),
    ):
        drifted = [
            r for rows in measured for r in rows if r.cpu_drift and (r.cpu_stretch is not None) is comparable
        ]
        if drifted:
            speeds = "; ".join(f"{_plain(row.model)} `{row.recipe}` {row.cpu_drift}" for row in drifted)
            notes.append(
                f"- The CPU ran Python at another speed than while the model's baseline was measured, {then}: {speeds}."
            )
    return notes


def _shared_warnings(row: Row) -> list[str]:
    """Return the warnings that rows may have in common; that the CPU's speed changed has a figure of its own."""
    own = (RANDOM_WEIGHTS, ONE_ROUND)
    return [w for w in row.warnings if w not in own and not (row.cpu_drift and row.cpu_drift in w)]


def _names(some: list[Row], rows: list[Row]) -> str:
    """Name rows of a model; the model alone if they are all that were measured."""
    if not some:
        return ""
    name = _plain(some[0].model)
    return name if len(some) == len(rows) else f"{name} {', '.join(f'`{row.recipe}`' for row in some)}"


_CAPTURED_AGAIN = 1.1  # times the shortest call: a call that captures takes two steps' work more


def _captures(rows: Sequence[Row]) -> Iterator[str]:
    """Say where timed calls captured CUDA graphs, which made them longer."""
    for row in rows:
        evidence: dict[str, Any] = row.record.rounds[0].evidence
        graphs = evidence.get("cuda_graphs_recorded", 0)
        times = [sample.total_s for sample in row.record.rounds[0].samples]
        if row.recipe == "cuda_graph" and graphs > 1 and max(times) > _CAPTURED_AGAIN * min(times):
            yield (
                f"- {_plain(row.model)}, `{row.recipe}`: {graphs} graphs were captured, since the model takes prompts "
                f"at their own length and each new length needs a graph. Calls take {seconds(min(times))} where the "
                f"graph was there and up to {seconds(max(times))} where it had to be captured."
            )


_AS_MUCH = 0.95


def _no_less_work(rows: Sequence[Row]) -> Iterator[str]:
    """Say where fp8 leaves the GPU about as much to do as the same recipe without it."""
    busy = {row.recipe: row.gpu_busy_s for row in rows if row.latency is not None}
    for recipe, with_fp8 in busy.items():
        without = busy.get(recipe.removeprefix("quantize(fp8)+"))
        if recipe.startswith("quantize(fp8)+") and with_fp8 and without and with_fp8 > _AS_MUCH * without:
            yield (
                f"- {_plain(rows[0].model)}, `{recipe}`: the GPU works {seconds(with_fp8)} an image, and "
                f"{seconds(without)} without fp8. The layers that fp8 takes are not what takes the time (Sana's "
                "feed-forward is convolutions, which stay as they are), and each adds work for the CPU, for which the "
                "GPU waits."
            )


def _range(numbers: Sequence[int]) -> str:
    if not numbers:
        return "none"
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
