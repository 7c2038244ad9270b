"""vivace calibrate"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click
from pydantic import Field

from vivace.cli.command import AsJson, command, interrupted
from vivace.cli.measuring.calibrate_witness import witness
from vivace.foundation.spec.limits import MinQuality
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    CallSettings,
    DeviceName,
    ModelName,
    NumSeeds,
    Option,
    Settings,
    Store,
    Threads,
)
from vivace.foundation.spec.study import WorkloadRequest

if TYPE_CHECKING:
    from vivace.benchmark.cache_calibration import SettingTrial
    from vivace.runtime.cache_fits import SearchProgress
    from vivace.runtime.workloads import CheckedRequest


@click.group()
def calibrate() -> None:
    """Calibrate step caches, and the models that judge images, for a model."""


calibrate.add_command(witness)


class CalibrationSettings(CallSettings):
    model: ModelName = "tiny-flux"
    num_images: Annotated[
        int,
        Field(ge=1, le=1000),
        Option("Images to generate and measure; image k has seed k.", "--images --pictures"),
    ] = 8
    device: DeviceName = "auto"
    threads: Threads = None
    as_json: AsJson = False


class TeacacheCommand(CalibrationSettings):
    degree: Annotated[int, Field(ge=1, le=8), Option("Degree of the polynomial.")] = 4


@calibrate.add_command
@command(TeacacheCommand)
def teacache(settings: TeacacheCommand) -> int:
    """Fit the polynomial that teacache uses, for a FLUX model.

    The polynomial rescales the input's change from step to step. It is fitted on images that the baseline generates
    from the model's own prompts. From then on teacache uses this fit for the model, even if there is a published one.

    \b
        vivace calibrate teacache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(settings)

    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_teacache

    def fit_it(is_read: Callable[[], None]) -> int:
        fit, file = calibrate_teacache(
            prepared.located,
            degree=settings.degree,
            on_image=_progress(settings.num_images, is_read),
            **arguments,
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(fit) | {"degree": fit.degree, "file": str(file)}, indent=2))
            return 0
        click.echo(f"model          {fit.model}")
        click.echo(
            f"measured on    {fit.num_pairs} pairs of steps, {settings.num_images} images of {fit.num_steps} steps"
        )
        click.echo(f"input changes  {fit.low:.4g} to {fit.high:.4g}")
        click.echo(f"degree         {fit.degree}")
        click.echo(f"coefficients   {', '.join(f'{c:.6g}' for c in fit.coefficients)}")
        click.echo(
            f"residual       {fit.residual:.4g} (root mean square error of the output's relative change)"
        )
        click.echo(f"explained      {100 * fit.explained:.1f} % of its variance")
        click.echo(f"saved to       {file}")
        return 0

    return guarded(prepared.located, fit_it)


