"""vivace calibrate"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vivace.cli import options

if TYPE_CHECKING:
    from vivace.benchmark.comparison import Comparison
    from vivace.spec.limits import Limits


@click.group()
def calibrate() -> None:
    """Find out once what a technique needs to know of a model; it is kept in vivace's cache."""


def _common(function: Callable[..., int]) -> Callable[..., int]:
    pictures = click.option(
        "--pictures",
        type=click.IntRange(1, 1000),
        default=8,
        show_default=True,
        help="Pictures to draw and to learn from; picture k has seed k.",
    )
    for option in (
        options.as_json,
        options.threads,
        options.device,
        options.workload,
        pictures,
        options.model,
    ):
        function = option(function)
    return function


@calibrate.command()
@_common
@click.option("--degree", type=click.IntRange(1, 8), default=4, show_default=True, help="Of the polynomial.")
def teacache(
    model: str, pictures: int, degree: int, device: str, threads: int | None, as_json: bool, **size: Any
) -> int:
    """Fit the polynomial that teacache rescales changes by, for a FLUX model, and say how well it fits.

    The model draws its own prompts as published. The fit is used from then on, before a published one.

    \b
        vivace calibrate teacache --model tiny-flux
    """
    prepared, arguments = _prepared(model, pictures, device, threads, size)

    from vivace.runtime.calibration import calibrate_teacache

    fit, file = calibrate_teacache(prepared.found, degree=degree, **arguments)
    if as_json:
        click.echo(json.dumps(asdict(fit) | {"degree": fit.degree, "file": str(file)}, indent=2))
        return 0
    click.echo(f"model          {fit.model}")
    click.echo(f"seen           {fit.num_pairs} pairs of steps, {pictures} pictures of {fit.num_steps} steps")
    click.echo(f"input changes  {fit.low:.4g} to {fit.high:.4g}")
    click.echo(f"degree         {fit.degree}")
    click.echo(f"coefficients   {', '.join(f'{c:.6g}' for c in fit.coefficients)}")
    click.echo(f"residual       {fit.residual:.4g} (root mean square, of the output's relative change)")
    click.echo(f"explained      {100 * fit.explained:.1f} % of its variance")
    click.echo(f"kept in        {file}")
    return 0


@calibrate.command()
@_common
def magcache(model: str, pictures: int, device: str, threads: int | None, as_json: bool, **size: Any) -> int:
    """Measure how the residual of a FLUX model's blocks grows from step to step, which magcache decides by.

    The model draws its own prompts as published. The table is used from then on, before a published one.

    \b
        vivace calibrate magcache --model tiny-flux
    """
    prepared, arguments = _prepared(model, pictures, device, threads, size)

    from vivace.runtime.calibration import calibrate_magcache

    ratios, file = calibrate_magcache(prepared.found, **arguments)
    if as_json:
        click.echo(json.dumps(asdict(ratios) | {"file": str(file)}, indent=2))
        return 0
    click.echo(f"model    {ratios.model}")
    click.echo(f"seen     {ratios.num_pictures} pictures of {len(ratios.ratios)} steps")
    click.echo(f"ratios   {', '.join(f'{ratio:.3f}' for ratio in ratios.ratios)}")
    click.echo(f"spread   {ratios.spread:.3g} (standard deviation between pictures, the worst step's)")
    click.echo(f"kept in  {file}")
    return 0


def _prepared(
    model: str, pictures: int, device: str, threads: int | None, size: dict[str, Any]
) -> tuple[Comparison, dict[str, Any]]:
    """What is drawn, checked, and how."""
    from vivace.benchmark.comparison import comparison_of, default_threads

    prepared = comparison_of(model, "baseline", **size)

    import torch

    from vivace.measure.machine import choose_device

    torch.set_num_threads(threads if threads is not None else default_threads(prepared.found))
    workload = prepared.workload
    return prepared, {
        "device": choose_device(device),
        "prompts": workload.prompts,
        "num_pictures": pictures,
        "call": workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
        "on_image": lambda drawn: click.echo(f"[{drawn}/{pictures}]", err=True),
    }


@calibrate.command()
@options.model
@click.option("--cache", "caches", multiple=True, metavar="NAME", help="A step cache; repeat; default: all.")
@options.min_quality
@click.option(
    "--runs",
    type=click.IntRange(1, 20),
    default=6,
    show_default=True,
    help="Settings to try of each cache, at most.",
)
@click.option("--prompt-set", help="What is drawn: tinyworld or real; default: what suits the model.")
@click.option("--seeds", type=click.IntRange(1, 1000), help="Seeds a prompt; default: three.")
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
    """Find the most aggressive setting of each step cache that keeps the quality gate.

    Bisects each cache's threshold, or its share of hits where it has none, over bench runs with quality. What was
    measured is kept in the store: the same command goes on where it stopped.

    \b
        vivace calibrate cache --model tiny-flux --cache first_block_cache --min-quality clip=0.99
    """
    from vivace.benchmark.cache_calibration import calibrate_caches

    found = calibrate_caches(
        model,
        caches,
        limits=limits,
        runs=runs,
        prompt_set=prompt_set,
        num_seeds=seeds,
        device=device,
        threads=threads,
        store=store,
        on_tried=lambda tried: click.echo(f"{tried.recipe}: {tried.reason or tried.outcome}", err=True),
    )
    if as_json:
        click.echo(json.dumps([asdict(one) for one in found], indent=2))
        return 0
    for one in found:
        if one.best is None:
            click.echo(f"{one.cache}: none: {one.reason}")
            continue
        click.echo(
            f"{one.best.recipe}: {_number(one.best.speedup, 'x')}, {_number(one.best.hit_rate)} of the steps reused"
        )
    return 0


def _number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"
