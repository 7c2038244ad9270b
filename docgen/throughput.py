"""The page docs/performance/throughput.md: images a second by batch, from the records of `benchmarks.throughput`."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import call_profiles
from benchmarks.technique_records import read_records
from benchmarks.throughput import FASTEST
from vivace.answers.formatting import size
from vivace.answers.markdown import markdown_lines
from vivace.models.find import SYNTHETIC
from vivace.report.rows import Row, rows_of

HEADINGS = (
    "model, steps, guidance",
    "card",
    "batch",
    "images/s [95 % interval]",
    "s a request",
    "J an image",
    "peak",
    "record",
)
PROFILE_HEADINGS = (
    "model, steps",
    "size",
    "sources",
    "a call",
    "attention",
    "matmuls",
    "convolutions",
    "other",
    "VAE",
)
LARGE_HEADINGS = ("model, steps", "card", "size", "s/image", "J an image", "peak")
_TEXT = """{note}
# Images a second, by batch

How many images one GPU draws in a second when several are drawn in one call, and how long each request then takes. For
those who serve many people, or draw many images at night.

{table}

Whole calls with random weights: text encoders on prompts that count as new, denoiser, VAE, images on the host. All
images of a call are there when it ends, so a request takes as long as its call. Joules are those of the whole card.
`python -m benchmarks.throughput` measures the rows, with the fastest recipe on record that leaves out no step's work:

{recipes}

**SDXL is drawn in the setting of MLPerf inference's SDXL benchmark** (1024 px, Euler, 20 steps, guidance 8), with
random weights: this is not an MLPerf result. The best of that benchmark's published logs is 2.40 images a second
offline on one H200 and 2.26 on one H100, at batch 64 in fp8; its rules also hold the images' CLIP score and FID, which
random weights have not.

## Larger images

One image a call, squares, the models' own steps and guidance ([record](../../results/large-images-h200.json)):

{large}

Four times the pixels take {least:.1f} to {most:.1f} times as long at 2048 px: attention grows with the square of the
tokens. Squares up to 4096 px are drawn where a model's positions reach that far; most models were not trained on them.

## Where the time is

Kernels of one call on an H200 by their kind, seconds ([record](../../results/call-profiles.jsonl), `python -m
benchmarks.call_profiles`); the VAE's are counted in the kinds, too:

{profiles}

## What limits it

Beyond a batch of 4 SDXL gains nothing: the card draws its power cap at any batch, so images a second are watts over the
joules of an image ([energy](energy.md)). SD 1.5, at 512 px, fills the card only in batches.
"""


def page(note: str, results: Path) -> str:
    """Return the page."""
    cells, recipes = [], {}
    for path in sorted(results.glob("throughput-*.json")):
        for row in rows_of_each(path):
            cells.append(_cells(row, path.name))
            recipes[row.model.removeprefix(SYNTHETIC)] = row.recipe
    order = list(FASTEST)
    cells.sort(key=lambda row: (order.index(row[0].split(",")[0]), row[1], int(row[2])))
    large = [row for path in sorted(results.glob("large-images-*.json")) for row in rows_of_each(path)]
    large.sort(
        key=lambda row: (order.index(row.model.removeprefix(SYNTHETIC)), row.record.trial.workload.height)
    )
    times_s = {
        (row.model, row.record.trial.workload.height): row.latency.median.point
        for row in large
        if row.latency
    }
    growth = [
        seconds / times_s[model, 1024]
        for (model, side), seconds in times_s.items()
        if side == 2048 and (model, 1024) in times_s
    ]
    return _TEXT.format(
        least=min(growth, default=0.0),
        most=max(growth, default=0.0),
        note=note,
        large="\n".join(markdown_lines(LARGE_HEADINGS, [_large_cells(row) for row in large])),
        profiles="\n".join(markdown_lines(PROFILE_HEADINGS, _profiles(results / call_profiles.RECORD.name))),
        table="\n".join(markdown_lines(HEADINGS, cells)),
        recipes="\n".join(f"- {name}: `{recipes[name]}`" for name in order if name in recipes),
    )


def _profiles(path: Path) -> list[list[str]]:
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(text)
        kinds, whole = row["kinds_s"], sum(row["kinds_s"].values())
        shown = [kinds.get(name, 0.0) for name in ("attention", "GEMM", "convolution")]
        rows.append(
            [
                f"{row['model'].removeprefix(SYNTHETIC)}, {row['steps']}",
                f"{row['width']}x{row['height']}",
                str(row["images"] or "-"),
                f"{row['call_s']:.3g}",
                *(f"{each:.3g} ({each / whole:.0%})" for each in [*shown, whole - sum(shown)]),
                f"{row['components_s'].get('vae', 0.0):.3g}",
            ]
        )
    return rows


def _large_cells(row: Row) -> list[str]:
    assert row.latency is not None
    workload = row.record.trial.workload
    energy = None if row.gpu is None else row.gpu.energy_j
    return [
        f"{row.model.removeprefix(SYNTHETIC)}, {workload.num_inference_steps}",
        row.record.environment.device_name.removeprefix("NVIDIA "),
        f"{workload.width}x{workload.height}",
        f"{row.latency.median.point:.3g}",
        "-" if energy is None else f"{energy:.0f}",
        "-" if row.memory is None else size(row.memory.peak_bytes),
    ]


def rows_of_each(path: Path) -> list[Row]:
    """Return the rows that were measured, each on its own: batches are not compared."""
    rows = [row for record in read_records(path) for row in rows_of([record])]
    return [row for row in rows if row.latency is not None]


def _cells(row: Row, record: str) -> list[str]:
    assert row.latency is not None
    workload, image_s = row.record.trial.workload, row.latency.median
    interval = ""
    if image_s.low is not None and image_s.high is not None:
        interval = f" [{1 / image_s.high:.3g}, {1 / image_s.low:.3g}]"
    energy = None if row.gpu is None else row.gpu.energy_j
    return [
        f"{row.model.removeprefix(SYNTHETIC)}, {workload.num_inference_steps}, {workload.guidance_scale:g}",
        row.record.environment.device_name.removeprefix("NVIDIA "),
        str(workload.batch),
        f"{1 / image_s.point:.3g}{interval}",
        f"{image_s.point * workload.batch:.3g}",
        "-" if energy is None else f"{energy:.0f}",
        "-" if row.memory is None else size(row.memory.peak_bytes),
        f"[record](../../results/{record})",
    ]
