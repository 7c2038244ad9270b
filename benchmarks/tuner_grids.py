"""The exhaustive grids that `benchmarks.tuner` replays: every recipe of a small space, measured once with quality.

    python -m benchmarks.tuner_grids tiny-sd        measure what is missing (tiny-flux likewise), minutes on a CPU
    python -m benchmarks.tuner_grids tiny-sd --quality 24  39 images of the 24 fastest, for their verdicts
    python -m benchmarks.tuner_grids tiny-sd --quality 60 --seeds 12    156 images of the 60 fastest
    python -m benchmarks.tuner_grids tiny-sd --again 16 --afresh    time what passes anew
    python -m benchmarks.tuner_grids tiny-sd --again 6     six more rounds of what passed, interleaved, without quality
    python -m benchmarks.tuner_grids tiny-sd --again 24 --fastest 6     the same of the six fastest of these

Times are CPU seconds of the process, of one thread, since a shared machine's wall-clock times say who else was there.
The record holds, for each recipe, its times, its memory and what every image keeps; the baseline comes first. One round
of a recipe is up to a third off there, so which recipe is the best is decided by the rounds of `--again`: rounds of all
recipes follow each other, every second time in reverse order, and a replay shows half of them to the search.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks import technique_cases, technique_records
from benchmarks.command import run
from vivace.benchmark import Run, RunSettings, Study, Timing, run_study
from vivace.cli.display.progress_display import for_this_terminal
from vivace.errors import RecipeError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.models.prompts import PROMPT_SETS
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of

RESULTS = Path(__file__).parents[1] / "results"
STEPS = 12
NUM_PROMPTS = 10
_ANCHORS = 5
NUM_SEEDS = 3  # of a verdict by every prompt
AXES: dict[str, tuple[tuple[str, ...], ...]] = {
    "tiny-sd": (
        ("", "tiny_vae"),
        ("", "dtype(bf16)", "channels_last"),
        ("", "deepcache(2)", "deepcache(3)", "faster_cache(2)"),
        ("", "cfg_cutoff(0.6)", "cfg_cutoff(0.4)"),
        ("", "steps(8)"),
    ),
    "tiny-flux": (
        ("", "tiny_vae"),
        ("", "dtype(bf16)", "quantize(int8)"),
        ("", "first_block_cache(0.1)", "first_block_cache(0.3)", "seacache(0.3)", "taylorseer(2)"),
        ("", "steps(8)", "scheduler(dpmpp_2m)"),
        ("", "prune"),
    ),
}


def recipes(model: str) -> list[str]:
    """Return every combination of the axes, canonical, the baseline first; those that conflict are left out."""
    texts: dict[str, None] = {BASELINE: None}
    for chosen in itertools.product(*AXES[model]):
        text = "+".join(part for part in chosen if part)
        try:
            texts[resolve(text).text if text else BASELINE] = None
        except RecipeError:
            continue
    return list(texts)


def grid_file(model: str) -> Path:
    return RESULTS / f"tuner-grid-{model}.json"


def of_records(name: str) -> dict[str, Any]:
    """Return the committed rows of a GPU as a grid: seconds relative to each row's own baseline, times the first one's.

    Rows of eight steps and of full length are mixed, since each has a baseline beside it.
    """
    records = technique_records.read_records(technique_cases.record_file(name))
    baseline = technique_cases.baseline(name)
    by_recipe: dict[str, dict[str, Any]] = {}
    reference_s: float | None = None
    environment = records[0].environment
    for record, beside in technique_records.with_baselines(records, baseline):
        row = rows_of([record] if beside is None else [beside, record])[-1]
        try:
            resolve(row.recipe)
        except RecipeError:  # a technique or backend that vivace had
            continue
        if beside is None:
            if reference_s is None and row.latency is not None:
                reference_s = row.latency.median.point
                by_recipe[row.recipe] = _row(row)
            continue
        cells = _row(row)
        before = rows_of([beside])[0].latency
        if "s" in cells and before is not None and reference_s is not None:
            factor = reference_s / before.median.point
            cells["s"] = [[round(s * factor, 5) for s in samples] for samples in cells["s"]]
        if row.recipe not in by_recipe or "s" not in by_recipe[row.recipe]:
            by_recipe[row.recipe] = cells
    return {
        "model": f"synthetic:{name}",
        "device": environment.device,
        "device_name": environment.device_name,
        "cpu": environment.cpu,
        "judged": False,
        "time": "seconds per image, relative to the baseline beside it",
        "rows": list(by_recipe.values()),
    }


@click.command()
@click.argument("model", type=click.Choice([*AXES, "flux-dev"]))
@click.option("--store", type=click.Path(path_type=Path), default=".vivace", show_default=True)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), help="Default: below results/.")
@click.option(
    "--again", type=click.IntRange(1, 100), help="Time what passed the gate once more, in so many rounds."
)
@click.option(
    "--quality", type=click.IntRange(1), help="Judge so many again, the fastest that have not failed."
)
@click.option(
    "--seeds",
    type=click.IntRange(2),
    default=NUM_SEEDS,
    show_default=True,
    help="With --quality: images of each of the 13 prompts.",
)
@click.option("--everything", is_flag=True, help="With --again: whatever was measured, passed or not.")
@click.option("--afresh", is_flag=True, help="With --again: instead of earlier rounds; after new verdicts.")
@click.option("--fastest", type=click.IntRange(2), help="With --again: only so many, the fastest that pass.")
def tuner_grids(
    model: str,
    store: Path,
    record: Path | None,
    again: int | None,
    quality: int | None,
    seeds: int,
    everything: bool,
    afresh: bool,
    fastest: int | None,
) -> int:
    """Measure every recipe of a model's grid, with quality; resumable. flux-dev: of the committed H200 rows."""
    if model not in AXES:
        write_grid(record or grid_file(f"{model}-h200"), of_records(model))
        return 0
    if quality is not None:
        judge_again(record or grid_file(model), store, quality, seeds)
        return 0
    if again is not None:
        path = record or grid_file(model)
        if afresh:
            time_afresh(path, store, again)
        else:
            time_again(path, store, again, everything, fastest)
        return 0
    study = Study.of(
        model,
        recipes(model),
        prompts=PROMPT_SETS["tinyworld"][:NUM_PROMPTS],
        num_inference_steps=STEPS,
        device="cpu",
        timing=Timing(rounds=1, repeats=4, max_warmup=1, threads=1),
        rivals=False,
    )
    study_run = run_study(study, RunSettings(store=store, progress=for_this_terminal()))
    write_grid(record or grid_file(model), compact(study_run))
    return 0


