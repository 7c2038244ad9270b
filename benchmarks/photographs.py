"""At which strength of damage each witness of quality sees it, on crops of photographs.

    pip download --no-deps -d wheels scikit-image==0.26.0 scikit-learn==1.9.1 gradio==6.31.0
    python -m benchmarks.photographs measure --wheels wheels
    python -m benchmarks.photographs record --wheels wheels     writes results/photographs-witnesses.json

The photographs are those that Python packages ship; they are read from the wheels and never kept here. `measure` takes
about two minutes for each photograph on one core, and goes on where it was interrupted.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.command import run
from benchmarks.photograph_crops import PHOTOGRAPHS, Photograph, crops_of
from benchmarks.photograph_power import caption_figures, seen_strengths
from benchmarks.photograph_witnesses import SLOW, Reference, distances, scorer
from benchmarks.record_files import write_text
from vivace.errors import UsageError
from vivace.measure.damage import DAMAGE, HARMLESS, DamageKind
from vivace.measure.image_metrics import Pixels, faults

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "photographs-witnesses.json"
OUT = ROOT / "build" / "photographs"
_SLOW_EACH = 9
"""Every ninth crop is looked at by the slow witnesses too."""

Values = dict[str, list[float]]
"""By witness, the value of each crop."""


@click.group()
def main() -> None:
    """Measure what witnesses see on photographs."""


@main.command()
@click.option("--wheels", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=OUT, show_default=True)
@click.option("--only", "only", multiple=True, help="A photograph; repeat for more; default: all.")
def measure(wheels: Path, out: Path, only: tuple[str, ...]) -> int:
    """Damage crops of each photograph, and keep what every witness says."""
    import torch

    torch.set_num_threads(1)
    names = [photograph.name for photograph in PHOTOGRAPHS]
    if unknown := sorted(set(only) - set(names)):
        raise UsageError(f"--only {unknown[0]}: no such photograph; there are {', '.join(names)}")
    for photograph in PHOTOGRAPHS:
        path = out / f"{photograph.name}.json"
        if path.exists() or (only and photograph.name not in only):
            continue
        write_text(path, json.dumps(measured(photograph, wheels)) + "\n")
        click.echo(f"{photograph.name}: kept in {path}")
    return 0


def measured(photograph: Photograph, wheels: Path) -> dict[str, Any]:
    """Return what every witness says of the photograph's damaged crops, and the embeddings of the crops."""
    crops = crops_of(photograph, wheels)
    references = [Reference.of(crop.image, slow=k % _SLOW_EACH == 0) for k, crop in enumerate(crops)]
    harmless = {change.name: _values(references, change.apply) for change in HARMLESS}
    damaged = {
        kind.name: [_values(references, partial(_damaged, kind, strength)) for strength in kind.strengths]
        for kind in DAMAGE
    }
    return {
        "sizes": [crop.size for crop in crops],
        "harmless": harmless,
        "damaged": damaged,
        "embeddings": [of.embedding.tolist() for of in references if of.embedding is not None],
    }


def _damaged(kind: DamageKind, strength: float, image: Pixels, seed: int) -> Pixels:
    return kind.apply(image, strength, seed)


def _values(references: list[Reference], change: Callable[[Pixels, int], Pixels]) -> Values:
    values: Values = {}
    for k, reference in enumerate(references):
        for name, value in distances(change(reference.image, k), reference).items():
            values.setdefault(name, []).append(round(value, 5))
    return values


def fault_counts(wheels: Path) -> dict[str, dict[str, int]]:
    """Return how many crops are called broken, by fault: as they are, black, of one colour, and as white noise."""
    random = np.random.default_rng(0)
    counts: dict[str, Counter[str]] = {name: Counter() for name in ("crops", "black", "flat", "noise")}
    for photograph in PHOTOGRAPHS:
        for crop in crops_of(photograph, wheels):
            image = crop.image
            broken = {
                "crops": image,
                "black": np.rint(image / 20),
                "flat": np.broadcast_to(np.rint(image.mean(axis=(0, 1))), image.shape),
                "noise": random.integers(0, 256, image.shape).astype(np.float64),
            }
            for name, changed in broken.items():
                counts[name].update(faults(changed) or ["none"])
    return {name: dict(sorted(counted.items())) for name, counted in counts.items()}


@main.command()
@click.option("--wheels", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
@click.option("--out", type=click.Path(path_type=Path), default=OUT, show_default=True)
@click.option("--record", type=click.Path(path_type=Path), default=RECORD, show_default=True)
def record(wheels: Path, out: Path, record: Path) -> int:
    """Compute from which strength each witness sees each kind of damage, and write the record."""
    missing = [p.name for p in PHOTOGRAPHS if not (out / f"{p.name}.json").exists()]
    if missing:
        raise UsageError(
            f"{out} has no {', '.join(missing)}; `measure --wheels FOLDER` measures what is missing"
        )
    values = {p.name: json.loads((out / f"{p.name}.json").read_text(encoding="utf-8")) for p in PHOTOGRAPHS}
    header = {
        "photographs": [
            {
                "name": p.name,
                "package": p.package,
                "file": p.file,
                "licence": p.licence,
                "crops": len(values[p.name]["sizes"]),
            }
            for p in PHOTOGRAPHS
        ],
        "sizes": sorted({size for of in values.values() for size in of["sizes"]}),
        "slow": list(SLOW),
        "slow_crops": sum(len(of["embeddings"]) for of in values.values()),
        "scorer": scorer().id,
        "harmless": [change.name for change in HARMLESS],
        "faults": fault_counts(wheels),
        "captions": caption_figures(
            {p.caption: values[p.name]["embeddings"] for p in PHOTOGRAPHS}, scorer().folder
        ),
    }
    rows = seen_strengths(list(values.values()))
    lines = ",\n".join(json.dumps(row) for row in rows)
    fields = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in header.items())
    write_text(record, f'{{\n{fields},\n"rows": [\n{lines}\n]\n}}\n')
    click.echo(f"wrote {os.path.relpath(record)}: {len(rows)} rows")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
