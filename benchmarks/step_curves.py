"""Speed-up against fidelity on the embedded models: step caches, fewer steps, guidance cutoffs, pruned blocks.

    python -m benchmarks.step_curves tiny-sd --limit-s 500       measure what is missing, until the time limit
    python -m benchmarks.step_curves tiny-flux --device cuda     on a GPU, into a separate record

Each recipe is one `vivace.bench` with the baseline, with image figures: SSIM, PSNR, CLIP margin. It is added to the
record at once, and the same command resumes with what is missing. docs/step-curves.md is generated from the records
(`make docs`).

In addition to time, the denoiser's work is recorded: the floating-point operations of all its calls for an image, over
the baseline's. They are counted while the images are generated again on the CPU, and do not depend on the machine's
load. A cache that decides by content is counted over every prompt, anything else over one.

TeaCache and MagCache with thresholds need calibration. The script does it first on the CPU, as `vivace calibrate
teacache` and `vivace calibrate magcache` do, since the parent process must not initialise the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

import vivace
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.every_model import line
from benchmarks.step_cases import (
    Case,
    check_baseline,
    check_pictures,
    read_cases,
    rows_with_quality,
    with_rounds,
    write_cases,
)
from vivace.benchmark import Run, Timing, studies
from vivace.benchmark.rounds.quality_pass import keys_of
from vivace.cli.display.progress_display import for_this_terminal
from vivace.errors import StoreError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome
from vivace.models.find import LocatedModel, find_model
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import default_threads

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = PROMPT_SETS["tinyworld"]
STEPS = "steps"
"""The curve that all others are compared with."""

_ALIKE = {
    "taylorseer": tuple(f"taylorseer(interval={k})" for k in (2, 3, 4, 6, 8)),
    "pyramid_attention": tuple(f"pyramid_attention(hits={share})" for share in (0.3, 0.5, 0.65, 0.8, 0.9)),
    "prune": tuple(f"prune({share})" for share in (0.1, 0.2, 0.3, 0.4)),
}
_HITS = (0.3, 0.5, 0.65, 0.8)
CURVES: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny-sd": {
        STEPS: tuple(f"steps({k})" for k in (21, 18, 15, 13, 11, 9, 7, 5, 4, 2, 1)),
        "deepcache, branch 0": tuple(f"deepcache(interval={k})" for k in (2, 3, 4, 5, 8)),
        "deepcache, branch 2": tuple(f"deepcache(interval={k},branch=2)" for k in (2, 3, 4, 5, 8)),
        "faster_cache": tuple(f"faster_cache({k})" for k in (2, 3, 4, 5, 8)),
        **_ALIKE,
        "cfg_cutoff": tuple(f"cfg_cutoff({share})" for share in (0.8, 0.6, 0.4, 0.2)),
        # Without guidance: the work of 4, 2 and 1 plain steps.
        "distilled": ("distilled(lcm,steps=8)", "distilled(lcm)", "distilled(lcm,steps=2)"),
    },
    "tiny-flux": {
        STEPS: tuple(f"steps({k})" for k in (24, 20, 17, 14, 12, 10, 8, 6)),
        "first_block_cache": tuple(f"first_block_cache({t})" for t in (0.05, 0.1, 0.15, 0.2, 0.3, 0.5)),
        "teacache": tuple(f"teacache({t})" for t in (0.02, 0.04, 0.07, 0.1, 0.2, 0.4)),
        "seacache": tuple(f"seacache({t})" for t in (0.08, 0.15, 0.2, 0.3, 0.6, 1.0)),
        "seacache, order 1": tuple(f"seacache({t},order=1)" for t in (0.1, 0.2, 0.3, 0.6)),
        "magcache": tuple(f"magcache({t})" for t in (0.03, 0.06, 0.12, 0.24, 0.5, 1.0)),
        # At equal hits the same steps are skipped. With one first block, the default of so small a model, and no last
        # one, both caches are the same there.
        "first_block_cache, hits": tuple(f"first_block_cache(hits={share})" for share in _HITS),
        "dual_block_cache, 1 last": tuple(f"dual_block_cache(last=1,hits={share})" for share in _HITS),
        "dual_block_cache, 2 and 2": tuple(
            f"dual_block_cache(first=2,last=2,hits={share})" for share in _HITS
        ),
        "dual_block_cache, order 1": tuple(f"dual_block_cache(order=1,hits={share})" for share in _HITS),
        "dual_block_cache, masks": tuple(
            f"dual_block_cache(mask={mask})" for mask in ("10c1h1c", "6c1h1c", "6c2h1c", "6c4h1c")
        ),
        "dual_block_cache": tuple(f"dual_block_cache({t})" for t in (0.1, 0.2, 0.3, 0.5)),
        **_ALIKE,
    },
}
"""Recipes by model and curve, the mildest first."""

CALIBRATED = ("teacache", "magcache")
NUM_CALIBRATION_PICTURES = 8


@click.command("step_curves")
@click.argument("name", metavar="MODEL", type=click.Choice(tuple(CURVES)))
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: results/step-curves-DEVICE-MODEL.json.",
)
@click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no recipe after this many seconds.")
@click.option("--only", multiple=True, metavar="RECIPE", help="This recipe; repeat for more. Default: all.")
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(1, len(PROMPTS)),
    default=len(PROMPTS),
    show_default=True,
    help="Number of prompts of the prompt set.",
)
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Timed calls.")
@click.option("--warmup", type=click.IntRange(1, 100), default=1, show_default=True, help="Warm-up calls.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds per recipe."
)
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
def step_curves(
    name: str,
    record: Path | None,
    store: Path,
    limit_s: float | None,
    only: Sequence[str],
    num_prompts: int,
    num_seeds: int,
    rounds: int,
    repeats: int,
    warmup: int,
    timeout: float,
    device: str,
) -> int:
    """Speed-up against fidelity on an embedded model, one line per recipe; resumable."""
    started = time.monotonic()
    path = record or record_file(name, device)
    prompts = PROMPTS[:num_prompts]
    cases = read_cases(path)
    check_pictures(cases, prompts, num_seeds, path)
    requested = [resolve(text) for text in only] or recipes_of(name)
    missing = [recipe for recipe in (resolve(BASELINE), *requested) if not _is_done(cases, recipe)]
    if not missing:
        click.echo("all in the record already")
        return 0
    located = find_model(name)
    _calibrate(located, missing, prompts)
    timing = Timing(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
    operations: dict[str, int] = {}
    with studies.start_launcher(device) as launcher:
        for recipe in missing:
            if limit_s is not None and time.monotonic() - started >= limit_s:
                click.echo(f"{limit_s:g} s are over; the same command goes on with {recipe.text}", err=True)
                return MEASURED_IN_PART
            before = time.monotonic()
            measured = vivace.bench(
                name,
                list(dict.fromkeys([BASELINE, recipe.text])),
                prompts=prompts,
                num_seeds=num_seeds,
                timing=timing,
                device=device,
                store=store,
                quality=True,
                rivals=False,
                progress=for_this_terminal(),
                launcher=launcher,
            )
            check_baseline(cases, measured[0], path)
            case = _case(measured, located, operations)
            cases = _with(cases, case, path)
            cases[BASELINE] = with_rounds(cases[BASELINE], measured[0])
            write_cases(path, cases.values())
            click.echo(f"{_line(cases, case)} ({time.monotonic() - before:.0f} s)")
    return 0


def record_file(name: str, device: str) -> Path:
    return RESULTS / f"step-curves-{device}-{name}.json"


def recipes_of(name: str) -> list[Recipe]:
    """Return the recipes of all curves of a model, each once."""
    listed = [resolve(text) for texts in CURVES[name].values() for text in texts]
    return list({recipe.text: recipe for recipe in listed}.values())


def _is_done(cases: Mapping[str, Case], recipe: Recipe) -> bool:
    """Whether the recipe was measured or failed for good; crashes and timeouts are tried again."""
    return recipe.text in cases and cases[recipe.text].record.outcome.is_final


def _with(cases: Mapping[str, Case], new: Case, path: Path) -> dict[str, Case]:
    for old in list(cases.values())[:1]:
        here, there = new.record.environment.device_name, old.record.environment.device_name
        if here != there:
            raise StoreError(f"{path} was made on {there}, and this is {here}; give --record another file")
    return {**cases, new.recipe: new}


def _decides_by_content(recipe: Recipe) -> bool:
    """Whether the number of operations may depend on the prompt."""
    return any(hasattr(t, "threshold") and getattr(t, "hits", None) is None for t in recipe)


def _calibrate(located: LocatedModel, recipes: Sequence[Recipe], prompts: Sequence[str]) -> None:
    from vivace.runtime.cache_fits import calibrate_magcache, calibrate_teacache

    names = {t.name for recipe in recipes if _decides_by_content(recipe) for t in recipe}
    _set_threads(located)
    for name, calibrate in zip(CALIBRATED, (calibrate_teacache, calibrate_magcache), strict=True):
        if name in names:
            _, kept = calibrate(located, "cpu", prompts, num_pictures=NUM_CALIBRATION_PICTURES)  # type: ignore[operator]
            click.echo(f"calibrated {name} over {NUM_CALIBRATION_PICTURES} images: {kept}", err=True)


def _case(measured: Run, located: LocatedModel, operations: dict[str, int]) -> Case:
    """Return the last record with its figures and work.

    Args:
        operations: operations by recipe, as counted before; the baseline's are added.
    """
    record = measured[-1]
    (compared,) = measured.comparisons
    quality, scorer = compared.quality.figures, compared.quality.scorer
    keys = keys_of([measured[0], record], None, scorer)
    shas = {picture.sha256 for picture in record.rounds[0].pictures}
    figures = tuple(quality[key] for key in keys if key.sha256 in shas and key in quality)
    work = None
    if record.outcome is Outcome.MEASURED:
        prompts = record.trial.workload.prompts
        recipe = Recipe.from_spec(record.trial.recipe)
        by_content = _decides_by_content(recipe)
        work = _work(located, recipe, prompts if by_content else prompts[:1], operations)
    return Case(record=record, figures=figures, scorer=scorer, work=work)


def _work(located: LocatedModel, recipe: Recipe, prompts: Sequence[str], operations: dict[str, int]) -> float:
    """Return the denoiser's operations over the baseline's, for images of these prompts."""
    if BASELINE not in operations:
        operations[BASELINE] = _operations(located, resolve(BASELINE), prompts[:1])
    if recipe.text == BASELINE:
        return 1.0
    return _operations(located, recipe, prompts) / len(prompts) / operations[BASELINE]


def _operations(located: LocatedModel, recipe: Recipe, prompts: Sequence[str]) -> int:
    """Count the denoiser's operations for one image per prompt."""
    import torch

    from benchmarks.flops import count_flops
    from vivace.machinery.technique import component_of
    from vivace.runtime.opening import open_session

    _set_threads(located)
    session = open_session(located, recipe, "cpu", prompts=prompts)

    def draw() -> None:
        for prompt in prompts:
            session(prompt, generator=torch.Generator("cpu").manual_seed(0))

    return count_flops(draw, of=component_of(session.pipe, "denoiser")).total


def _set_threads(located: LocatedModel) -> None:
    import torch

    torch.set_num_threads(default_threads(located))


def _line(cases: Mapping[str, Case], case: Case) -> str:
    row = rows_with_quality(cases)[case.recipe]
    parts = [line(row)]
    if case.work is not None:
        parts.append(f"work {100 * case.work:.1f} %")
    if row.fidelity is not None and row.fidelity.ssim is not None and not row.is_baseline:
        parts.append(f"SSIM {row.fidelity.ssim.point:.3f}")
    if row.fidelity is not None and row.fidelity.clip_kept is not None and not row.is_baseline:
        parts.append(f"CLIP margin kept {100 * row.fidelity.clip_kept.point:.1f} %")
    return ", ".join(parts)


if __name__ == "__main__":
    raise SystemExit(run(step_curves))
