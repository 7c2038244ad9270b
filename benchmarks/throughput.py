"""Measure images a second of the fastest recipes by batch, with random weights on one GPU.

    python -m benchmarks.throughput                      every model and batch that the record lacks
    python -m benchmarks.throughput sdxl --limit-s 400   one model; the same command goes on
    python -m benchmarks.throughput flux-dev --batch 1 --side 1024 --side 2048      squares of other sizes

SDXL is drawn in the setting of MLPerf inference's SDXL benchmark: 1024 px, Euler, 20 steps, guidance 8. With random
weights that is not an MLPerf result. Other models have their own steps. Text encoders and VAE are inside of each call,
on prompts that count as new. Each batch is a process of its own, and a row of results/throughput-CARD.json once it is
measured. Squares of other sizes than the model's own are rows of results/large-images-CARD.json, with the model's own
steps.
"""

from __future__ import annotations

import itertools
import re
import sys
import time

import click

import vivace
from benchmarks.command import Measuring, measures, run
from benchmarks.fused_models import RECIPES
from benchmarks.record_files import read_list, write_records
from benchmarks.technique_cases import RESULTS
from vivace.answers.formatting import size
from vivace.benchmark import studies
from vivace.benchmark.rounds.runner import ask_environment
from vivace.foundation.spec.record import Outcome, Record
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

BATCHES = (1, 2, 4, 8, 16)
_UNET = "fused(fp8, convolutions=fp8)@denoiser,vae+cuda_graph@denoiser,text_encoder{},vae+gpu_postprocess"
FASTEST = {
    "sdxl": _UNET.format(",text_encoder_2"),
    "sd15": _UNET.format(""),
    "flux2-klein-4b": RECIPES["flux2-klein-4b"][4],
    "z-image-turbo": RECIPES["z-image-turbo"][4],
    "flux-dev": "fused(fp8, attention=fp8, convolutions=fp8)@denoiser,vae+cuda_graph@denoiser,vae+gpu_postprocess",
}
"""By model: the fastest recipe on record that leaves out no step's work."""
SETTINGS = {"sdxl": {"num_inference_steps": 20, "guidance_scale": 8.0}}
"""Other than the model's own."""


@click.command("throughput")
@click.argument("names", nargs=-1, metavar="[MODEL]...", type=click.Choice([*FASTEST]))
@click.option(
    "--batch", "batches", multiple=True, type=click.IntRange(1, 256), default=BATCHES, show_default=True
)
@click.option(
    "--side",
    "sides",
    multiple=True,
    type=click.IntRange(64, 8192),
    metavar="PIXELS",
    help="Of square images.",
)
@measures(record="results/throughput-CARD.json", repeats=4, warmup=2)
def throughput(
    names: tuple[str, ...], how: Measuring, batches: tuple[int, ...], sides: tuple[int, ...]
) -> int:
    """Measure images a second of the fastest recipes by batch; resumable."""
    with studies.start_launcher(how.device) as launcher:
        card = ask_environment(launcher, how.device, None).device_name
        of_card = re.sub("[^a-z0-9]+", "-", card.lower()).strip("-")
        record = how.record or RESULTS / f"{'large-images' if sides else 'throughput'}-{of_card}.json"
        for name in names or FASTEST:
            recipe = resolve(FASTEST[name]).text
            for side, batch in itertools.product(sides or (None,), batches):
                records = read_list(record, Record)
                if any(_is_case(each, SYNTHETIC + name, batch, side) for each in records):
                    continue  # a case that could not be measured has no row, and is tried again
                if how.is_over:
                    return how.ended(f"{name} at batch {batch}")
                setting = SETTINGS.get(name, {}) if side is None else {"height": side, "width": side}
                before = time.monotonic()
                (measured,) = vivace.bench(
                    SYNTHETIC + name,
                    [recipe],
                    batches=(batch,),
                    timing=how.timing,
                    device=how.device,
                    store=how.store,
                    quality=False,
                    rivals=False,
                    plan=False,
                    launcher=launcher,
                    **setting,
                )
                if measured.outcome is Outcome.MEASURED:
                    write_records(record, [*records, measured])
                click.echo(f"{line(measured)} ({time.monotonic() - before:.0f} s)")
    return 0


def line(record: Record) -> str:
    """Describe a record in one line: images a second, joules an image, seconds of a call, memory."""
    (row,) = rows_of([record])
    workload = record.trial.workload
    case = f"{row.model}, {workload.width}x{workload.height}, at batch {workload.batch}"
    if row.latency is None:
        return f"{case}: {row.outcome.value}: {row.reason}"
    image_s = row.latency.median.point
    parts = [f"{1 / image_s:.3g} images/s", f"{image_s * record.trial.workload.batch:.3g} s a call"]
    if row.gpu is not None and row.gpu.energy_j is not None:
        parts.append(f"{row.gpu.energy_j:.0f} J an image")
    if row.memory is not None:
        parts.append(f"peak {size(row.memory.peak_bytes)}")
    return f"{case}: {', '.join(parts)}"


def _is_case(record: Record, model: str, batch: int, side: int | None) -> bool:
    workload = record.trial.workload
    is_side = side is None or (workload.height, workload.width) == (side, side)
    return is_side and (record.trial.model.name, workload.batch) == (model, batch)


if __name__ == "__main__":
    sys.exit(run(throughput))