def time_again(path: Path, store: Path, rounds: int, everything: bool, fastest: int | None = None) -> None:
    """Add interleaved rounds to the rows of a grid, as `again`: the samples of each round, in seconds.

    Where some rows have them already, only the others are measured, beside the fastest of those that have: these say
    how much faster or slower the machine was then. Where all rows have them, all get more, or only the fastest: which
    of these is the best is what a replay is judged by, and a few rounds do not tell.
    """
    grid = json.loads(path.read_text(encoding="utf-8"))
    baseline, *others = grid["rows"]
    chosen_rows = [
        row for row in others if "s" in row and (everything or row.get("gate", "passed") == "passed")
    ]
    anchors = sorted((row for row in chosen_rows if "again" in row), key=lambda row: np.median(row["again"]))
    missing = [row for row in chosen_rows if "again" not in row]
    chosen = [baseline, *anchors[:_ANCHORS], *missing] if missing else [baseline, *anchors[:fastest]]
    measured = _measured(grid["model"], chosen, store, rounds)
    timed_twice = [row for row in chosen if "again" in row]
    factor = _ratio([(row["again"], measured[row["recipe"]]) for row in timed_twice])
    if not missing:
        for row in chosen:  # if all have more rounds, it does not matter how fast the machine was
            scaled = measured[row["recipe"]] * (factor if fastest else 1.0)
            row["again"] += scaled.round(5).tolist()
        write_grid(path, grid)
        return
    for row in chosen:
        if "again" not in row and row["recipe"] in measured:
            row["again"] = (measured[row["recipe"]] * factor).round(5).tolist()
    write_grid(path, grid)


def time_afresh(path: Path, store: Path, rounds: int) -> None:
    """Replace the rounds of what passes, which came to pass at different times, by as many of each, interleaved.

    The rounds of the others stay, scaled by how much faster or slower the machine is now.
    """
    grid = json.loads(path.read_text(encoding="utf-8"))
    baseline, *others = grid["rows"]
    chosen = [baseline, *(row for row in others if row.get("gate") == "passed")]
    measured = _measured(grid["model"], chosen, store, rounds)
    factor = _ratio([(measured[row["recipe"]], row["again"]) for row in chosen if "again" in row])
    for row in others:
        if "again" in row:
            row["again"] = (np.array(row["again"]) * factor).round(5).tolist()
    for row in chosen:
        row["again"] = measured[row["recipe"]].tolist()
    write_grid(path, grid)


