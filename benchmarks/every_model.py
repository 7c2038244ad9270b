"""Measure every catalogue model with random weights at its native size, steps and guidance.

    python -m benchmarks.every_model --limit-s 500      measure what is missing in the record, until the time limit
    python -m benchmarks.every_model --plan             write what `vivace plan` predicts; needs no GPU

Each model is one `vivace.bench` of all recipes. Its records are added to a JSON list once it is done, and the same
command resumes with the next model. docs/models-measured.md is generated from that file (`make docs`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import MEASURED_IN_PART, locked, run
from benchmarks.record_files import read_list, write_records, write_text
from vivace.answers.formatting import plus_minus, ratio, seconds, size
from vivace.benchmark import Timing, studies
from vivace.benchmark.rounds import work as planned
from vivace.benchmark.rounds.runner import ask_environment
from vivace.cli.display.progress_display import for_this_terminal
from vivace.errors import StoreError, UnknownModel, nearest
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.spec.workload import TextMode
from vivace.models.find import SYNTHETIC, synthetic_names
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of

RECORD = Path(__file__).parents[1] / "results" / "every-model.json"
RECIPES = ("baseline", "compile")
FIRST = ("sd15", "sdxl", "flux-schnell", "flux-dev", "sdxl-turbo", "sdxl-lightning-4step", "lcm-sdxl")
"""The most used models, cheap ones first; the others follow in the catalogue's order."""

Key = tuple[str, str]  # model, recipe


@click.command("every_model")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no model after this many seconds.")
@click.option("--only", multiple=True, metavar="NAME", help="This model; repeat for more. Default: all.")
@click.option(
    "--recipe", "recipes", multiple=True, default=RECIPES, show_default=True, help="The baseline first."
)
@click.option("--steps", type=click.IntRange(1, 1000), help="Default: the model's own number.")
@click.option("--text", type=click.Choice(["prompts", "embeddings"]), default="prompts", show_default=True)
@click.option("--rounds", type=click.IntRange(1, 100), default=1, show_default=True)
@click.option(
    "--repeats", type=click.IntRange(1, 1000), default=5, show_default=True, help="Calls per round."
)
@click.option("--warmup", type=click.IntRange(1, 100), default=3, show_default=True, help="Warm-up calls.")
@click.option(
    "--timeout", type=click.FloatRange(min=1), default=600.0, show_default=True, help="Seconds per round."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--plan", "only_plan", is_flag=True, help="Measure nothing; predict the memory of the recorded cases."
)
def every_model(
    record: Path,
    store: Path,
    limit_s: float | None,
    only: Sequence[str],
    recipes: Sequence[str],
    steps: int | None,
    text: TextMode,
    rounds: int,
    repeats: int,
    warmup: int,
    timeout: float,
    device: str,
    only_plan: bool,
) -> int:
    """Measure every catalogue model with random weights, one line per case; resumable."""
    names = _chosen(only)
    requested = list(dict.fromkeys(resolve(recipe).text for recipe in recipes))
    records = read_records(record)
    if only_plan:
        return _predict(records, record)
    timing = Timing(rounds=rounds, repeats=repeats, max_warmup=warmup, timeout_s=timeout)
    started = time.monotonic()
    on: str | None = None
    left = []
    with studies.start_launcher(device) as launcher:
        for name in names:
            model = SYNTHETIC + name
            missing = [recipe for recipe in requested if not _is_done(records, (model, recipe))]
            if not missing:
                click.echo(f"{model}: in the record already")
                continue
            if limit_s is not None and time.monotonic() - started >= limit_s:
                left.append(name)
                continue
            if on is None:
                on = ask_environment(launcher, device, None).device_name
                _check_device(records, on, record)  # before minutes of a GPU are spent
            measured = vivace.bench(
                model,
                missing,
                num_inference_steps=steps,
                text=text,
                timing=timing,
                device=device,
                store=store,
                quality=False,
                rivals=False,
                progress=for_this_terminal(),
                launcher=launcher,
            )
            with locked(record):
                records = _with(read_records(record), measured.records, record)
                write_records(record, records.values())
            for row in rows_of([records[key] for recipe in requested if (key := (model, recipe)) in records]):
                click.echo(line(row))
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    requested_records = [
        records[key] for name in names for r in requested if (key := (SYNTHETIC + name, r)) in records
    ]
    return 0 if all(record.outcome is Outcome.MEASURED for record in requested_records) else MEASURED_IN_PART


def line(row: Row) -> str:
    """Describe a case in one line."""
    case = f"{row.model} {row.recipe}"
    if row.latency is None:
        return f"{case}: {row.outcome.value}: {row.reason}"
    parts = [f"{plus_minus(row.latency.median)} an image"]
    if row.speedup is not None:
        parts.append(ratio(row.speedup))
    if row.memory is not None:
        parts.append(f"peak {size(row.memory.peak_bytes)}")
    if row.load_s is not None and row.first_call_s is not None:
        parts.append(f"built in {seconds(row.load_s)}, first call {seconds(row.first_call_s)}")
    return f"{case}: {', '.join(parts)}"


def read_records(path: Path) -> dict[Key, Record]:
    """Read the cases of a record in order; empty if there is no such file.

    Raises:
        StoreError: the file is not a list of Records.
    """
    return {(record.trial.model.name, record.trial.recipe.text): record for record in read_list(path, Record)}


def plan_file(path: Path) -> Path:
    """Return the path of the predictions for a record."""
    return path.with_name(f"{path.stem}-plan.json")


def _chosen(only: Sequence[str]) -> list[str]:
    names = synthetic_names()
    ordered = [name for name in FIRST if name in names]
    ordered += [name for name in names if name not in ordered]
    for name in only:
        if name not in names:
            raise UnknownModel(
                f"--only {name[:80]}: no such architecture{nearest(name, names)} (there are {', '.join(names)})"
            )
    return [name for name in ordered if name in only or not only]


def _is_done(records: dict[Key, Record], key: Key) -> bool:
    """Whether the case was measured or failed for good; crashes and timeouts are tried again."""
    return key in records and records[key].outcome.is_final


def _check_device(records: dict[Key, Record], name: str, path: Path) -> None:
    """Refuse to add rows of one device to those of another: rows are compared with each other."""
    for old in records.values():
        if old.environment.device_name != name:
            raise StoreError(
                f"{path} was made on {old.environment.device_name}, and this is {name}; give --record another file"
            )


def _with(records: dict[Key, Record], measured: Sequence[Record], path: Path) -> dict[Key, Record]:
    """Add new cases to a record."""
    for new in measured:
        _check_device(records, new.environment.device_name, path)
    return records | {(new.trial.model.name, new.trial.recipe.text): new for new in measured}


def _predict(records: dict[Key, Record], path: Path) -> int:
    with studies.start_launcher("cpu") as launcher:
        predictions = planned.plan_again(list(records.values()), launcher)
    rows: list[dict[str, Any]] = []
    for prediction in predictions:
        trial = prediction.record.trial
        click.echo(f"{trial.model.name}: {prediction}")
        rows.append(
            {
                "model": trial.model.name,
                "recipe": trial.recipe.text,
                "model_bytes": prediction.model_bytes,
                "peak_bytes": prediction.peak_bytes,
                "peak_stage": prediction.peak_stage,
                "reason": prediction.reason,
            }
        )
    if not rows:
        click.echo(f"{path} holds nothing that was measured on a GPU", err=True)
        return 0
    write_text(plan_file(path), json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(run(every_model))
