"""vivace profile"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import click
from pydantic import Field

from vivace.cli.command import RecipeName, command
from vivace.errors import OutputError, UsageError
from vivace.foundation.spec.settings import (
    FILE,
    Batch,
    CallSettings,
    DeviceName,
    ModelName,
    Option,
    Prompts,
    SourceSettings,
    TaskName,
    Threads,
    Timeout,
    read_prompts,
)
from vivace.foundation.spec.study import TextForm, WorkloadRequest
from vivace.foundation.spec.timing import MaxWarmup, Timing
from vivace.foundation.untrusted.destinations import check_writable, would_overwrite

if TYPE_CHECKING:
    from vivace.foundation.spec.profiling import Profile

_PHASES = {
    "load": "loading the model",
    "apply": "applying the recipe",
    "first call": "first call, which compiles",
    "warm-up": "warm-up, call {call}",
    "profiled call": "profiled call {call}, and reading its events",
    "synchronisations": "one more call, for the lines of Python that wait",
    "evidence": "a short call, for the attention kernels",
}


class ProfileCommand(SourceSettings, CallSettings):
    model: ModelName = "tiny-sd"
    recipe: Annotated[RecipeName, Option("Recipe to profile.", metavar="R")] = "baseline"
    against: Annotated[
        str | None, Option("Also profile this recipe, and show both side by side.", metavar="R")
    ] = None
    trace: Annotated[
        Path | None,
        Option(
            "Write the trace, for Perfetto or chrome://tracing; compressed if the name ends in .gz. With --against, "
            "that recipe's trace gets `-against` in its name.",
            metavar="FILE",
            path=FILE,
        ),
    ] = None
    force: Annotated[bool, Option("Overwrite an existing trace.")] = False
    prompts: Annotated[
        Prompts,
        Option(
            "A prompt; the first is used.",
            "--prompt",
            metavar="TEXT",
            multiple=True,
            from_file=("--prompts", "Text file, one prompt per line; the first is used.", read_prompts),
        ),
    ] = None
    task: TaskName = None
    batch: Batch = 1
    text: Annotated[
        TextForm,
        Option(
            "prompts: new ones in each call; repeated: the same in all, for prompt_cache; embeddings: encode the "
            "prompts before the profiled call."
        ),
    ] = "prompts"
    calls: Annotated[
        int,
        Field(ge=1, le=100),
        Option("Calls to profile; the figures are those of the call of median length."),
    ] = 3
    max_warmup: Annotated[
        MaxWarmup,
        Option("Maximum number of warm-up calls; they stop once the times are steady.", "--warmup"),
    ] = 8
    timeout_s: Annotated[Timeout, Option("Time limit of a recipe, in seconds.", "--timeout")] = 600.0
    device: DeviceName = "auto"
    threads: Threads = None
    top: Annotated[int, Field(ge=1, le=100_000), Option("Rows of long tables (table, md).")] = 20
    format_: Annotated[
        Literal["table", "md", "json", "csv"],
        Option(
            "Format on standard output; csv is the operator table, or with --against the changes.", "--format"
        ),
    ] = "table"


@command(ProfileCommand)
def profile(settings: ProfileCommand) -> int:
    """Show where the time and memory of one whole call go, by torch.profiler.

    The call is profiled in its own process after a warm-up. A call in which something is compiled or tuned is
    discarded. Each kernel and each moment of a thread counts once, so self percentages add up to 100.

    The tables: operators; kernel families; components; why the GPU was idle; the lines of Python that make the
    host wait for the GPU; memory over the call.

    \b
        vivace profile --model tiny-sd --recipe baseline
        vivace profile --model sdxl --recipe compile --against baseline --trace sdxl.json.gz
        vivace profile --model tiny-flux --task inpaint
    """
    from vivace.benchmark.profiles import profile as run_profile
    from vivace.benchmark.studies import start_launcher
    from vivace.cli.display.terminal import Phases

    if settings.force and settings.trace is None:
        raise UsageError("--force overwrites a trace; add --trace FILE")
    files = _traces(settings.trace, settings.against is not None, settings.force)
    recipes = [settings.recipe] if settings.against is None else [settings.against, settings.recipe]
    prompts = settings.prompts[:1] if settings.prompts else None
    workload = settings.part(WorkloadRequest, prompts=prompts, batches=(settings.batch,))
    profiles: list[Profile] = []
    with start_launcher(settings.device) as launcher:
        for recipe_ in recipes:
            click.echo(f"profiling {settings.model}, {recipe_}", err=True)
            file = files.get("after" if recipe_ is recipes[-1] else "before")
            with Phases(_PHASES) as phases:
                done = run_profile(
                    settings.model,
                    recipe_,
                    calls=settings.calls,
                    trace=file,
                    launcher=launcher,
                    on_event=phases.event,
                    workload=workload,
                    timing=settings.part(Timing),
                    device=settings.device,
                )
            profiles.append(done.profile)
            click.echo(f"took: {phases.took()}", err=True)
            if file is not None:
                click.echo(f"wrote {file}; open it at https://ui.perfetto.dev", err=True)
    from vivace.cli.display.terminal import show
    from vivace.report.profile_answer import answer_of

    *before, after = profiles
    show(answer_of(after, before[0] if before else None, settings.top), settings.format_)
    return 0


def _traces(trace: Path | None, is_pair: bool, force: bool) -> dict[str, Path]:
    """Return the files of the traces, having checked that they can be written."""
    if trace is None:
        return {}
    files = {"after": trace}
    if is_pair:
        stem, dot, suffixes = trace.name.partition(".")
        files["before"] = trace.with_name(f"{stem}-against{dot}{suffixes}")
    for file in files.values():
        if would_overwrite(file) and not force:
            raise OutputError(
                f"{file} exists and was not changed; give another name, or --force to overwrite it"
            )
        check_writable(file)
    return files
