"""Draw equal calls again and again on one GPU, and count the images that differ.

    python -m benchmarks.same_bits --record results/same-bits.jsonl
    python -m benchmarks.same_bits --case synthetic:z-image-turbo "fused(fp8)" --side 512 --calls 200 --steps 1

Each recipe draws in a process of its own, all at the same time: where several processes take turns on a GPU, kernels
are interrupted anywhere, which shows a race that a GPU of one's own hides for thousands of calls. Four prompts take
turns, each with one seed. A line a recipe: how many calls, how many distinct images of each prompt, and the largest
difference of a channel value, in steps of 1/255. Exit code 1 if any image differs.
"""

from __future__ import annotations

import collections
import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import run
from benchmarks.record_files import write_text
from vivace.measure.this_environment import environment

CASES = (
    ("tiny-sd", "baseline"),
    ("tiny-sd", "fused(bf16)@denoiser"),
    ("tiny-sd", "fused(fp8)@denoiser,vae"),
    ("tiny-sd", "fused(fp8, convolutions=fp8)@denoiser,vae"),
    ("tiny-sd", "fused(fp8)@denoiser+cuda_graph"),
    ("tiny-flux", "fused(fp8)"),
)
PROMPTS = ("a blue circle", "a yellow star", "a red square", "a green star")


def draw_equal_calls(
    model: str, recipe: str, calls: int, steps: int, side: int | None, until: float, device: str
) -> dict[str, Any]:
    """Draw in this process, until all calls are done or `time.time()` reaches `until`; return the counts."""
    import numpy as np
    import torch

    session = vivace.load(model, recipe, device=device)
    size: dict[str, Any] = {} if side is None else {"height": side, "width": side}
    hashes = [collections.Counter[str]() for _ in PROMPTS]
    first: dict[int, Any] = {}
    largest = num_drawn = 0
    while num_drawn < calls and time.time() < until:
        index = num_drawn % len(PROMPTS)
        generator = torch.Generator("cpu").manual_seed(3 + index)
        image = session(PROMPTS[index], num_inference_steps=steps, generator=generator, **size).images[0]
        pixels = np.asarray(image).astype(np.int16)
        hashes[index][hashlib.sha256(pixels.tobytes()).hexdigest()] += 1
        largest = max(largest, int(np.abs(pixels - first.setdefault(index, pixels)).max()))
        num_drawn += 1
    return {
        "model": model,
        "recipe": recipe,
        "steps": steps,
        **({} if side is None else {"side": side}),
        "calls": num_drawn,
        "distinct": [len(counts) for counts in hashes],
        "odd_calls": sum(counts.total() - max(counts.values(), default=0) for counts in hashes),
        "largest_difference": largest,
    }


def draw_side_by_side(
    cases: tuple[tuple[str, str], ...],
    calls: int,
    steps: int,
    limit_s: float,
    device: str = "cuda",
    side: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Draw all cases at the same time on one GPU, each in a process; yield a row for each.

    Raises:
        RuntimeError: a process failed; after the rows of the others.
    """
    until = time.time() + limit_s
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "benchmarks.same_bits",
                "--case",
                *case,
                "--calls",
                str(calls),
                "--steps",
                str(steps),
                "--until",
                str(until),
                "--device",
                device,
                *(() if side is None else ("--side", str(side))),
            ],
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        for case in cases
    ]
    failed = []
    for (model, recipe), process in zip(cases, processes, strict=True):
        output, _ = process.communicate()
        if process.returncode:
            failed.append(f"{model} {recipe}: its process ended with exit code {process.returncode}")
            continue
        yield json.loads(output.splitlines()[-1]) | {"processes_on_this_gpu": len(cases)}
    if failed:
        raise RuntimeError("; ".join(failed))


@click.command()
@click.option("--calls", default=1000, show_default=True, help="Calls of each recipe.")
@click.option("--steps", default=4, show_default=True, help="Steps of a call.")
@click.option("--limit-s", default=1200.0, show_default=True, help="End after so many seconds.")
@click.option("--record", type=click.Path(path_type=Path), help="Write the rows here.")
@click.option("--device", default="cuda", show_default=True)
@click.option(
    "--case", "cases", nargs=2, multiple=True, metavar="MODEL RECIPE", help="Instead of CASES; repeatable."
)
@click.option("--side", type=click.IntRange(64, 8192), help="Pixels of a square; else the model's own size.")
@click.option("--until", type=float, hidden=True)
def main(
    calls: int,
    steps: int,
    limit_s: float,
    record: Path | None,
    device: str,
    cases: tuple[tuple[str, str], ...],
    side: int | None,
    until: float | None,
) -> int:
    """Draw equal calls by several processes on one GPU, and count the images that differ."""
    if until is not None:
        ((model, recipe),) = cases
        click.echo(json.dumps(draw_equal_calls(model, recipe, calls, steps, side, until, device)))
        return 0
    head = environment(device).model_dump(mode="json")
    rows = []
    for row in draw_side_by_side(cases or CASES, calls, steps, limit_s, device, side):
        click.echo(json.dumps(row))
        rows.append(row | {"environment": head})
        if record is not None:
            write_text(record, "".join(json.dumps(each) + "\n" for each in rows))
    return 1 if any(row["odd_calls"] for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(run(main))
