"""Speed-up against fidelity on the embedded models: every step cache, fewer steps, guidance cut off, blocks taken out.

    python -m benchmarks.step_curves tiny-sd --limit-s 500       measure what the record lacks, until the time is over
    python -m benchmarks.step_curves tiny-flux --device cuda     on a GPU, into a record of its own

Each recipe is one `vivace.bench` beside the baseline, with the figures of its pictures: SSIM, PSNR, CLIP's margin. It
is added to the record as soon as it is there, and the same command goes on with what is missing. docs/step-curves.md is
made of the records (`make docs`).

Beside the time stands the denoiser's work: the floating-point operations that all its calls of a picture take, over the
baseline's. They are counted while pictures are drawn once more, on the CPU, and do not depend on how busy a machine is.
A cache that decides by content is counted over every prompt, anything else over one.

TeaCache and MagCache by threshold need to know their model. The script finds that out first, as `vivace calibrate
teacache` and `vivace calibrate magcache` do, on the CPU: the process that starts work on a GPU never touches it itself.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.every_model import line
from vivace.benchmark import Run, Timing, studies
from vivace.benchmark.comparison import default_threads
from vivace.benchmark.figures import keys_of
from vivace.cli.progress import for_this_terminal
from vivace.errors import StoreError
from vivace.models.find import Found, find_model
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.spec.base import Spec
from vivace.spec.figures import PictureFigures, QualityPass
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome, Record

RESULTS = Path(__file__).parents[1] / "results"
PROMPTS = PROMPT_SETS["tinyworld"]
STEPS = "steps"
"""The curve that every other one is held against."""

_ALIKE = {
    "taylorseer": tuple(f"taylorseer(interval={k})" for k in (2, 3, 4, 6, 8)),
    "pyramid_attention": tuple(f"pyramid_attention(hits={share})" for share in (0.3, 0.5, 0.65, 0.8, 0.9)),
    "prune": tuple(f"prune({share})" for share in (0.1, 0.2, 0.3, 0.4)),
}
CURVES: dict[str, dict[str, tuple[str, ...]]] = {
    "tiny-sd": {
        STEPS: tuple(f"steps({k})" for k in (21, 18, 15, 13, 11, 9, 7, 5, 4, 2, 1)),
        "deepcache, branch 0": tuple(f"deepcache(interval={k})" for k in (2, 3, 4, 5, 8)),
        "deepcache, branch 2": tuple(f"deepcache(interval={k},branch=2)" for k in (2, 3, 4, 5, 8)),
        "faster_cache": tuple(f"faster_cache({k})" for k in (2, 3, 4, 5, 8)),
        **_ALIKE,
        "cfg_cutoff": tuple(f"cfg_cutoff({share})" for share in (0.8, 0.6, 0.4, 0.2)),
        "token_merging": tuple(f"token_merging({share})" for share in (0.25, 0.5, 0.75)),
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
        **_ALIKE,
    },
}
"""By model and curve the recipes, the mildest first."""

CALIBRATED = ("teacache", "magcache")
NUM_CALIBRATION_PICTURES = 8


class Case(Spec):
    """One recipe.

    figures: of the record's pictures, against the baseline's.
    scorer: the CLIP model that they hold the scores of.
    work: the denoiser's operations over the baseline's; None where nothing was measured.
    """

    record: Record
    figures: tuple[PictureFigures, ...]
    scorer: str | None
    work: float | None

    @property
    def recipe(self) -> str:
        return self.record.trial.recipe.text


@click.command("step_curves")
@click.argument("name", metavar="MODEL", type=click.Choice(tuple(CURVES)))
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: results/step-curves-DEVICE-MODEL.json.",
)
@click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True)
@click.option(
    "--limit-s", type=click.FloatRange(min=0), help="Start no further recipe after so many seconds."
)
@click.option("--only", multiple=True, metavar="RECIPE", help="This recipe; repeat for more. Default: all.")
@click.option(
    "--prompts",
    "num_prompts",
    type=click.IntRange(1, len(PROMPTS)),
    default=len(PROMPTS),
    show_default=True,
    help="So many of the prompt set.",
)
@click.option("--seeds", "num_seeds", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Timed calls.")
@click.option("--warmup", type=click.IntRange(1, 100), default=1, show_default=True, help="Calls before.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds a recipe."
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
    """Speed-up against fidelity on an embedded model, one line a recipe; resumable."""
    started = time.monotonic()
    path = record or record_file(name, device)
    prompts = PROMPTS[:num_prompts]
    cases = read_cases(path)
    check_pictures(cases, prompts, num_seeds, path)
    asked = [resolve(text) for text in only] or recipes_of(name)
    wanted = [one for one in (resolve(BASELINE), *asked) if not _is_done(cases, one)]
    if not wanted:
        click.echo("all in the record already")
        return 0
    found = find_model(name)
    _calibrate(found, wanted, prompts)
    timing = Timing(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
    operations: dict[str, int] = {}
    with studies.start_launcher(device) as launcher:
        for recipe in wanted:
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
            case = _case(measured, found, operations)
            cases = _with(cases, case, path)
            write_cases(path, cases.values())
            click.echo(f"{_line(cases, case)} ({time.monotonic() - before:.0f} s)")
    return 0


def record_file(name: str, device: str) -> Path:
    return RESULTS / f"step-curves-{device}-{name}.json"


def recipes_of(name: str) -> list[Recipe]:
    """Of all curves of a model, each once."""
    found = [resolve(text) for texts in CURVES[name].values() for text in texts]
    return list({recipe.text: recipe for recipe in found}.values())


def read_cases(path: Path) -> dict[str, Case]:
    """By recipe, in the record's order; none if there is no such file.

    Raises:
        StoreError: it is no list of cases.
    """
    if not path.exists():
        return {}
    try:
        found = [Case.model_validate(item) for item in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise StoreError(f"{path} is no record of this script ({why}); give --record another file") from error
    return {case.recipe: case for case in found}


def write_cases(path: Path, cases: Any) -> None:
    """A JSON list, a line a case; whole or not at all."""
    lines = ",\n".join(json.dumps(_rounded(case.model_dump(mode="json"))) for case in cases)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(f"[\n{lines}\n]\n")
    os.replace(part, path)


def rows_with_quality(cases: Mapping[str, Case]) -> dict[str, Row]:
    """The row of each recipe, compared with the baseline; empty without one."""
    if BASELINE not in cases:
        return {}
    ordered = [cases[BASELINE], *(case for recipe, case in cases.items() if recipe != BASELINE)]
    figures = {row.key: row for case in ordered for row in case.figures}
    rows = rows_of([case.record for case in ordered], QualityPass(figures, ordered[0].scorer))
    return {row.recipe: row for row in rows}


def check_pictures(cases: Mapping[str, Case], prompts: Sequence[str], num_seeds: int, path: Path) -> None:
    """Rows of other pictures cannot stand beside each other.

    Raises:
        StoreError: the record holds others.
    """
    for case in list(cases.values())[:1]:
        held = case.record.trial.workload
        if (held.prompts, len(held.seeds)) != (tuple(prompts), num_seeds):
            raise StoreError(
                f"{path} holds {len(held.prompts)} prompts at {len(held.seeds)} seeds, and {len(prompts)} at "
                f"{num_seeds} are asked for; give --prompts and --seeds as it has them, or --record another file"
            )


def check_baseline(cases: Mapping[str, Case], baseline: Record, path: Path) -> None:
    """Figures are against the baseline's pictures, which a resumed run may have drawn again.

    Raises:
        StoreError: they are not those of the record.
    """
    if BASELINE not in cases:
        return
    drawn, held = (
        [picture.sha256 for picture in record.rounds[0].pictures]
        for record in (baseline, cases[BASELINE].record)
    )
    if drawn != held:
        raise StoreError(
            f"the baseline's pictures are not those of {path} any more, so nothing can be added to it; give --record "
            f"another file"
        )


def _is_done(cases: Mapping[str, Case], recipe: Recipe) -> bool:
    """Measured, or failed in a way that would repeat itself; what crashed or timed out is tried again."""
    return recipe.text in cases and cases[recipe.text].record.outcome.is_final


def _with(cases: Mapping[str, Case], new: Case, path: Path) -> dict[str, Case]:
    for old in list(cases.values())[:1]:
        here, there = new.record.environment.device_name, old.record.environment.device_name
        if here != there:
            raise StoreError(f"{path} was made on {there}, and this is {here}; give --record another file")
    return {**cases, new.recipe: new}


def _decides_by_content(recipe: Recipe) -> bool:
    """Whether another prompt may take another number of operations."""
    return any(hasattr(t, "threshold") and getattr(t, "hits", None) is None for t in recipe)


def _calibrate(found: Found, wanted: Sequence[Recipe], prompts: Sequence[str]) -> None:
    from vivace.runtime.calibration import calibrate_magcache, calibrate_teacache

    names = {t.name for recipe in wanted if _decides_by_content(recipe) for t in recipe}
    _set_threads(found)
    for name, calibrate in zip(CALIBRATED, (calibrate_teacache, calibrate_magcache), strict=True):
        if name in names:
            _, kept = calibrate(found, "cpu", prompts, num_pictures=NUM_CALIBRATION_PICTURES)  # type: ignore[operator]
            click.echo(f"calibrated {name} over {NUM_CALIBRATION_PICTURES} pictures: {kept}", err=True)


def _case(measured: Run, found: Found, operations: dict[str, int]) -> Case:
    """The last of the records with its figures and work.

    Args:
        operations: of the recipes that were counted before, by recipe and prompt; the baseline's are added.
    """
    record = measured[-1]
    (compared,) = measured.comparisons
    known, scorer = compared.quality.figures, compared.quality.scorer
    keys = keys_of([measured[0], record], None, scorer)
    shas = {picture.sha256 for picture in record.rounds[0].pictures}
    figures = tuple(known[key] for key in keys if key.sha256 in shas and key in known)
    work = None
    if record.outcome is Outcome.MEASURED:
        prompts = record.trial.workload.prompts
        recipe = Recipe.from_spec(record.trial.recipe)
        by_content = _decides_by_content(recipe)
        work = _work(found, recipe, prompts if by_content else prompts[:1], operations)
    return Case(record=record, figures=figures, scorer=scorer, work=work)


def _work(found: Found, recipe: Recipe, prompts: Sequence[str], operations: dict[str, int]) -> float:
    """The denoiser's operations over the baseline's, of pictures of these prompts."""
    if BASELINE not in operations:
        operations[BASELINE] = _operations(found, resolve(BASELINE), prompts[:1])
    if recipe.text == BASELINE:
        return 1.0
    return _operations(found, recipe, prompts) / len(prompts) / operations[BASELINE]


def _operations(found: Found, recipe: Recipe, prompts: Sequence[str]) -> int:
    """Of the denoiser, over a picture a prompt."""
    import torch

    from vivace.contract import component_of
    from vivace.measure.flops import count_flops
    from vivace.runtime.session import open_session

    _set_threads(found)
    session = open_session(found, recipe, "cpu", prompts=prompts)

    def draw() -> None:
        for prompt in prompts:
            session(prompt, generator=torch.Generator("cpu").manual_seed(0))

    return count_flops(draw, of=component_of(session.pipe, "denoiser")).total


def _set_threads(found: Found) -> None:
    import torch

    torch.set_num_threads(default_threads(found))


def _line(cases: Mapping[str, Case], case: Case) -> str:
    row = rows_with_quality(cases)[case.recipe]
    said = [line(row)]
    if case.work is not None:
        said.append(f"work {100 * case.work:.1f} %")
    if row.fidelity is not None and row.fidelity.ssim is not None and not row.is_baseline:
        said.append(f"SSIM {row.fidelity.ssim.point:.3f}")
    if row.fidelity is not None and row.fidelity.clip_kept is not None and not row.is_baseline:
        said.append(f"CLIP margin kept {100 * row.fidelity.clip_kept.point:.1f} %")
    return ", ".join(said)


def _rounded(value: Any) -> Any:
    """Floats to six digits: a record is read by people and kept for good."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return value


if __name__ == "__main__":
    raise SystemExit(run(step_curves))