@calibrate.add_command
@command(CalibrationSettings)
def magcache(settings: CalibrationSettings) -> int:
    """Measure the magnitude ratios that magcache uses, for a FLUX model.

    A ratio says how the residual of the model's blocks grows from one step to the next. The ratios are measured on
    images that the baseline generates from the model's own prompts. From then on magcache uses them for the model, even
    if there are published ones.

    \b
        vivace calibrate magcache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(settings)

    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_magcache

    def measure(is_read: Callable[[], None]) -> int:
        ratios, file = calibrate_magcache(
            prepared.located, on_image=_progress(settings.num_images, is_read), **arguments
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(ratios) | {"file": str(file)}, indent=2))
            return 0
        click.echo(f"model        {ratios.model}")
        images = "image" if ratios.num_pictures == 1 else "images"
        click.echo(f"measured on  {ratios.num_pictures} {images} of {len(ratios.ratios)} steps")
        click.echo(f"ratios       {', '.join(f'{ratio:.3f}' for ratio in ratios.ratios)}")
        click.echo(f"spread       {ratios.spread:.3g} (standard deviation between images, at the worst step)")
        click.echo(f"saved to     {file}")
        return 0

    return guarded(prepared.located, measure)


def _progress(num_images: int, is_read: Callable[[], None]) -> Callable[[int], None]:
    def on_image(num_done: int) -> None:
        if num_done == 0:
            is_read()
        else:
            click.echo(f"[{num_done}/{num_images}]", err=True)

    return on_image


def _prepare(settings: CalibrationSettings) -> tuple[CheckedRequest, dict[str, Any]]:
    """Return the checked request, and the arguments of its calibration."""
    from vivace.runtime.workloads import checked_request, default_threads

    prepared = checked_request(settings.model, "baseline", workload=settings.part(WorkloadRequest))

    import torch

    from vivace.measure.machine import choose_device

    torch.set_num_threads(settings.threads or default_threads(prepared.located))
    workload = prepared.workload
    return prepared, {
        "device": choose_device(settings.device),
        "prompts": workload.prompts,
        "num_images": settings.num_images,
        "call": workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
    }


class ScheduleCommand(CalibrationSettings):
    budget: Annotated[str, Option("Computed steps of all, such as 12/28.", metavar="N/STEPS")]
    num_images: Annotated[
        int,
        Field(ge=1, le=1000),
        Option("Images that each schedule is judged by; image k has seed k.", "--images --pictures"),
    ] = 20
    step_cache: Annotated[
        str, Option("The step cache that takes the schedule.", "--cache", metavar="RECIPE")
    ] = "taylorseer(order=0)"
    batch: Annotated[int, Field(ge=1, le=256), Option("Images drawn in one call.")] = 1
    tries: Annotated[int, Field(ge=1, le=100_000), Option("Schedules to try at most.")] = 200
    output: Annotated[
        Path | None, Option("File of the search; default: schedule-MODEL-NofSTEPS.json.", metavar="FILE")
    ] = None


@calibrate.add_command
@command(ScheduleCommand)
def schedule(settings: ScheduleCommand) -> int:
    """Search which steps a step cache computes, of a number that is given.

    Each schedule is judged by the final latents of a few images, beside those with every step computed. All that were
    tried are kept in one file: the same command continues where it stopped, and a recipe takes the file as its mask:
    seacache(mask=FILE).

    \b
        vivace calibrate schedule --model tiny-flux --budget 12/28
    """
    from vivace.answers.formatting import clock
    from vivace.errors import UsageError
    from vivace.runtime.cache_fits import calibrate_schedule, evenly_spread

    budget, _, steps = settings.budget.partition("/")
    if not (budget.isdecimal() and steps.isdecimal() and 2 <= int(steps) <= 1000):
        raise UsageError(f"--budget {settings.budget}: give computed steps of all steps, such as 12/28")
    settings = settings.model_copy(update={"num_inference_steps": int(steps)})
    prepared, arguments = _prepare(settings)
    name = prepared.located.model.name.replace("/", "-")
    path = settings.output or Path(f"schedule-{name}-{budget}of{steps}.json")

    from vivace.cli.watched.guarded import guarded

    def search_it(is_read: Callable[[], None]) -> int:
        begun = False

        def say(progress: SearchProgress) -> None:
            nonlocal begun
            left = f"at most about {clock(progress.seconds_left)} left"
            if not begun:
                begun = True
                is_read()
                images = f"{settings.num_images} images of {budget} computed steps each"
                click.echo(f"at most {progress.most} schedules, {images}; {left}", err=True)
            elif progress.num_tried % 10 == 0:
                click.echo(f"[{progress.num_tried}/{progress.most}] {left}", err=True)

        found = calibrate_schedule(
            prepared.located,
            cache=settings.step_cache,
            budget=int(budget),
            num_steps=int(steps),
            path=path,
            batch=settings.batch,
            most=settings.tries,
            on_progress=say,
            **arguments,
        )
        if settings.as_json:
            click.echo(json.dumps(asdict(found) | {"file": str(path)}, indent=2))
            return 0
        even = found.distances[evenly_spread(int(budget), int(steps))]
        click.echo(f"mask           {found.mask}")
        click.echo(
            f"distance       {found.distances[found.mask]:.4g} (of the final latents; evenly spaced: {even:.4g})"
        )
        click.echo(f"tried          {len(found.distances)} schedules, {settings.num_images} images each")
        click.echo(f"saved to       {path}")
        return 0

    return guarded(prepared.located, search_it)


class CacheCommand(Settings):
    model: ModelName = "tiny-sd"
    caches: Annotated[
        tuple[str, ...], Option("Step cache; repeat for more; default: all.", "--cache", metavar="NAME")
    ] = ()
    limits: MinQuality = None
    runs: Annotated[int, Field(ge=1, le=20), Option("Most settings to try for each cache.")] = 6
    prompt_set: Annotated[
        str | None, Option("Prompts: tinyworld, real or edit; default: the set that suits the model.")
    ] = None
    num_seeds: Annotated[NumSeeds, Option("Seeds per prompt; default: 3.", "--seeds")] = None
    device: DeviceName = "auto"
    threads: Threads = None
    store: Store = Path(DEFAULT_STORE)
    as_json: AsJson = False


@calibrate.add_command
@command(CacheCommand)
def cache(settings: CacheCommand) -> int:
    """Find the most aggressive step caches that pass the quality gate.

    Bisects each cache's threshold, or its share of cache hits if it has no threshold, with one benchmark for each
    setting. Records are kept in the store: the same command continues where it stopped.

    \b
        vivace calibrate cache --model tiny-flux --cache first_block_cache --min-quality clip=0.99
    """
    from vivace.answers.formatting import clock
    from vivace.benchmark.cache_calibration import CACHES, CacheSearch, calibrate_caches
    from vivace.cli.display.progress_display import for_this_terminal

    most = settings.runs * len(settings.caches or CACHES)
    click.echo(f"at most {most} settings, each measured beside the baseline", err=True)
    tried: list[SettingTrial] = []
    started = time.monotonic()

    def say(trial: SettingTrial) -> None:
        tried.append(trial)
        done = len(tried)
        left = (time.monotonic() - started) / done * (most - done)
        after = f"  (at most about {clock(left)} left)" if done < most else ""
        click.echo(
            f"setting {done} of at most {most}, {trial.recipe}: {trial.reason or trial.outcome}{after}",
            err=True,
        )

    try:
        calibrated = calibrate_caches(settings.part(CacheSearch), say, for_this_terminal())
    except KeyboardInterrupt:
        return interrupted(f"{len(tried)} settings and all finished rounds are kept")
    if settings.as_json:
        click.echo(json.dumps([asdict(calibrated) for calibrated in calibrated], indent=2))
        return 0
    for cached in calibrated:
        if cached.best is None:
            click.echo(f"{cached.cache}: none: {cached.reason}")
            continue
        click.echo(
            f"{cached.best.recipe}: {_format(cached.best.speedup, 'x')}, "
            f"{_format(cached.best.hit_rate)} of the steps reused"
        )
    return 0


def _format(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
