"""vivace export"""

from __future__ import annotations

import os
from pathlib import Path

import click

from vivace import __version__
from vivace.cli import options
from vivace.cli.output import replace, write_new
from vivace.errors import OutputError

_LIBRARIES = ("torch", "diffusers", "transformers", "torchao")


@click.command()
@options.model
@click.option("--recipe", default="baseline", show_default=True, metavar="R", help="The recipe to write.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The script to write; default: print it.",
)
@click.option("--force", is_flag=True, help="Replace a FILE that is there.")
@click.option("--prompt", help="What the script draws; default: the model's own first prompt.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Its seed.")
@options.workload
@options.device
@options.threads
def export(
    model: str,
    recipe: str,
    output: Path | None,
    force: bool,
    prompt: str | None,
    seed: int,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    device: str,
    threads: int | None,
) -> int:
    """Write a model with a recipe as a plain Python script.

    The script calls diffusers, torch and torchao alone, and draws the picture that `vivace generate` draws. A technique
    that is vivace's own has no such calls: the script then imports vivace, and says so. The recipe is applied to the
    model first, on this machine, so that what cannot work here is refused.

    \b
        vivace export --model tiny-sd --recipe "bf16+tiny_vae+steps(20)" -o draw.py
    """
    from vivace.benchmark.comparison import comparison_of, default_threads

    if output is not None and not force:
        _check_free(output)
    prepared = comparison_of(
        model,
        recipe,
        prompts=None if prompt is None else [prompt],
        seed=seed,
        height=height,
        width=width,
        num_inference_steps=num_inference_steps,
        guidance_scale=guidance_scale,
    )
    found, workload = prepared.found, prepared.workload

    from vivace.export.loading import check_loadable
    from vivace.export.script import write_script
    from vivace.measure.machine import choose_device

    check_loadable(found)
    chosen = choose_device(device)
    click.echo(f"loading {found.model.name}", err=True)
    written = write_script(
        found,
        prepared.recipes[0],
        chosen,
        prompt=workload.prompts[0],
        seed=seed,
        call=workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"}),
        threads=(threads or default_threads(found)) if chosen == "cpu" else threads,
        about=[f"Written by vivace {__version__} for {chosen}, {_versions()}."],
    )
    for warning in written.warnings:
        click.echo(f"note: {warning}", err=True)
    if written.own:
        click.echo(f"note: the script needs vivace: no public calls do {', '.join(written.own)}", err=True)
    if output is None:
        click.echo(written.text, nl=False)
        return 0
    content = written.text.encode()
    if force:
        replace(output, content)
    elif not write_new(output, content):
        _check_free(output)
    click.echo(f"wrote {output}; it draws picture.png: python {output}")
    return 0


def _check_free(path: Path) -> None:
    if os.path.lexists(path):
        raise OutputError(
            f"{path} is there already, and was not changed; give a new name, or --force to replace it"
        )


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{library} {version(library)}" for library in _LIBRARIES)
