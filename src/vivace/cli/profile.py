"""vivace profile"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vivace.cli import options
from vivace.errors import OutputError, UsageError
from vivace.untrusted.destinations import check_writable, is_taken

if TYPE_CHECKING:
    from vivace.spec.profiling import Profile

_PHASES = {
    "load": "loading the model",
    "apply": "applying the recipe",
    "first call": "first call, which compiles",
    "warm-up": "warm-up, call {call}",
    "profiled call": "profiled call {call}, and reading its events",
    "synchronisations": "one more call, for the lines of Python that wait",
    "evidence": "a short call, for the attention kernels",
}


@click.command()
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
@click.option("--batch", type=click.IntRange(1, 4096), default=1, show_default=True, help="Images per call.")
@click.option(
    "--text",
    type=click.Choice(["prompts", "repeated", "embeddings"]),
    default="prompts",
    show_default=True,
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
@click.option(
    "--warmup",
    type=click.IntRange(1, 1000),
    default=8,
    show_default=True,
    help="Most warm-up calls; fewer once the times are steady.",
)
@click.option(
    "--timeout",
    type=options.FiniteFloat(0.1, 1_000_000),
    default=600.0,
    show_default=True,
    help="Time limit of a recipe, in seconds.",
)
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
    help="Format on standard output; csv is the operator table, or with --against what changed.",
)
def profile(
    model: str,
    recipe: str,
    against: str | None,
    trace: Path | None,
    force: bool,
    prompts: list[str] | None,
    height: int | None,
    width: int | None,
    num_inference_steps: int | None,
    guidance_scale: float | None,
    sources: options.Sources,
    batch: int,
    text: str,
    calls: int,
    warmup: int,
    timeout: float,
    device: str,
    threads: int | None,
    top: int,
    format_: str,
) -> int:
    """Show where the time and memory of one whole call go, by torch.profiler.

    The call is profiled in its own process after a warm-up. A call in which something is compiled or tuned is
    discarded. Each kernel and each moment of a thread counts once, so self percentages add up to 100.

    The tables: operators; kernel families; components; what the GPU was idle for; the lines of Python that make the
    host wait for the GPU; memory over the call.

    \b
        vivace profile --model tiny-sd --recipe baseline
        vivace profile --model sdxl --recipe compile --against baseline --trace sdxl.json.gz
        vivace profile --model tiny-flux --task inpaint
    """
    from vivace.benchmark.profiles import profile as run_profile
    from vivace.benchmark.studies import start_launcher
    from vivace.cli.phases import Phases
    from vivace.spec.timing import Timing

    if force and trace is None:
        raise UsageError("--force overwrites a trace; add --trace FILE")
    files = _traces(trace, against is not None, force)
    fields: dict[str, Any] = {
        "prompts": prompts,
        "height": height,
        "width": width,
        "num_inference_steps": num_inference_steps,
        "guidance_scale": guidance_scale,
        "batch": batch,
        "text": text,
        "calls": calls,
        "device": device,
        "timing": Timing(max_warmup=warmup, timeout_s=timeout, threads=threads),
    } | sources
    recipes = [recipe] if against is None else [against, recipe]
    profiles: list[Profile] = []
    with start_launcher(device) as launcher:
        for recipe_ in recipes:
            click.echo(f"profiling {model}, {recipe_}", err=True)
            file = files.get("after" if recipe_ is recipes[-1] else "before")
            with Phases(_PHASES) as phases:
                done = run_profile(
                    model, recipe_, trace=file, launcher=launcher, on_event=phases.event, **fields
                )
            profiles.append(done.profile)
            click.echo(f"took: {phases.took()}", err=True)
            if file is not None:
                click.echo(f"wrote {file}; open it at https://ui.perfetto.dev", err=True)
    click.echo(_shown(profiles, format_, top), nl=False)
    return 0


def _shown(profiles: list[Profile], format_: str, top: int) -> str:
    from vivace.report import profile as report

    *before, after = profiles
    if format_ == "json":
        content: dict[str, Any] = {"profile": report.profile_json(after)}
        if before:
            content["against"] = report.profile_json(before[0])
            content["changes"] = [change.to_dict() for change in report.changes(before[0], after)]
        return json.dumps(content, indent=2) + "\n"
    if format_ == "csv":
        return report.changes_csv(report.changes(before[0], after)) if before else report.profile_csv(after)
    texts = [report.profile_text(profile_, format_, top) for profile_ in profiles]
    if before:
        texts.append(report.changes_text(before[0], after, format_, top))
    return "\n".join(texts)


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
        if is_taken(file) and not force:
            raise OutputError(
                f"{file} exists and was not changed; give another name, or --force to overwrite it"
            )
        check_writable(file)
    return files
