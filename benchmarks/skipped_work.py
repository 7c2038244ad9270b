"""Measure what skipping work saves on full-size models, compared with what it would save without overhead.

    python -m benchmarks.skipped_work flux-dev --limit-s 300     measure what is missing, until the time limit
    python -m benchmarks.skipped_work flux-dev --operations      count on the CPU what a step and a cache hit compute

Each step cache runs on fixed schedules of 30, 50 and 65 % hits, since thresholds are meaningless with random weights.
They are compared with guidance cutoffs on UNets, no guidance at all (the cost of half a batch), and 20 plain steps.
Everything is timed at the model's own number of steps; each invocation measures the baseline again, and rows are
compared with the baseline before them. docs/skipped-work.md is generated from the records.

On UNets the denoiser is captured with `cuda_graph` in every recipe and in the baseline. Their eager steps are bound by
the CPU that launches kernels, and a step that computes less launches about as many, so such rows would measure the
host. A full step, a hit, and a step without guidance are separate graphs. FLUX's kernels are long enough to be launched
in time; it stays eager.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.command import Measuring, measures, run
from benchmarks.every_model import line
from benchmarks.every_technique import measure
from benchmarks.technique_cases import RESULTS, baseline, full_length
from benchmarks.technique_records import add, check_device, key_of, read_records, row_of
from tests.targets import target_of
from vivace.architectures import ARCHITECTURES, CATALOGUE
from vivace.benchmark import studies
from vivace.foundation.spec.recipe_syntax import RecipeSpec, TechniqueCall
from vivace.foundation.spec.record import Record
from vivace.machinery.technique import Machine
from vivace.models.quiet import quiet
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.weightless import find_weightless

FAMILIES = ("flux-dev", "flux-schnell", "sdxl", "sd15")
HITS = (0.3, 0.5, 0.65)
TRANSFORMER_CACHES = (
    "first_block_cache",
    "dual_block_cache",
    "teacache",
    "magcache",
    "seacache",
    "taylorseer",
    "pyramid_attention",
)
UNET_CACHES = ("deepcache", "faster_cache")
HALVES = ("cfg_cutoff", "faster_cache", "guidance")
"""When these skip work, the denoiser computes one of the two halves of the guidance batch."""
STEPS = 20
OPERATIONS = RESULTS / "skipped-work-operations.json"
_HOPPER = Machine("cuda", "a GPU", (9, 0), None)


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of the denoiser.

    step: a whole call.
    hit: a call that a cache skips, fully or in part, or one without guidance.
    """

    step: int
    hit: int


def caches(name: str) -> tuple[str, ...]:
    """The step caches that run on this model."""
    return TRANSFORMER_CACHES if name.startswith("flux") else UNET_CACHES


def recipes(name: str) -> list[str]:
    """Return the recipes in canonical form, fewer plain steps first: every cache must be compared with them."""
    texts = [f"steps({STEPS})"] if full_length(name) > STEPS else []
    texts += [f"{cache}(hits={hits:g})" for cache in caches(name) for hits in HITS]
    if not name.startswith("flux"):
        texts += ["guidance(1)", *(f"cfg_cutoff({1 - hits:g})" for hits in HITS)]
    return [recipe_of(name, text) for text in texts]


def recipe_of(name: str, text: str) -> str:
    """Return a recipe in canonical form, with the baseline's techniques added unless it has them."""
    own = resolve(text)
    common = [call.name for call in resolve(baseline(name)).techniques]
    if not common or {call.name for call in own.techniques} & set(common):
        return own.text
    return resolve(f"{text}+{baseline(name)}").text


def skipping(recipe: RecipeSpec, among: RecipeSpec) -> TechniqueCall:
    """Return the one technique of a recipe that the baseline (`among`) does not have."""
    (call,) = [call for call in recipe.techniques if call not in among.techniques]
    return call


def record_file(name: str) -> Path:
    return RESULTS / f"skipped-work-{name}.json"