def _measured(model: str, rows: Sequence[dict[str, Any]], store: Path, rounds: int) -> dict[str, np.ndarray]:
    """Time rows of a grid; return the samples of each, (rounds, calls), in seconds."""
    study = Study.of(
        model,
        [row["recipe"] for row in rows],
        prompts=PROMPT_SETS["tinyworld"][:1],
        num_inference_steps=STEPS,
        device="cpu",
        timing=Timing(rounds=rounds, repeats=4, max_warmup=1, threads=1),
        quality=False,
        rivals=False,
    )
    measured = run_study(study, RunSettings(store=store, progress=for_this_terminal())).rows()
    return {row.recipe: np.array(_row(row)["s"]) for row in measured if row.latency is not None}


def _ratio(pairs: Sequence[tuple[Any, Any]]) -> float:
    """Return the median ratio of medians; 1 without any."""
    if not pairs:
        return 1.0
    return float(np.exp(np.median([np.log(np.median(a) / np.median(b)) for a, b in pairs])))


def judge_again(path: Path, store: Path, number: int, num_seeds: int = NUM_SEEDS) -> None:
    """Replace the verdicts of the fastest recipes of a grid by those of every prompt with so many seeds.

    What has failed by fewer images has been shown to; what is unclear is mostly so because these are few.
    """
    grid = json.loads(path.read_text(encoding="utf-8"))
    baseline, *others = grid["rows"]
    images = len(PROMPT_SETS["tinyworld"]) * num_seeds
    doubtful = [
        row for row in others if "s" in row and (row["gate"] != "failed" or row.get("images", 0) >= images)
    ]
    timed = sorted(doubtful, key=lambda row: np.median(row.get("again", row["s"])))
    study = Study.of(
        grid["model"],
        [row["recipe"] for row in (baseline, *timed[:number])],
        prompts=PROMPT_SETS["tinyworld"],
        num_seeds=num_seeds,
        num_inference_steps=STEPS,
        device="cpu",
        timing=Timing(rounds=1, repeats=1, max_warmup=1, threads=1),
        rivals=False,
    )
    rows = {row["recipe"]: row for row in others}
    for row in run_study(study, RunSettings(store=store, progress=for_this_terminal())).rows():
        if row.recipe in rows and row.latency is not None:
            judged_row = _row(row)
            cells = {name: judged_row[name] for name in ("gate", "clip", "match") if name in judged_row}
            rows[row.recipe].update(cells, images=images)
    write_grid(path, grid)


def compact(measured: Run) -> dict[str, Any]:
    """Return a run as the record of a grid."""
    rows = measured.rows()
    environment = rows[0].record.environment
    return {
        "model": rows[0].model,
        "device": environment.device,
        "device_name": environment.device_name,
        "cpu": environment.cpu,
        "workload": {"steps": STEPS, "prompts": NUM_PROMPTS},
        "time": "CPU seconds of one thread per image",
        "rows": [_row(row) for row in rows],
    }


def write_grid(path: Path, grid: dict[str, Any]) -> None:
    """Write a grid with one line for each recipe."""
    head = {name: value for name, value in grid.items() if name != "rows"}
    lines = ",\n".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in grid["rows"])
    path.write_text(
        json.dumps(head, ensure_ascii=False)[:-1] + ', "rows": [\n' + lines + "\n]}\n", encoding="utf-8"
    )


def _row(row: Row) -> dict[str, Any]:
    rounds = row.record.rounds
    batch = row.record.trial.workload.batch
    quality = None if row.judgement is None else row.judgement
    fields: dict[str, Any] = {"recipe": row.recipe, "outcome": row.record.outcome.value}
    if row.record.reason:
        fields["reason"] = row.record.reason[:160]
    if row.latency is None:
        return fields
    times = "cpu_s" if row.record.environment.device == "cpu" else "total_s"
    fields["s"] = [[round(getattr(s, times) / batch, 5) for s in r.samples] for r in rounds]
    assert row.memory is not None
    fields["peak"] = row.memory.peak_bytes
    fields["first_call_s"] = None if row.first_call_s is None else round(row.first_call_s, 3)
    if quality is not None and not row.is_baseline:
        fields["gate"] = quality.gate.value
    fidelity = row.fidelity
    for name in ("clip", "match"):
        kept = None if fidelity is None else getattr(fidelity, name)
        if kept is not None and kept.bounds.low is not None:
            fields[name] = [
                round(value, 4) for value in (kept.bounds.low, kept.bounds.point, kept.bounds.high)
            ]
    return fields


if __name__ == "__main__":
    raise SystemExit(run(tuner_grids))
