"""vivace calibrate"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from vivace.cli import options


@click.group()
def calibrate() -> None:
    """Fit once what a technique needs to know of a model; it is kept in vivace's cache."""


@calibrate.command()
@options.model
@click.option(
    "--pictures",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="Pictures to draw and to learn from; picture k has seed k.",
)
@click.option("--degree", type=click.IntRange(1, 8), default=4, show_default=True, help="Of the polynomial.")
@options.workload
@options.device
@options.threads
@options.as_json
def teacache(
    model: str,
    pictures: int,
    degree: int,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    device: str,
    threads: int | None,
    as_json: bool,
) -> int:
    """Fit the polynomial that teacache rescales changes by, for a FLUX model, and say how well it fits.

    The model draws its own prompts as published. The fit is used from then on, before a published one.

    \b
        vivace calibrate teacache --model tiny-flux
    """
    from vivace.benchmark.prepare import default_threads, prepare

    prepared = prepare(
        model,
        ["baseline"],
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )

    import torch

    from vivace.measure.machine import choose_device
    from vivace.runtime.calibration import calibrate_teacache

    torch.set_num_threads(threads if threads is not None else default_threads(prepared.found))
    workload = prepared.workload
    made = calibrate_teacache(
        prepared.found,
        choose_device(device),
        workload.prompts,
        num_pictures=pictures,
        degree=degree,
        call=workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
        tell=lambda drawn: click.echo(f"[{drawn}/{pictures}]", err=True),
    )
    fit = made.fit
    if as_json:
        click.echo(json.dumps(asdict(fit) | {"degree": fit.degree, "file": str(made.file)}, indent=2))
        return 0
    click.echo(f"model          {fit.model}")
    click.echo(f"seen           {fit.num_pairs} pairs of steps, {pictures} pictures of {fit.num_steps} steps")
    click.echo(f"input changes  {fit.low:.4g} to {fit.high:.4g}")
    click.echo(f"degree         {fit.degree}")
    click.echo(f"coefficients   {', '.join(f'{c:.6g}' for c in fit.coefficients)}")
    click.echo(f"residual       {fit.residual:.4g} (root mean square, of the output's relative change)")
    click.echo(f"explained      {100 * fit.explained:.1f} % of its variance")
    click.echo(f"kept in        {made.file}")
    return 0
