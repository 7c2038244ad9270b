"""Profile whole calls of the fastest recipes, with random weights on one GPU: where the time of a size or an edit is.

    python -m benchmarks.call_profiles qwen-image-2.1 flux-dev --side 1024 --side 2048
    python -m benchmarks.call_profiles qwen-image-edit-2511 --task edit --steps 8
    python -m benchmarks.call_profiles ernie-image-turbo --text repeated --text prompts

Each case is a process of its own, and a line of results/call-profiles.jsonl: seconds of the kernels of one call by
their kind and by component, and the longest kernels. The same command goes on with what the record lacks.
"""

from __future__ import annotations

import itertools
import json
import sys
from typing import Any, Literal

import click

from benchmarks import new_prompts, throughput
from benchmarks.command import Measuring, measures, run
from benchmarks.record_files import read_lines, write_text
from benchmarks.technique_cases import RESULTS, full_length
from vivace.benchmark import studies
from vivace.benchmark.profiles import profile
from vivace.foundation.spec.profiling import Profile
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve

RECORD = RESULTS / "call-profiles.jsonl"
FASTEST = new_prompts.FASTEST | throughput.FASTEST
_NUM_KERNELS = 24
Text = Literal["prompts", "repeated"]


@click.command("call_profiles")
@click.argument("names", nargs=-1, required=True, metavar="MODEL...", type=click.Choice([*FASTEST]))
@click.option("--recipe", metavar="RECIPE", help="Instead of the fastest one.")
@click.option(
    "--side", "sides", multiple=True, type=click.IntRange(64, 8192), help="Pixels; else the model's own."
)
@click.option(
    "--text", "texts", multiple=True, type=click.Choice(["prompts", "repeated"]), default=("prompts",)
)
@click.option("--task", type=click.Choice(["text", "edit"]), default="text", show_default=True)
@click.option("--steps", type=click.IntRange(1), help="At most; else the model's own number.")
@measures(record=str(RECORD), repeats=1, warmup=2)
def call_profiles(
    names: tuple[str, ...],
    how: Measuring,
    recipe: str | None,
    sides: tuple[int, ...],
    texts: tuple[Text, ...],
    task: Literal["text", "edit"],
    steps: int | None,
) -> int:
    """Profile one call of each model, size and kind of prompts; resumable."""
    record = how.record or RECORD
    with studies.start_launcher(how.device) as launcher:
        for name, side, text in itertools.product(names, sides or (None,), texts):
            own = full_length(name)
            size: dict[str, Any] = {} if side is None else {"height": side, "width": side}
            written = resolve(recipe or FASTEST[name]).text
            rows = read_lines(record, line, _key)
            if any(
                _key(row)[:2] == (SYNTHETIC + name, written) and _is_case(row, side, text)
                for row in rows.values()
            ):
                continue
            if how.is_over:
                return how.ended(name)
            made = profile(
                SYNTHETIC + name,
                written,
                calls=1,
                task=task,
                text=text,
                launcher=launcher,
                timing=how.timing,
                device=how.device,
                num_inference_steps=own if steps is None else min(own, steps),
                **size,
            ).profile
            row = row_of(made)
            rows[_key(row)] = row
            write_text(record, "".join(json.dumps(each) + "\n" for each in rows.values()))
            click.echo(line(row))
    return 0


def row_of(made: Profile) -> dict[str, Any]:
    """Return a profile as a row of the record; times in seconds."""
    workload = made.trial.workload
    kernels = sorted(made.kernels, key=lambda kernel: kernel.cuda_s, reverse=True)
    return {
        "model": made.trial.model.name,
        "recipe": made.trial.recipe.text,
        "height": workload.height,
        "width": workload.width,
        "steps": workload.num_inference_steps,
        "text": workload.text,
        "images": 1 if workload.sources else 0,
        "call_s": made.plain_s,
        "traced_s": made.traced_s,
        "busy_s": made.gpu_busy_s,
        "host_late_s": made.host_late_s,
        "peak_bytes": None if made.memory is None else made.memory.peak_bytes,
        "kinds_s": _by_time({share.name: share.cuda_s for share in made.families}),
        "components_s": _by_time({share.name: share.cuda_s for share in made.components}),
        "kernels": [
            [kernel.name[:120], kernel.cuda_s, kernel.num_calls] for kernel in kernels[:_NUM_KERNELS]
        ],
        "environment": made.environment.model_dump(mode="json"),
    }


def line(row: dict[str, Any]) -> str:
    """Describe a row: seconds of the call, and of its kernels by kind."""
    whole = sum(row["kinds_s"].values()) or 1
    kinds = ", ".join(
        f"{name} {each / whole:.0%}" for name, each in row["kinds_s"].items() if each >= whole / 100
    )
    return (
        f"{row['model']}, {row['width']}x{row['height']}, {row['steps']} steps, {row['images']} images, {row['text']}: "
        f"{row['call_s']:.3f} s a call, kernels {whole:.3f} s: {kinds}"
    )


def _by_time(seconds: dict[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: item[1], reverse=True))


def _key(row: dict[str, Any]) -> tuple[str, str, int, int, str, int]:
    return row["model"], row["recipe"], row["height"], row["steps"], row["text"], row["images"]


def _is_case(row: dict[str, Any], side: int | None, text: str) -> bool:
    return side in (None, row["height"]) and row["text"] == text


if __name__ == "__main__":
    sys.exit(run(call_profiles))
