"""The committed measurements of a study, and the run that its sittings form together.

A sitting is an uninterrupted measurement of one model: one round of the baseline and of each recipe beside it, in one
environment. A study may take many, on different days. A row is compared with the baseline of its own sittings; rows of
different sittings by way of their baselines.

The file is JSON: a list of sittings, one row a line. It holds no images, so it says nothing about quality.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from vivace.benchmark.run import Compared
from vivace.errors import StoreError
from vivace.evidence.studies.expand import ModelPart
from vivace.evidence.studies.runs import MeasuredPart, StudyRun
from vivace.evidence.studies.study_file import StudyFile
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.ceilings import Ceilings
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.input_errors import in_words
from vivace.foundation.spec.recipe_syntax import RecipeSpec, unpinned
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.trial import Model, Trial
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.files import read_json, reading
from vivace.models.find import LocatedModel, find_model
from vivace.runtime.workloads import workload_of

MAX_BYTES = 32_000_000


class SittingRow(Spec):
    recipe: RecipeSpec
    round: Round


class Sitting(Spec):
    """Rounds of one model that were measured one after the other.

    Attributes:
        source: the record that they are taken from; "" for the study's own.
        ceilings: of the device; None if unknown, or if each round has them.
    """

    environment: Environment
    model: Model
    workload: Workload
    device: str
    rows: tuple[SittingRow, ...]
    source: str = ""
    ceilings: Ceilings | None = None

    def row(self, recipe: str) -> SittingRow | None:
        return next((row for row in self.rows if unpinned(row.recipe.text) == unpinned(recipe)), None)

    def is_of(self, model: Model, workload: Workload) -> bool:
        """Whether it measured a model and workload.

        Prompts do not matter to random weights: texts are padded to one length, and the images mean nothing.
        """
        mine, theirs = self.workload, workload
        if model.is_synthetic:
            same = {"prompts": theirs.prompts, "seeds": theirs.seeds}
            mine = mine.model_copy(update=same)
        return self.model == model and mine == theirs


def read_sittings(path: Path) -> list[Sitting]:
    """Read a record."""
    advice = "give a file that `python -m benchmarks.studies` wrote"
    with reading(path, StoreError, advice):
        rows = read_json(path, MAX_BYTES)
    try:
        if not isinstance(rows, list):
            raise StoreError(f"{path} is not a study's record: it is not a list of sittings; {advice}")
        return [Sitting.model_validate(row) for row in rows]
    except ValidationError as error:
        raise StoreError(f"{path} is not a study's record: {in_words(error)}; {advice}") from None


def run_of(file: StudyFile, planned: Sequence[ModelPart], sittings: Sequence[Sitting]) -> StudyRun:
    """Return the run that sittings form together: rows that no sitting has are not measured."""
    apart = by_device(sittings)
    return StudyRun(
        file,
        None,
        tuple(
            MeasuredPart(
                model_part,
                tuple(compared for mine in apart.values() for compared in _compared(model_part, mine)),
            )
            for model_part in planned
        ),
    )


def by_device(sittings: Sequence[Sitting]) -> dict[str, list[Sitting]]:
    grouped: dict[str, list[Sitting]] = {}
    for sitting in sittings:
        grouped.setdefault(sitting.environment.device_name, []).append(sitting)
    return grouped


def rounds_of(
    model_part: ModelPart, sittings: Sequence[Sitting]
) -> dict[str, list[tuple[int, Sitting, Round]]]:
    """Return the rounds of each recipe of a part that were measured beside its baseline, by recipe without pins.

    The first item is the number of the sitting. A recipe's own sittings count alone where it has any: those of other
    records only fill gaps.
    """
    located, workload = conditions_of(model_part)
    baseline = model_part.cases[0].recipe
    here = [(n, s) for n, s in enumerate(sittings) if s.is_of(located.model, workload) and s.row(baseline)]
    rounds: dict[str, list[tuple[int, Sitting, Round]]] = {}
    for case in model_part.cases:
        mine = [] if case.refused else [(n, s, row.round) for n, s in here if (row := s.row(case.recipe))]
        if mine:
            rounds[unpinned(case.recipe)] = [entry for entry in mine if not entry[1].source] or mine
    return rounds


def conditions_of(model_part: ModelPart) -> tuple[LocatedModel, Workload]:
    located = find_model(model_part.measured_on)
    return located, workload_of(located, model_part.study.workload, model_part.study.workload.batches[0])


def _compared(model_part: ModelPart, sittings: Sequence[Sitting]) -> tuple[Compared, ...]:
    """Return one comparison for each set of sittings in which recipes were measured, the baseline's own first.

    Rows of the same sittings stand beside the baseline's rounds of exactly these, so that a host that was slower on
    another day does not count.
    """
    baseline = unpinned(model_part.cases[0].recipe)
    groups: dict[tuple[int, ...], list[str]] = {}
    kept: dict[str, dict[int, Round]] = {}
    for recipe, rounds in rounds_of(model_part, sittings).items():
        kept[recipe] = dict(_kept(rounds))
        groups.setdefault(tuple(kept[recipe]), []).append(recipe)
    compared = []
    for numbers in sorted(groups, key=lambda numbers: baseline not in groups[numbers]):
        recipes = [baseline, *(recipe for recipe in groups[numbers] if recipe != baseline)]
        beside = {n: row.round for n in numbers if (row := sittings[n].row(baseline)) is not None}
        records = [
            _record(sittings, recipe, beside if recipe == baseline else kept[recipe]) for recipe in recipes
        ]
        compared.append(Compared(tuple(records), QualityPass()))
    return tuple(compared)


def _kept(rounds: Sequence[tuple[int, Sitting, Round]]) -> Iterator[tuple[int, Round]]:
    """Yield the valid rounds of a recipe: the measured ones of the latest libraries, or its last failure."""
    measured = [entry for entry in rounds if entry[2].outcome is Outcome.MEASURED]
    if not measured:
        measured = [max(rounds, key=lambda entry: entry[2].started_at)]
    latest = alike(max(measured, key=lambda entry: entry[2].started_at)[1].environment)
    for number, sitting, round_ in measured:
        if alike(sitting.environment) == latest:
            yield number, round_


def alike(environment: Environment) -> tuple[str, str, Mapping[str, str]]:
    """Return the conditions that two sittings must share for one row to have rounds of both."""
    return environment.device_name, environment.vivace, environment.libraries


def _record(sittings: Sequence[Sitting], recipe: str, rounds: Mapping[int, Round]) -> Record:
    sitting = sittings[max(rounds)]
    row = sitting.row(recipe)
    assert row is not None
    trial = Trial(
        model=sitting.model, recipe=row.recipe, workload=sitting.workload, device=sitting.device, repetition=0
    )
    numbered = [
        round_.model_copy(update={"index": n, "ceilings": round_.ceilings or sittings[n].ceilings})
        for n, round_ in sorted(rounds.items())
    ]
    return Record(trial=trial, environment=sitting.environment, rounds=tuple(numbered))
