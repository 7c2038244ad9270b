"""vivace warm"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from vivace.cli.command import command
from vivace.errors import OutputError
from vivace.foundation.spec.settings import FILE, Batch, CallSettings, DeviceName, Option, Positional, Threads
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.untrusted.destinations import (
    check_writable,
    is_standard_output,
    replace,
    would_overwrite,
)

if TYPE_CHECKING:
    from vivace.runtime.workloads import CheckedRequest


class WarmCommand(CallSettings):
    model: Annotated[str | None, Positional()] = None
    recipe: Annotated[str | None, Option("Recipe to compile; default: compile.", metavar="R")] = None
    output: Annotated[
        Path | None,
        Option(
            "Also write the compiled code to FILE, for machines like this one.",
            "-o --output",
            metavar="FILE",
            path=FILE,
        ),
    ] = None
    force: Annotated[bool, Option("Overwrite FILE if it exists.")] = False
    source: Annotated[
        Path | None,
        Option(
            "Compile nothing: load the code in FILE. It contains programs, so load only files that you made.",
            "--from",
            metavar="FILE",
        ),
    ] = None
    batch: Batch = 1
    device: DeviceName = "auto"
    threads: Threads = None


@command(WarmCommand)
def warm(settings: WarmCommand) -> int:
    """Compile MODEL's recipe ahead of time, so that the first image does not wait for it.

    The code is kept in the cache folder (`vivace doctor` names it), where every later process finds it. With -o it is
    also written to a file, which another machine with the same GPU and libraries reads with --from: for a container
    image, or for a fleet.

    A recipe with its own sizes, such as compile(sizes=[...]), is compiled for each of them in place of --height and
    --width.

    \b
        vivace warm flux-dev --recipe bf16+compile -o flux.code
        vivace warm flux-dev --recipe "bf16+compile(sizes=[1024x1024, 1344x768])"
        vivace warm --from flux.code
    """
    if settings.source is not None:
        if settings.model is not None or settings.recipe is not None or settings.output is not None:
            raise click.UsageError("--from takes the code as it is; leave out MODEL, --recipe and -o.")
        from vivace.runtime.warming import bring

        number = bring(settings.source, settings.device)
        click.echo(f"{number} new files in the cache" if number else "the cache had all of it")
        return 0
    if settings.output is not None:
        if would_overwrite(settings.output) and not settings.force:
            raise OutputError(f"{settings.output} exists; give another name, or --force")
        check_writable(settings.output)
    from vivace.cli.watched.guarded import guarded
    from vivace.runtime.workloads import checked_request, default_threads

    workload = settings.part(WorkloadRequest, batches=(settings.batch,))
    prepared = checked_request(settings.model or "tiny-sd", settings.recipe or "compile", workload=workload)
    if prepared.recipe.announced_sizes and (workload.height is not None or workload.width is not None):
        raise click.UsageError("the recipe has its own sizes; leave out --height and --width.")
    chosen = settings.threads if settings.threads is not None else default_threads(prepared.located)
    return guarded(
        prepared.located,
        lambda is_read: _compile(prepared, settings.device, chosen, settings.output, is_read),
    )


def _compile(
    prepared: CheckedRequest, device: str, threads: int, output: Path | None, is_read: Callable[[], None]
) -> int:
    import torch

    from vivace.answers.formatting import seconds, size
    from vivace.models.load import explained
    from vivace.runtime.warming import warm as compile_ahead

    torch.set_num_threads(threads)
    located, recipe = prepared.located, prepared.recipe
    click.echo(f"loading {located.model.name}", err=True)

    def loaded() -> None:
        is_read()
        click.echo(f"compiling {recipe.text}; this can take minutes", err=True)

    with explained(located):
        done = compile_ahead(
            located, recipe, prepared.workload, device, packed=output is not None, on_loaded=loaded
        )
    if not done.graphs and output is None:
        click.echo("note: this recipe compiles nothing with torch.compile", err=True)
    for warmed in done.sizes:
        which = f"{warmed.size}: " if len(done.sizes) > 1 else ""
        number = warmed.graphs + warmed.graphs_later
        click.echo(
            f"{which}first call {seconds(warmed.first_call_s)}, second {seconds(warmed.second_call_s)}; "
            f"{number} graph{'s' * (number != 1)}, {warmed.from_cache} from the cache"
        )
    if output is not None and done.artifact is not None:
        replace(output, done.artifact)
        digest = hashlib.sha256(done.artifact).hexdigest()
        click.echo(f"{output}: {size(len(done.artifact))}, SHA-256 {digest}", err=is_standard_output(output))
    return 0
