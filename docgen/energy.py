"""The page docs/performance/energy.md: what was predicted of a product's joules, and what the records have."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.energy import Row, read_rows
from benchmarks.energy_cases import CASES, SHAPES, Case
from benchmarks.technique_records import read_records
from vivace.answers.formatting import plus_minus, size
from vivace.answers.markdown import markdown_lines
from vivace.models.find import SYNTHETIC
from vivace.report.rows import rows_of

WHOLE = {
    "flux-fused-one-run.json": "FLUX.1 [dev], 28",
    "fused-model-flux2-klein-9b.json": "FLUX.2 [klein] 9B, 4",
    "fused-model-z-image-turbo.json": "Z-Image-Turbo, 9",
    "flux-fused-flux2-dev.json": "FLUX.2 [dev], 50",
    "fused-qwen-image-cards.json": "Qwen-Image",
}
"""Records of whole images, and what they are called."""
_WAYS = {
    "tensor": "`_scaled_mm`, one scale",
    "rows": "`_scaled_mm`, by row",
    "vivace": "`fused`'s product",
    "bf16": "bf16",
    "attention fp8": "attention, e4m3 (cuDNN)",
    "attention bf16": "attention, bf16 (cuDNN)",
    "idle": "nothing",
}
_NOT_YET = "**Not measured yet**: `python -m benchmarks.energy`, two minutes of one GPU."
_TEXT = """{note}
# Energy of a product and of an image

What a product's joules depend on besides its size: predicted, then measured on one GPU that is held back by its power
cap. For those who look for the next per cent of a fused model, or pay for electricity.

