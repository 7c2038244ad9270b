"""vivace calibrate"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vivace.cli import options
from vivace.cli.calibrate_witness import witness
from vivace.cli.spec_options import WORKLOAD, SpecCommand, collect

if TYPE_CHECKING:
    from vivace.benchmark.cache_calibration import SettingTrial
    from vivace.foundation.spec.limits import Limits
    from vivace.foundation.spec.study import WorkloadRequest
    from vivace.runtime.request import CheckedRequest


@click.group()
def calibrate() -> None:
    """Calibrate step caches, and the models that judge images, for a model."""


calibrate.add_command(witness)


def _measuring_options(function: Callable[..., int]) -> Callable[..., int]:
    function = collect(workload=WORKLOAD)(function)
    number = click.option(
        "--images",
        "--pictures",
        "num_images",
        type=click.IntRange(1, 1000),
        default=8,
        show_default=True,
        help="Images to generate and measure; image k has seed k.",
    )
    for option in (
        options.as_json,
        options.threads,
        options.device,
        options.workload,
        number,
        options.model_or("tiny-flux"),
    ):
        function = option(function)
    return function


@calibrate.command(cls=SpecCommand)
@_measuring_options
@click.option(
    "--degree", type=click.IntRange(1, 8), default=4, show_default=True, help="Degree of the polynomial."
)
def teacache(
    model: str,
    num_images: int,
    degree: int,
    device: str,
    threads: int | None,
    as_json: bool,
    workload: WorkloadRequest,
) -> int:
    """Fit the polynomial that teacache uses, for a FLUX model.

    The polynomial rescales the input's change from step to step. It is fitted on images that the baseline generates
    from the model's own prompts. From then on teacache uses this fit for the model, even if there is a published one.

    \b
        vivace calibrate teacache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(model, num_images, device, threads, workload)

    from vivace.cli.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_teacache

    def fit_it(is_read: Callable[[], None]) -> int:
        fit, file = calibrate_teacache(
            prepared.located, degree=degree, on_image=_progress(num_images, is_read), **arguments
        )
        if as_json:
            click.echo(json.dumps(asdict(fit) | {"degree": fit.degree, "file": str(file)}, indent=2))
            return 0
        click.echo(f"model          {fit.model}")
        click.echo(
            f"measured on    {fit.num_pairs} pairs of steps, {num_images} images of {fit.num_steps} steps"
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


@calibrate.command(cls=SpecCommand)
@_measuring_options
def magcache(
    model: str, num_images: int, device: str, threads: int | None, as_json: bool, workload: WorkloadRequest
) -> int:
    """Measure the magnitude ratios that magcache uses, for a FLUX model.

    A ratio says how the residual of the model's blocks grows from one step to the next. The ratios are measured on
    images that the baseline generates from the model's own prompts. From then on magcache uses them for the model, even
    if there are published ones.

    \b
        vivace calibrate magcache --model flux-dev --images 16
    """
    prepared, arguments = _prepare(model, num_images, device, threads, workload)

    from vivace.cli.guarded import guarded
    from vivace.runtime.cache_fits import calibrate_magcache

    def measure(is_read: Callable[[], None]) -> int:
        ratios, file = calibrate_magcache(
            prepared.located, on_image=_progress(num_images, is_read), **arguments
        )
        if as_json:
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


def _prepare(
    model: str, num_images: int, device: str, threads: int | None, request: WorkloadRequest
) -> tuple[CheckedRequest, dict[str, Any]]:
    """Return the checked request, and the arguments of its calibration."""
    from vivace.runtime.request import checked_request
    from vivace.runtime.workloads import default_threads

    prepared = checked_request(model, "baseline", workload=request)

    import torch

    from vivace.measure.machine import choose_device

    torch.set_num_threads(threads if threads is not None else default_threads(prepared.located))
    workload = prepared.workload
    return prepared, {
        "device": choose_device(device),
        "prompts": workload.prompts,
        "num_images": num_images,
        "call": workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
    }


@calibrate.command(cls=SpecCommand)
@options.model
@click.option(
    "--cache", "caches", multiple=True, metavar="NAME", help="Step cache; repeat for more; default: all."
)
@options.min_quality
@click.option(
    "--runs",
    type=click.IntRange(1, 20),
    default=6,
    show_default=True,
    help="Most settings to try for each cache.",
)
@click.option("--prompt-set", help="Prompts: tinyworld, real or edit; default: the set that suits the model.")
@click.option("--seeds", type=click.IntRange(1, 1000), help="Seeds per prompt; default: 3.")
@options.device
@options.threads
@options.store
@options.as_json
def cache(
    model: str,
    caches: tuple[str, ...],
    limits: Limits | None,
    runs: int,
    prompt_set: str | None,
    seeds: int | None,
    device: str,
    threads: int | None,
    store: Path,
    as_json: bool,
) -> int:
    """Find the most aggressive step caches that pass the quality gate.

    Bisects each cache's threshold, or its share of cache hits if it has no threshold, with one benchmark for each
    setting. Records are kept in the store: the same command continues where it stopped.

    \b
        vivace calibrate cache --model tiny-flux --cache first_block_cache --min-quality clip=0.99
    """
    from vivace.answers.formatting import clock
    from vivace.benchmark.cache_calibration import CACHES, calibrate_caches
    from vivace.cli.progress_display import for_this_terminal

    most = runs * len(caches or CACHES)
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
        calibrated = calibrate_caches(
            model,
            caches,
            limits=limits,
            runs=runs,
            prompt_set=prompt_set,
            num_seeds=seeds,
            device=device,
            threads=threads,
            store=store,
            on_tried=say,
            progress=for_this_terminal(),
        )
    except KeyboardInterrupt:
        click.echo(
            f"\ninterrupted; {len(tried)} settings and all finished rounds are kept. "
            "To continue, run the same command:",
            err=True,
        )
        click.echo(f"  {options.command_line()}", err=True)
        return 130
    if as_json:
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
