"""vivace profile"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vivace.cli import options
from vivace.cli.spec_options import TIMING, WORKLOAD, collect, option
from vivace.errors import OutputError, UsageError
from vivace.foundation.untrusted.destinations import check_writable, would_overwrite

if TYPE_CHECKING:
    from vivace.foundation.spec.profiling import Profile
    from vivace.foundation.spec.study import WorkloadRequest
    from vivace.foundation.spec.timing import Timing

_PHASES = {
    "load": "loading the model",
    "apply": "applying the recipe",
    "first call": "first call, which compiles",
    "warm-up": "warm-up, call {call}",
    "profiled call": "profiled call {call}, and reading its events",
    "synchronisations": "one more call, for the lines of Python that wait",
    "evidence": "a short call, for the attention kernels",
}


@options.command()
@options.model
@click.option("--recipe", default="baseline", show_default=True, metavar="R", help="Recipe to profile.")
@click.option("--against", metavar="R", help="Also profile this recipe, and show both side by side.")
@click.option(
    "--trace",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the trace, for Perfetto or chrome://tracing; compressed if the name ends in .gz. With --against, that "
    "recipe's trace gets `-against` in its name.",
)
@click.option("--force", is_flag=True, help="Overwrite an existing trace.")
@options.prompts(first=True)
@options.workload
@options.source_images()
@options.batch
@option(
    WORKLOAD,
    "text",
    help="prompts: new ones in each call; repeated: the same in all, for prompt_cache; embeddings: encode the "
    "prompts before the profiled call.",
)
@click.option(
    "--calls",
    type=click.IntRange(1, 100),
    default=3,
    show_default=True,
    help="Calls to profile; the figures are those of the call of median length.",
)
@option(
    TIMING,
    "max_warmup",
    "--warmup",
    help="Maximum number of warm-up calls; they stop once the times are steady.",
)
@option(TIMING, "timeout_s", "--timeout", help="Time limit of a recipe, in seconds.")
@options.device
@options.threads
@click.option(
    "--top",
    type=click.IntRange(1, 100_000),
    default=20,
    show_default=True,
    help="Rows of long tables (table, md).",
)
@click.option(
    "--format",
    "format_",
    type=click.Choice(["table", "md", "json", "csv"]),
    default="table",
    show_default=True,
    help="Format on standard output; csv is the operator table, or with --against the changes.",
)
@collect(workload=WORKLOAD, timing=TIMING)
def profile(
    model: str,
    recipe: str,
    against: str | None,
    trace: Path | None,
    force: bool,
    workload: WorkloadRequest,
    timing: Timing,
    calls: int,
    device: str,
    top: int,
    format_: str,
) -> int:
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
    from vivace.cli.phases import Phases

    if force and trace is None:
        raise UsageError("--force overwrites a trace; add --trace FILE")
    files = _traces(trace, against is not None, force)
    recipes = [recipe] if against is None else [against, recipe]
    profiles: list[Profile] = []
    with start_launcher(device) as launcher:
        for recipe_ in recipes:
            click.echo(f"profiling {model}, {recipe_}", err=True)
            file = files.get("after" if recipe_ is recipes[-1] else "before")
            with Phases(_PHASES) as phases:
                done = run_profile(
                    model,
                    recipe_,
                    calls=calls,
                    trace=file,
                    launcher=launcher,
                    on_event=phases.event,
                    workload=workload,
                    timing=timing,
                    device=device,
                )
            profiles.append(done.profile)
            click.echo(f"took: {phases.took()}", err=True)
            if file is not None:
                click.echo(f"wrote {file}; open it at https://ui.perfetto.dev", err=True)
    from vivace.cli.terminal import show
    from vivace.report.profile_answer import answer_of

    *before, after = profiles
    show(answer_of(after, before[0] if before else None, top), format_)
    return 0


def _traces(trace: Path | None, is_pair: bool, force: bool) -> dict[str, Path]:
    """Return the files of the traces, having checked that they can be written.

    Raises:
        OutputError: one exists and is not to be overwritten, or cannot be written.
    """
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
