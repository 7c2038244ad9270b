"""The trials of the published studies by model, what their records have of them, and what is missing.

`benchmarks.studies` measures it, and docgen/study_pages.py shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from benchmarks import every_model, technique_cases, technique_records
from benchmarks.sittings import of_records
from vivace.benchmark import Timing
from vivace.evidence.studies.dry_run import estimates
from vivace.evidence.studies.expand import ModelPart, expand
from vivace.evidence.studies.sittings import Sitting, SittingRow, read_sittings, rounds_of
from vivace.evidence.studies.study_file import StudyFile, read_study
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.study import QualityRequest
from vivace.foundation.spec.trial import Trial

RESULTS = Path(__file__).parents[1] / "results"
BORROWED = (every_model.RECORD.name, technique_cases.record_file("flux-dev").name)
"""Records of other scripts that have trials of the studies: FLUX's ten configurations, the models' own baselines."""
PROCESS_S = 10.0
"""What a trial takes beside its calls: a process, random weights, the traced call."""
UNKNOWN_S = 60.0
TINY_S = 2.0
"""A trial of which no record says anything, and one of an embedded model."""
ATTEMPTS = 2
"""A trial that crashed or timed out so often is not tried again."""


@dataclass(frozen=True)
class Group:
    """The parts of a study that are of one model with one workload: one sitting measures all of them.

    Attributes:
        known_s: estimated seconds of a trial by recipe.
    """

    file: StudyFile
    parts: tuple[ModelPart, ...]
    known_s: Mapping[str, float]

    @property
    def name(self) -> str:
        return f"{self.file.name} {self.parts[0].measured_on}"

    def missing(self, sittings: Sequence[Sitting], rounds: int = 1) -> list[str]:
        """Return the recipes that lack rounds, the cheapest first, those that failed before last."""
        recipes = {recipe for recipe, done in self._outcomes(sittings) if _lacks(done, rounds)}
        failed = self.failed(sittings)
        return sorted(recipes, key=lambda recipe: (recipe in failed, self.known_s[recipe]))

    def failed(self, sittings: Sequence[Sitting]) -> set[str]:
        """Return the recipes that were tried and never measured."""
        return {recipe for recipe, done in self._outcomes(sittings) if done and Outcome.MEASURED not in done}

    def _outcomes(self, sittings: Sequence[Sitting]) -> Iterator[tuple[str, list[Outcome]]]:
        """Yield each recipe that can be measured, with the outcomes of its rounds."""
        for part in self.parts:
            have = rounds_of(part, sittings)
            for case in part.cases:
                if case.refused is None:
                    yield case.recipe, [round_.outcome for _, _, round_ in have.get(case.recipe, [])]

    def baselines(self, recipes: Sequence[str]) -> list[str]:
        """Return the baselines that a sitting of these recipes begins with."""
        needed = [p for p in self.parts if any(case.recipe in recipes for case in p.cases)]
        return list(dict.fromkeys(part.cases[0].recipe for part in needed))


def _lacks(outcomes: Sequence[Outcome], rounds: int) -> bool:
    """Whether a recipe with these rounds is to be measured (again)."""
    measured = outcomes.count(Outcome.MEASURED)
    if measured or not outcomes:
        return measured < rounds
    return len(outcomes) < ATTEMPTS and not any(outcome.is_final for outcome in outcomes)


def groups_of(
    name: str,
    timing: Timing,
    *,
    tiny: bool = False,
    parts: Sequence[str] = (),
    device: str = "auto",
) -> list[Group]:
    """Return the groups of a study with what a trial is estimated to take."""
    file = read_study(name)
    by_workload: dict[tuple[str, str], list[ModelPart]] = {}
    for part in expand(file, tiny=tiny, synthetic=not tiny, parts=parts, device=device):
        # Times do not depend on quality, which needs images.
        study = part.study.model_copy(
            update={"timing": timing, "quality": QualityRequest(enabled=False), "rivals": False}
        )
        by_workload.setdefault((part.measured_on, study.workload.digest()), []).append(
            replace(part, study=study)
        )
    groups = []
    for group in by_workload.values():
        seconds_by_recipe = {each.recipe: each.trial_s for each in estimates(group, None)}
        known_s = {
            r: (TINY_S if tiny else UNKNOWN_S) if s is None else PROCESS_S + s
            for r, s in seconds_by_recipe.items()
        }
        groups.append(Group(file, tuple(group), known_s))
    return groups


def record_file(name: str, folder: Path = RESULTS) -> Path:
    """Return the path of a study's record."""
    return folder / f"study-{name}.json"


def own(name: str, folder: Path = RESULTS) -> list[Sitting]:
    """Return what this script has measured of a study."""
    path = record_file(name, folder)
    return read_sittings(path) if path.exists() else []


@cache
def borrowed() -> tuple[Sitting, ...]:
    """Return the sittings of other scripts' records; their rounds fill gaps."""
    return tuple(
        sitting
        for name in BORROWED
        for sitting in of_records(technique_records.read_records(RESULTS / name), ("baseline",), name)
    )


def all_sittings(name: str, folder: Path = RESULTS) -> list[Sitting]:
    """Return what is known of a study: its own sittings, then those of other records."""
    return [*own(name, folder), *borrowed()]


def record_of(sitting: Sitting, row: SittingRow) -> Record:
    """Return a row of a sitting as a record of one round."""
    trial = Trial(
        model=sitting.model, recipe=row.recipe, workload=sitting.workload, device=sitting.device, repetition=0
    )
    return Record(trial=trial, environment=sitting.environment, rounds=(plain(row.round),))


def plain(round_: Round) -> Round:
    """Return a round as the record has it: a sitting has one of each recipe."""
    return round_.model_copy(update={"index": 0, "pictures": ()})
