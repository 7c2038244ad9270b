"""Time prompts of lengths that were never drawn before, beside one that was, with random weights on one GPU.

    python -m benchmarks.new_prompts qwen-image-2.1 qwen-image-2512 z-image-turbo --limit-s 300
    python -m benchmarks.new_prompts flux2-klein-9b --images 1 --images 3    with one source image, then with three
    python -m benchmarks.new_prompts flux-kontext --recipe "fused(fp8, attention=fp8)@denoiser+cuda_graph@denoiser"

A session is warmed as a server warms it, which captures graphs of each length of prompts in two steps. Then one prompt
is drawn again and again, and twelve of other lengths once each; text encoder and VAE are inside of each call. The
record has a line for each model, recipe and number of source images.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.fused_models import RECIPES
from benchmarks.record_files import read_lines, write_text
from benchmarks.technique_cases import RESULTS, full_length
from vivace.measure.this_environment import environment
from vivace.models.find import SYNTHETIC
from vivace.models.sources import example_images
from vivace.recipes.resolve import resolve

RECORD = RESULTS / "new-prompts.jsonl"
NUM_WORDS = (90, 5, 175, 12, 27, 115, 19, 58, 36, 140, 73, 44)
_WORDS = ["a", "fisherman", "mends", "his", "old", "net", "by", "the", "quiet", "harbour"]
_GRAPHS = "cuda_graph@denoiser,text_encoder+gpu_postprocess"
_GRAPHS_OF_ALL = "cuda_graph@denoiser,text_encoder,vae+gpu_postprocess"
_EDITS = "fused(fp8, attention=fp8, convolutions=fp8)@denoiser,vae+cuda_graph@denoiser,vae+gpu_postprocess"
FASTEST = {
    "qwen-image-2.1": f"fused(fp8, attention=fp8)+{_GRAPHS}",
    "qwen-image-2512": f"fused(fp8, attention=fp8)+{_GRAPHS}",
    "z-image-turbo": RECIPES["z-image-turbo"][4],
    "krea-2-turbo": f"fused(fp8, attention=fp8)+{_GRAPHS}",
    "ernie-image-turbo": f"fused(fp8, attention=fp8, convolutions=fp8)@denoiser,vae+{_GRAPHS_OF_ALL}",
    "flux2-klein-4b": _EDITS,
    "flux2-klein-9b": _EDITS,
    "flux2-klein-9b-kv": _EDITS,
    "flux2-dev": _EDITS,
    "flux-kontext": _EDITS,
    "qwen-image-edit-2511": "fused(fp8, attention=fp8)+cuda_graph@denoiser+gpu_postprocess",
    "qwen-image-edit-2509": "fused(fp8, attention=fp8)+cuda_graph@denoiser+gpu_postprocess",
}


@click.command("new_prompts")
@click.argument("names", nargs=-1, required=True, metavar="MODEL...", type=click.Choice([*FASTEST]))
@click.option("--recipe", metavar="RECIPE", help="Instead of the fastest one.")
@click.option(
    "--images",
    "numbers",
    multiple=True,
    type=click.IntRange(0, 4),
    default=(0,),
    help="Source images of each call.",
)
@click.option("--new", type=click.IntRange(1, len(NUM_WORDS)), default=len(NUM_WORDS), help="New prompts.")
@click.option("--known", type=click.IntRange(1), default=3, help="Calls of the known prompt.")
@click.option("--steps", type=click.IntRange(2), help="At most; else the model's own number.")
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no model after this many seconds.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda")
def new_prompts(
    names: tuple[str, ...],
    recipe: str | None,
    numbers: tuple[int, ...],
    new: int,
    known: int,
    steps: int | None,
    limit_s: float | None,
    record: Path,
    device: str,
) -> int:
    """Time prompts of new lengths beside a known one."""
    import torch

    began = time.monotonic()
    for name in names:
        if limit_s is not None and time.monotonic() - began >= limit_s:
            click.echo(f"{limit_s:g} s are over; {name} is left", err=True)
            return MEASURED_IN_PART
        own = full_length(name)
        text = resolve(recipe or FASTEST[name]).text
        num_steps = own if steps is None else min(own, steps)
        before = time.perf_counter()
        session = vivace.load(SYNTHETIC + name, text, device=device)
        load_s = time.perf_counter() - before
        session.pipe.set_progress_bar_config(disable=True)
        for images in numbers:
            row = {
                "model": SYNTHETIC + name,
                "recipe": text,
                "images": images,
                "steps": num_steps,
                "load_s": load_s,
            }
            row |= measure(session, images, num_steps, known, NUM_WORDS[:new])
            row["environment"] = environment(device).model_dump(mode="json")
            rows = read_lines(record, line, _key)
            rows[_key(row)] = row
            write_text(record, "".join(json.dumps(each) + "\n" for each in rows.values()))
            click.echo(line(row))
        del session
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
    return 0


def measure(session: Any, images: int, steps: int, known: int, words: tuple[int, ...]) -> dict[str, Any]:
    """Return the times of a warmed session's calls, in seconds."""
    import torch

    size = {name: int(session.defaults[name]) for name in ("height", "width")}
    sources = example_images("FluxKontextPipeline", size) if images else {}
    if images > 1:
        sources = {"image": [*sources.values()] * images}

    def seconds(prompt: str, count: int) -> float:
        before = time.perf_counter()
        session(
            prompt=prompt,
            num_inference_steps=count,
            generator=torch.Generator("cpu").manual_seed(0),
            **sources,
        )
        return time.perf_counter() - before

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    for prompt in (_prompt(10), *session.prompts_to_warm):
        seconds(prompt, 2)
    warm_s = time.perf_counter() - began
    seconds(_prompt(10), steps)
    return {
        "warm_s": warm_s,
        "known_s": [seconds(_prompt(10), steps) for _ in range(known)],
        "words": list(words),
        "new_s": [seconds(_prompt(number), steps) for number in words],
        "graphs": session.evidence().get("cuda_graphs_recorded", 0),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def read(record: Path) -> list[dict[str, Any]]:
    """Return the rows of a record."""
    return list(read_lines(record, line, _key).values())


def line(row: dict[str, Any]) -> str:
    """Describe a row: the time of a known prompt, and of new ones."""
    known, new = statistics.median(row["known_s"]), sorted(row["new_s"])
    middle = statistics.median(new)
    return (
        f"{row['model']}, {row['images']} source images, {row['steps']} steps: {known:.3f} s for a known prompt, "
        f"{middle:.3f} for one of a new length ({new[0]:.3f} to {new[-1]:.3f}; {middle / known:.3f}x, at most "
        f"{new[-1] / known:.3f}x); warmed in {row['warm_s']:.1f} s"
    )


def _prompt(number: int) -> str:
    return " ".join(_WORDS[place % len(_WORDS)] for place in range(number))


def _key(row: dict[str, Any]) -> tuple[str, str, int, str]:
    return row["model"], row["recipe"], row["images"], row["environment"]["device_name"]


if __name__ == "__main__":
    sys.exit(run(new_prompts))