In a loop of steps an H200 draws 690 of its 700 W ([FLUX](flux.md#the-chip-is-limited-by-power)). There a kernel's time
is its energy divided by the cap: what takes fewer joules takes less time, and what merely hides takes none away.

## Whole images

{images}

Watts fall where a call waits for the host.

## Predicted and measured

Where the joules go, as far as is known: tensor cores and the registers in front of them, where bits that change between
one operand and the next charge wires; the way through the level-2 cache; leakage and clocks, some 100 to 150 W whatever
is computed. A matmul of zeros shows the last two. Predictions were written before anything was measured; each is the
joules of a call over those of the same product with normally distributed values that fill e4m3.

- **The sign** of e4m3 is a bit of its own: products of operands that are never negative toggle one bit less, and sums
  only grow.
- **Fewer values**: with one exponent, or no fraction, three or four of eight bits stand still.
- **Zeros** in half the inputs leave half the multiplications without an effect: in one half of the channels, or in
  every second one, where operands still change from one to the next.
- **The order of channels** is free: where both factors have the same, the product stays. Sorted by size, neighbours
  have like exponents.
- **Bounds** instead of the largest value (`vivace.machinery.fused.scales`) leave values 50 times smaller: another
  exponent, as many bits that change.
- **Exact sums** leave the tensor cores every few steps.
- **One weight** of 38 MB, again and again, need not be read from memory.

{measured}

`down` is {down}, `up` {up}, `qkv` {qkv}: rows, outputs and inputs of FLUX.1's
products. Weights are several copies in turn.{range_}

## What could be used

The order of channels, of a stream and of an MLP's hidden ones, can be chosen when weights are loaded, and changes no
result. Weights that are not negative cost precision and a sum over each row; zeros have to be trained. The algorithm
and attention's dtype are chosen by `fused` already.
"""


def page(note: str, results: Path, record: Path) -> str:
    """Return the page as Markdown.

    Args:
        note: the line above the heading that says the page is generated.
        results: the folder of the records.
        record: of `python -m benchmarks.energy`; it need not exist yet.
    """
    rows = read_rows(record)
    by_case: dict[str, list[Row]] = {}
    for row in rows.values():
        by_case.setdefault(row["case"], []).append(row)
    return _TEXT.format(
        note=note,
        images=_images(results),
        measured=_measured(by_case, record),
        range_=" In brackets: the two loops of each." if by_case else "",
        **{name: " x ".join(map(str, sizes)) for name, sizes in SHAPES.items()},
    )


def _images(results: Path) -> str:
    headings = ("model, steps", "card", "recipe", "s/image", "J/image", "W", "peak")
    lines = markdown_lines(headings, [line for name in WHOLE for line in _of_record(results / name)])
    records = ", ".join(f"[{name}](../../results/{name})" for name in WHOLE)
    return "\n".join(
        [*lines, "", f"Records: {records}. Watts are of the sampled power over the timed calls."]
    )


def _of_record(path: Path) -> Iterator[list[str]]:
    for row in rows_of(read_records(path)):
        windows = [r.gpu for r in row.record.rounds if r.gpu is not None and r.gpu.energy_j]
        if row.latency is None or row.memory is None or not windows:
            continue
        joules = statistics.fmean((window.energy_j or 0.0) / window.calls for window in windows)
        watts = [window.power_w for window in windows if window.power_w is not None]
        name = WHOLE[path.name]
        if name == "Qwen-Image":
            workload = row.record.trial.workload
            name = f"{row.model.removeprefix(SYNTHETIC)}, {workload.num_inference_steps}"
        yield [
            name,
            row.record.environment.device_name.removeprefix("NVIDIA "),
            f"`{row.recipe}`",
            plus_minus(row.latency.median),
            f"{joules:,.0f}",
            f"{statistics.fmean(watts):.0f}" if watts else "-",
            size(row.memory.peak_bytes),
        ]


def _measured(by_case: Mapping[str, Sequence[Row]], record: Path) -> str:
    headings = ("computed by", "operands", "predicted", "measured", "us", "J", "W", "MHz")
    lines = markdown_lines(headings, [_line(case, by_case) for case in CASES])
    if not by_case:
        return "\n".join([_NOT_YET, "", *lines])
    environment = json.loads(record.read_text(encoding="utf-8"))["environment"]
    return "\n".join(
        [
            f"One {environment['device_name']}, torch {environment['libraries']['torch']} "
            f"([record](../../results/{record.name}), `python -m benchmarks.energy`):",
            "",
            *lines,
        ]
    )


def _line(case: Case, by_case: Mapping[str, Sequence[Row]]) -> list[str]:
    rows = [row for row in by_case.get(case.name, ()) if row.get("j") is not None]
    failed = [row["reason"] for row in by_case.get(case.name, ()) if "reason" in row]
    is_product = case.way != "idle" and not case.way.startswith("attention")
    operands = [
        *([f"`{case.shape}`"] if is_product else []),
        *([case.operands] if case.way != "idle" else []),
    ]
    operands += [*([] if case.is_fast else ["exact sums"]), *(["one weight"] if case.is_cached else [])]
    start = [
        _WAYS[case.way],
        ", ".join(operands) or "-",
        "-" if case.predicted is None else f"{case.predicted:.2f}",
    ]
    if not rows:
        return [*start, f"none: {failed[0]}" if failed else "-", *["-"] * 4]
    mean = {key: _mean(row[key] for row in rows) for key in ("us", "j", "w", "mhz")}
    if case.way == "idle":
        return [*start, "-", "-", "-", f"{mean['w']:.0f}", f"{mean['mhz']:.0f}"]
    figures = [f"{mean['us']:.4g}", f"{mean['j']:.3g}", f"{mean['w']:.0f}", f"{mean['mhz']:.0f}"]
    return [*start, _ratio(case, rows, by_case), *figures]


def _ratio(case: Case, rows: Sequence[Row], by_case: Mapping[str, Sequence[Row]]) -> str:
    """Return a case's joules over its reference's, of the means and of each loop beside the reference's mean."""
    beside = [row["j"] for row in by_case.get(case.reference, ()) if row.get("j") is not None]
    if not beside or case.name == case.reference:
        return "1" if case.name == case.reference else "-"
    ratios = [row["j"] / statistics.fmean(beside) for row in rows]
    return f"{statistics.fmean(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"


def _mean(values: Iterable[float | None]) -> float:
    return statistics.fmean(value for value in values if value is not None)
