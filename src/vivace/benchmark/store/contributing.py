"""Stores for others, and in one: comparisons as a contribution, without anything personal; several stores as one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from vivace.benchmark.store import Store
from vivace.errors import RecipeError, StoreError, UsageError
from vivace.foundation.spec.contribution import (
    SIGN_OFF,
    Bounds,
    Closeness,
    Contributed,
    ContributedRow,
    Contribution,
    prompt_names,
    why_personal,
)
from vivace.foundation.spec.record import GpuWindow, Record, Round, Sample
from vivace.foundation.stats import Interval
from vivace.foundation.untrusted.destinations import replace
from vivace.machinery.technique import COMPONENTS
from vivace.recipes.recipe import Recipe
from vivace.report.rows import Row

_DIGITS = 7
"""Decimals of seconds: a ten-millionth."""


def contribution_of(stores: Sequence[Path]) -> tuple[Contribution, list[str]]:
    """Return the comparisons of stores as a contribution, and what is left out, with the reasons."""
    made: list[Contributed] = []
    left_out: list[str] = []
    for folder in stores:
        with Store.read_only(folder) as store:
            for compared in store.comparisons():
                if (contributed := _contributed(compared.rows(), left_out)) is not None:
                    made.append(contributed)
    if not made:
        why = f": {'; '.join(left_out)}" if left_out else ""
        raise StoreError(
            f"{' and '.join(map(str, stores))}: no measured comparison to contribute{why}; `vivace bench` measures one"
        )
    return Contribution(sign_off=SIGN_OFF, comparisons=tuple(made)), list(dict.fromkeys(left_out))


def _contributed(rows: Sequence[Row], left_out: list[str]) -> Contributed | None:
    kept = []
    for row in rows:
        if (reason := why_personal(row.record)) is not None:
            left_out.append(f"{row.record.trial.recipe.text}: {reason}")
        else:
            kept.append(row)
    if not kept or kept[0] is not rows[0] or kept[0].latency is None:
        return None
    return Contributed(rows=tuple(_row(row) for row in kept))


def _row(row: Row) -> ContributedRow:
    return ContributedRow(
        record=anonymous(row.record), weights=_weights(row.record), closeness=_closeness(row)
    )


def anonymous(record: Record) -> Record:
    """Return a record without prompts, images, techniques' messages, environment variables and the machine's place."""
    trial = record.trial
    workload = trial.workload.model_copy(update={"prompts": prompt_names(len(trial.workload.prompts))})
    return Record(
        trial=trial.model_copy(update={"workload": workload}),
        environment=record.environment.model_copy(update={"variables": {}, "place": None}),
        rounds=tuple(_round(round_) for round_ in record.rounds),
    )


def _round(round_: Round) -> Round:
    gpu: GpuWindow | None = None if round_.gpu is None else round_.gpu.model_copy(update={"reason": None})
    numbers = {name: value for name, value in round_.conditions.items() if not isinstance(value, str)}
    return round_.model_copy(
        update={
            "reason": None,
            "effects": {},
            "evidence": {},
            "pictures": (),
            "warnings": (),
            "conditions": numbers,
            "gpu": gpu,
            "samples": tuple(_sample(sample) for sample in round_.samples),
        }
    )


def _sample(sample: Sample) -> Sample:
    stages = {name: round(seconds, _DIGITS) for name, seconds in sample.stages_s.items()}
    times = {"total_s": round(sample.total_s, _DIGITS), "cpu_s": round(sample.cpu_s, _DIGITS)}
    return sample.model_copy(update={**times, "stages_s": stages})


def _weights(record: Record) -> dict[str, str]:
    try:
        recipe = Recipe.from_spec(record.trial.recipe)
    except RecipeError:  # of another version
        return {}
    weights: dict[str, str] = {}
    for technique in recipe:
        if technique.facts.arithmetic.weights != "as before":
            weights |= dict.fromkeys(technique.targets or COMPONENTS, technique.facts.arithmetic.weights)
    return weights


def _closeness(row: Row) -> Closeness | None:
    if row.judgement is None or row.record.trial.model.is_synthetic:
        return None
    fidelity = row.fidelity
    if fidelity is None:
        return Closeness(gate=row.judgement.gate.value, num_prompts=0)
    return Closeness(
        gate=row.judgement.gate.value,
        num_prompts=fidelity.num_prompts,
        ssim=_three(fidelity.ssim),
        psnr_db=_three(fidelity.psnr_db),
        clip=None if fidelity.clip is None else _three(fidelity.clip.bounds),
        match=None if fidelity.match is None else _three(fidelity.match.bounds),
    )


def _three(interval: Interval | None) -> Bounds | None:
    return None if interval is None else (interval.point, interval.low, interval.high)


def merge_stores(folders: Sequence[Path], output: Path) -> dict[str, int]:
    """Write all that is in stores into a new one; return how many runs, rounds, figures and images it has. StoreError
    if anything that went in did not come out."""
    if output.exists() and any(output.iterdir()):
        raise UsageError(f"{output} is not empty and was not changed; give -o the name of a new folder")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise UsageError("a store is given twice; give each once")
    went_in: dict[str, set[tuple[str, ...]]] = {}
    with Store.create(output) as merged:
        for folder in folders:
            with Store.read_only(folder) as store:
                merged.add_all(store)
                contents = store.contents()
            for name, identities in contents.items():
                went_in[name] = went_in.get(name, set()) | identities
            for (file,) in contents["images"]:
                if not (output / file).exists():
                    replace(output / file, (folder / file).read_bytes())
        came_out = {name: len(identities) for name, identities in merged.contents().items()}
    expected = {name: len(identities) for name, identities in went_in.items()}
    if came_out != expected:
        raise StoreError(f"{output} has {came_out}, and {expected} went in; delete it, and check the disk")
    return came_out
