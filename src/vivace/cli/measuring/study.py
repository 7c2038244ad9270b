"""vivace study"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click

from vivace.cli.command import Rerun, ResultsFormat, command, command_line, interrupted
from vivace.cli.measuring.bench import SOME_NOT_MEASURED
from vivace.cli.watched.failures import INTERRUPTED
from vivace.errors import UsageError
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    FILE,
    DeviceName,
    NumGpus,
    Option,
    Positional,
    PricePerHour,
    Ray,
    Settings,
    Store,
    Texts,
)
from vivace.foundation.untrusted.destinations import check_writable, is_standard_output, replace

if TYPE_CHECKING:
    from vivace.benchmark.run_settings import RunSettings
    from vivace.evidence.studies.expand import ModelPart
    from vivace.evidence.studies.runs import StudyRun
    from vivace.evidence.studies.study_file import StudyFile


class StudyCommand(Settings):
    name: Annotated[str | None, Positional("[STUDY]")] = None
    tiny: Annotated[bool, Option("Embedded models in place of the study's: minutes on a CPU.")] = False
    synthetic: Annotated[
        bool, Option("The study's models with random weights: full size, no download, no quality.")
    ] = False
    dry_run: Annotated[
        bool, Option("List the trials with estimates of time and memory; measure nothing.")
    ] = False
    check_plan: Annotated[
        bool,
        Option(
            "For --dry-run: predict memory that no record knows, as `vivace plan` does; takes seconds a recipe.",
            "--plan",
        ),
    ] = True
    models: Annotated[Texts, Option("Only this model; repeat for more.", "--model", metavar="NAME")] = ()
    parts: Annotated[Texts, Option("Only this part; repeat for more.", "--part", metavar="NAME")] = ()
    record: Annotated[
        Path | None,
        Option("Show what this record holds, e.g. results/study-001.json; measure nothing.", path=FILE),
    ] = None
    device: DeviceName = "auto"
    store: Store = Path(DEFAULT_STORE)
    gpus: NumGpus = None
    ray: Ray = None
    price_per_hour: PricePerHour = None
    rerun: Rerun = False
    output: Annotated[
        Path | None,
        Option("Also write a page with all figures, charts and images.", "-o --output", path=FILE),
    ] = None
    format_: ResultsFormat = "table"


@command(StudyCommand)
def study(settings: StudyCommand) -> int:
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

    if settings.name is None:
        return _list(settings.format_)
    file = read_study(settings.name)
    if settings.record is not None:
        recorded = _recorded(file, settings.record, settings.tiny, settings.models, settings.parts)
        if settings.output is not None:
            check_writable(settings.output)
        return _end(recorded, settings.price_per_hour, settings.output, settings.format_)
    planned = expand(
        file,
        tiny=settings.tiny,
        synthetic=settings.synthetic,
        models=settings.models,
        parts=settings.parts,
        device=settings.device,
    )
    if settings.dry_run:
        return _dry_run(
            planned,
            settings.store,
            settings.check_plan and not settings.tiny,
            settings.format_,
            settings.device,
        )
    if settings.output is not None:
        check_writable(settings.output)
    run = _run(file, planned, settings.part(RunSettings))
    return (
        INTERRUPTED if run is None else _end(run, settings.price_per_hour, settings.output, settings.format_)
    )


def _run(file: StudyFile, planned: tuple[ModelPart, ...], settings: RunSettings) -> StudyRun | None:
    from vivace.cli.display.progress_display import for_this_terminal
    from vivace.evidence.studies.expand import left_out
    from vivace.evidence.studies.runs import run_parts

    if missing := left_out(file, planned):
        click.echo(f"left out: {', '.join(missing)}", err=True)
    try:
        settings = dataclasses.replace(settings, progress=for_this_terminal(), command=command_line())
        return run_parts(file, planned, settings)
    except KeyboardInterrupt:
        interrupted("finished rounds are kept")
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
    run = dataclasses.replace(run, price_per_hour=price_per_hour)
    from vivace.answers.page import page_of
    from vivace.cli.display.terminal import show
    from vivace.evidence.studies.study_answer import answer_of

    answer = answer_of(run, command_line())
    show(answer, format_)
    if output is not None:
        replace(output, page_of(answer).encode())
        click.echo(output, err=format_ != "table" or is_standard_output(output))
    return 0 if run.is_complete else SOME_NOT_MEASURED


def _list(format_: str) -> int:
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
    from vivace.architectures import CATALOGUE
    from vivace.cli.display.terminal import show
    from vivace.evidence.studies.dry_run import answer_of, estimates, planner
    from vivace.measure.surroundings import surroundings
    from vivace.models.find import find_model

    for name in dict.fromkeys(model_part.measured_on for model_part in planned):
        if name not in CATALOGUE and "/" not in name:
            find_model(name)  # report a wrong name now, not after the predictions before it
    on_gpu = device != "cpu"
    predict = planner(lambda line: click.echo(line, err=True)) if with_plan and on_gpu else None
    estimated = estimates(planned, store, predict, on_gpu=on_gpu)
    show(answer_of(estimated, without_gpu=surroundings().has_no_gpu), format_)
    return 0
