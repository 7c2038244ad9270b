"""vivace study"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from vivace.cli import options
from vivace.cli.bench import SOME_NOT_MEASURED
from vivace.errors import UsageError
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output, replace

if TYPE_CHECKING:
    from vivace.benchmark.run_settings import RunSettings
    from vivace.evidence.studies.expand import ModelPart
    from vivace.evidence.studies.runs import StudyRun
    from vivace.evidence.studies.study_file import StudyFile


@click.command()
@click.argument("name", metavar="[STUDY]", required=False)
@click.option("--tiny", is_flag=True, help="Embedded models in place of the study's: minutes on a CPU.")
@click.option(
    "--synthetic",
    is_flag=True,
    help="The study's models with random weights: full size, no download, no quality.",
)
@click.option(
    "--dry-run", is_flag=True, help="List the trials with estimates of time and memory; measure nothing."
)
@click.option(
    "--plan/--no-plan",
    "check_plan",
    default=True,
    show_default=True,
    help="For --dry-run: predict memory that no record knows, as `vivace plan` does; takes seconds a recipe.",
)
@click.option("--model", "models", multiple=True, metavar="NAME", help="Only this model; repeat for more.")
@click.option("--part", "parts", multiple=True, metavar="NAME", help="Only this part; repeat for more.")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Show what this record holds, e.g. results/study-001.json; measure nothing.",
)
@options.device
@options.store
@options.places
@options.price
@click.option("--rerun", is_flag=True, help="Measure again what the store already has.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write a page with all figures, charts and images.",
)
@options.results_format
def study(
    name: str | None,
    tiny: bool,
    synthetic: bool,
    dry_run: bool,
    check_plan: bool,
    models: Sequence[str],
    parts: Sequence[str],
    record: Path | None,
    device: str,
    store: Path,
    gpus: int | Literal["all"] | None,
    ray: str | None,
    price_per_hour: float | None,
    rerun: bool,
    output: Path | None,
    format_: str,
) -> int:
    """Run a whole study, and show its published numbers beside the new ones, GPU by GPU.

    STUDY is the number of a published study (000 to 004), or a .toml file of your own; without it the published ones
    are listed. Rounds are kept in the store: the same command resumes an interrupted study. Each conclusion
    of the study is judged by the published numbers and by the measured ones: agrees, does not, cannot tell.

    \b
        vivace study 001 --tiny -o page.html
        vivace study 004 --synthetic --part techniques
        vivace study 003 --dry-run
    """
    from vivace.benchmark.run_settings import RunSettings
    from vivace.evidence.studies.expand import expand
    from vivace.evidence.studies.study_file import read_study

    if name is None:
        return _list(format_)
    file = read_study(name)
    if record is not None:
        recorded = _recorded(file, record, tiny, models, parts)
        if output is not None:
            check_writable(output)
        return _end(recorded, price_per_hour, output, format_)
    planned = expand(file, tiny=tiny, synthetic=synthetic, models=models, parts=parts, device=device)
    if dry_run:
        return _dry_run(planned, store, check_plan and not tiny, format_, device)
    if output is not None:
        check_writable(output)
    run = _run(file, planned, RunSettings(store=store, rerun=rerun, gpus=gpus, ray=ray))
    return 130 if run is None else _end(run, price_per_hour, output, format_)


def _run(file: StudyFile, planned: tuple[ModelPart, ...], settings: RunSettings) -> StudyRun | None:
    """Run the study; None if it was interrupted."""
    from vivace.cli.progress_display import for_this_terminal
    from vivace.evidence.studies.expand import left_out
    from vivace.evidence.studies.runs import run_parts

    if missing := left_out(file, planned):
        click.echo(f"left out: {', '.join(missing)}", err=True)
    try:
        settings = dataclasses.replace(settings, progress=for_this_terminal(), command=options.command_line())
        return run_parts(file, planned, settings)
    except KeyboardInterrupt:
        click.echo("\ninterrupted; finished rounds are kept. To continue, run the same command:", err=True)
        click.echo(f"  {options.command_line()}", err=True)
        return None


def _recorded(
    file: StudyFile, record: Path, tiny: bool, models: Sequence[str], parts: Sequence[str]
) -> StudyRun:
    """Return the runs of a study in a record, which says whether its models had random weights."""
    from vivace.evidence.studies.expand import expand
    from vivace.evidence.studies.sittings import read_sittings, run_of

    sittings = read_sittings(record)
    synthetic = not tiny and any(sitting.model.is_synthetic for sitting in sittings)
    planned = expand(file, tiny=tiny, synthetic=synthetic, models=models, parts=parts)
    run = run_of(file, planned, sittings)
    if not run.records:
        has = ", ".join(dict.fromkeys(sitting.model.name for sitting in sittings)) or "nothing"
        raise UsageError(f"{record} has no row of study {file.name}; it has {has}")
    return run


def _end(run: StudyRun, price_per_hour: float | None, output: Path | None, format_: str) -> int:
    """Show a run, write its page, and return the exit code."""
    run = dataclasses.replace(run, price_per_hour=price_per_hour)
    from vivace.answers.page import page_of
    from vivace.cli.terminal import show
    from vivace.evidence.studies.study_answer import answer_of

    answer = answer_of(run, options.command_line())
    show(answer, format_)
    if output is not None:
        replace(output, page_of(answer).encode())
        click.echo(output, err=format_ != "table" or is_standard_output(output))
    return 0 if run.is_complete else SOME_NOT_MEASURED


def _list(format_: str) -> int:
    """Print the published studies."""
    from vivace.evidence.studies.study_file import published_studies, read_study

    studies = [read_study(name) for name in published_studies()]
    if format_ == "json":
        rows = [
            {
                "study": file.name,
                "title": file.title,
                "source": file.source,
                "models": list(dict.fromkeys(m for part in file.part for m in part.models)),
                "parts": [part.name for part in file.part],
            }
            for file in studies
        ]
        click.echo(json.dumps(rows, indent=2))
        return 0
    for file in studies:
        models = list(dict.fromkeys(m for part in file.part for m in part.models))
        gpus = list(dict.fromkeys(cell.gpu for cell in file.cells if cell.gpu))
        click.echo(f"{file.name}  {file.title}")
        click.echo(click.wrap_text(f"models: {', '.join(models)}", 80, "     ", "       "))
        click.echo(
            f"     parts: {', '.join(part.name for part in file.part)}; published on {', '.join(gpus)}"
        )
    click.echo(
        "\n`vivace study 001 --tiny` runs one on an embedded model; --dry-run lists its trials.", err=True
    )
    return 0


def _dry_run(planned: tuple[ModelPart, ...], store: Path, with_plan: bool, format_: str, device: str) -> int:
    """Print each trial with its known or estimated time and memory."""
    from vivace.cli.terminal import show
    from vivace.evidence.studies.dry_run import answer_of, estimates, planner
    from vivace.measure.surroundings import surroundings
    from vivace.models.catalogue import CATALOGUE
    from vivace.models.find import find_model

    for name in dict.fromkeys(model_part.measured_on for model_part in planned):
        if name not in CATALOGUE and "/" not in name:
            find_model(name)  # report a wrong name now, not after the predictions before it
    on_gpu = device != "cpu"
    predict = planner(lambda line: click.echo(line, err=True)) if with_plan and on_gpu else None
    estimated = estimates(planned, store, predict, on_gpu=on_gpu)
    show(answer_of(estimated, without_gpu=surroundings().has_no_gpu), format_)
    return 0