@click.command("skipped_work")
@click.argument("name", metavar="MODEL", type=click.Choice(FAMILIES))
@measures(record="results/skipped-work-MODEL.json", repeats=3, warmup=1)
@click.option(
    "--only",
    multiple=True,
    metavar="RECIPE",
    help="This recipe, with what the model's baseline has; repeat for more.",
)
@click.option(
    "--operations", is_flag=True, help="Measure nothing; count what steps and hits of MODEL compute."
)
def skipped_work(
    name: str,
    how: Measuring,
    only: Sequence[str],
    operations: bool,
) -> int:
    """Measure what skipping saves on one model with random weights, one line per recipe; resumable."""
    if operations:
        with quiet():
            return _count(name)
    record = how.record or record_file(name)
    records = read_records(record)
    done = {key_of(old)[0] for old in records if old.outcome.is_final}
    requested = [recipe_of(name, text) for text in only] or recipes(name)
    requested = [recipe for recipe in requested if recipe not in done]
    if not requested:
        click.echo("all measured already")
        return 0
    behind: Record | None = None
    with studies.start_launcher(how.device) as launcher:
        for recipe in (baseline(name), *requested):
            if how.is_over:
                return how.ended(recipe)
            before = time.monotonic()
            new = measure(name, recipe, full_length(name), how, launcher)
            check_device(records, new, record)
            records = add(new, record, baseline(name), behind)
            if recipe == baseline(name):
                behind = new
            row = row_of(new, records, baseline(name))
            click.echo(f"{line(row)} ({time.monotonic() - before:.0f} s)")
    return 0


def count_operations(name: str, recipe: str) -> Operations:
    """Count on meta tensors, so that nothing is computed; takes some seconds.

    Args:
        recipe: a step cache with a fixed schedule, `cfg_cutoff` or `guidance(1)`.
    """
    from benchmarks.flops import count_flops, denoiser_inputs

    (call,) = resolve(recipe).techniques
    entry, is_flux = CATALOGUE[name], name.startswith("flux")
    batch = 1 if is_flux else 2  # guidance takes two rows
    pipe = find_weightless(name).build()
    denoiser = pipe.transformer if is_flux else pipe.unet
    text_length = ARCHITECTURES[name].text_lengths["text_encoder_2" if is_flux else "text_encoder"]

    def inputs(rows: int) -> dict[str, Any]:
        return denoiser_inputs(
            denoiser,
            height=entry.height,
            width=entry.width,
            text_length=text_length,
            batch=rows,
        )

    def count(rows: int, calls: int) -> int:
        arguments = inputs(rows)

        def draw() -> None:
            for _ in range(calls):
                denoiser(**arguments)

        return count_flops(draw, of=denoiser).total

    step = count(batch, 1)
    if call.name in HALVES:
        return Operations(step, count(1, 1))
    # Of three steps the third is a hit.
    pipe.scheduler.set_timesteps(**_timesteps(pipe))
    pipe._num_timesteps = len(pipe.scheduler.timesteps)
    (halves,) = resolve(f"{call.name}(hits=0.5)").techniques
    target = target_of(_HOPPER, pipe, has_random_weights=True)
    halves.apply(target)
    with denoiser.cache_context("cond"):
        return Operations(step, count(batch, 3) - 2 * step)


def _timesteps(pipe: Any) -> dict[str, Any]:
    """Return the scheduler's arguments."""
    shifted = getattr(pipe.scheduler.config, "use_dynamic_shifting", False)
    return {"num_inference_steps": 4} | ({"mu": 1.0} if shifted else {})


def read_operations() -> dict[str, dict[str, Operations]]:
    """Read the counted operations by model and technique; empty before the first count."""
    if not OPERATIONS.exists():
        return {}
    read = json.loads(OPERATIONS.read_text(encoding="utf-8"))
    return {
        name: {technique: Operations(**counts) for technique, counts in by_technique.items()}
        for name, by_technique in read.items()
    }


def _count(name: str) -> int:
    counts = read_operations()
    counted = {}
    among = resolve(baseline(name)).spec
    techniques = dict.fromkeys(skipping(resolve(text).spec, among).name for text in recipes(name))
    for technique in techniques:
        if technique == "steps":
            continue
        knob = {"cfg_cutoff": "0.5", "guidance": "1"}.get(technique, "hits=0.5")
        counted[technique] = operations = count_operations(name, f"{technique}({knob})")
        click.echo(f"{name} {technique}: a hit computes {operations.hit / operations.step:.2%} of a step")
    counts[name] = counted
    counts_of = {
        model: {technique: {"step": count.step, "hit": count.hit} for technique, count in sorted(by.items())}
        for model, by in sorted(counts.items())
    }
    OPERATIONS.write_text(json.dumps(counts_of, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(skipped_work))
