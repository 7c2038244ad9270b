"""vivace export"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from vivace import __version__
from vivace.cli.command import RecipeName, command
from vivace.errors import OutputError
from vivace.foundation.spec.settings import (
    CallSettings,
    DeviceName,
    ModelName,
    Option,
    Prompts,
    Seed,
    SourceSettings,
    Threads,
)
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.untrusted.destinations import (
    check_writable,
    is_standard_output,
    replace,
    would_overwrite,
    write_new,
)

if TYPE_CHECKING:
    from vivace.runtime.workloads import CheckedRequest

_LIBRARIES = ("torch", "diffusers", "transformers", "torchao")
_NEEDS_PEFT = "# Needs peft."  # how scripts say it


class ExportCommand(SourceSettings, CallSettings):
    model: ModelName = "tiny-sd"
    recipe: Annotated[RecipeName, Option("Recipe to export.", metavar="R")] = "baseline"
    output: Annotated[
        Path | None, Option("Script to write; default: print it.", "-o --output", metavar="FILE")
    ] = None
    force: Annotated[bool, Option("Overwrite FILE if it exists.")] = False
    prompts: Annotated[
        Prompts,
        Option("Prompt of the script; default: the model's own first prompt.", "--prompt", multiple=False),
    ] = None
    seed: Annotated[Seed, Option("Seed of the script.")] = 0
    device: DeviceName = "auto"
    threads: Threads = None


@command(ExportCommand)
def export(settings: ExportCommand) -> int:
    """Write a model and its recipe as a plain diffusers script.

    The script calls only diffusers, torch and torchao, and generates the same image as `vivace generate`. Where a
    technique has no equivalent in these libraries, the script imports vivace and says so. The recipe is applied to the
    model on this machine first, so a recipe that cannot run here is refused.

    \b
        vivace export --model tiny-sd --recipe "bf16+tiny_vae+steps(20)" -o draw.py
    """
    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.workloads import checked_request

    if settings.output is not None:
        if not settings.force:
            _check_is_new(settings.output)
        check_writable(settings.output)
    workload = settings.part(WorkloadRequest)
    prepared = checked_request(settings.model, settings.recipe, workload=workload)
    located = prepared.located

    from vivace.measure.machine import choose_device
    from vivace.runtime.export import check_loadable

    check_loadable(located)
    chosen = choose_device(settings.device)
    click.echo(f"loading {located.model.name}", err=True)
    return guarded(
        located,
        lambda is_read: _write(
            prepared, workload, chosen, settings.threads, settings.output, settings.force, is_read
        ),
    )


def _write(
    prepared: CheckedRequest,
    request: WorkloadRequest,
    chosen: str,
    threads: int | None,
    output: Path | None,
    force: bool,
    is_read: Callable[[], None],
) -> int:
    from vivace.measure.machine import check_works
    from vivace.runtime.export import source_files, write_script
    from vivace.runtime.workloads import default_threads

    check_works(chosen)

    located, workload = prepared.located, prepared.workload
    written = write_script(
        located,
        prepared.recipe,
        chosen,
        prompt=workload.prompts[0],
        seed=workload.seeds[0],
        call=workload.call,
        workload=workload,
        sources=source_files(located, workload, request),
        threads=(threads or default_threads(located)) if chosen == "cpu" else threads,
        about=[f"Written by vivace {__version__} for {chosen}, {_versions()}."],
    )
    is_read()
    for warning in written.warnings:
        click.echo(f"note: {warning}", err=True)
    if written.own:
        techniques = ", ".join(written.own)
        click.echo(f"note: the script imports vivace, because no other library has {techniques}", err=True)
    if _NEEDS_PEFT in written.text and importlib.util.find_spec("peft") is None:
        click.echo("note: the script loads a LoRA, which needs the PEFT library; pip install peft", err=True)
    if output is None:
        click.echo(written.text, nl=False)
        return 0
    content = written.text.encode()
    if force:
        replace(output, content)
    elif not write_new(output, content):
        _check_is_new(output)
    click.echo(f"wrote {output}; `python {output}` writes picture.png", err=is_standard_output(output))
    return 0


def _check_is_new(path: Path) -> None:
    if would_overwrite(path):
        raise OutputError(f"{path} exists and was not changed; give another name, or --force to overwrite it")


def _versions() -> str:
    from importlib.metadata import version

    return ", ".join(f"{library} {version(library)}" for library in _LIBRARIES)
