"""Measure one image over several GPUs against one GPU, on full-size models with random weights.

    python -m benchmarks.several_gpus --limit-s 400               on 2 GPUs, until the time is over
    python -m benchmarks.several_gpus --gpus 4 --only flux-dev    FLUX.1 [dev] on 4
    python -m benchmarks.several_gpus --profile                   where the time of a step goes on the first GPU
    python -m benchmarks.several_gpus --only-recipe "parallel(ulysses, gpus=2)+compile"    this one alone

Each recipe is measured in separate processes, at the model's native size and number of steps. A record is added as soon
as it is there, and the same command goes on with what is missing; docs/several-gpus.md is made of the records
(`make docs`). FLUX is compiled by its repeated blocks, which takes a fraction of the time of compiling it whole, and
whole, each with and without CUDA graphs. Every number of GPUs is compared with one GPU and the same other techniques,
measured by the same invocation: the next one may run on another machine, so it measures one GPU anew. SDXL starts with
its captured step: that takes seconds, and compiling it cold 100 to 140 s on each GPU. Its eager step says little: on
one GPU it waits for the CPU, however much there is to compute.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import click

from benchmarks.command import MEASURED_IN_PART, Measuring, locked, measures, run
from benchmarks.every_model import line
from benchmarks.every_technique import measure
from benchmarks.record_files import write_records
from benchmarks.step_profile import Profile, profiled
from benchmarks.technique_cases import full_length
from benchmarks.technique_records import check_device, read_records
from vivace.benchmark import studies
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome, Record
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

RECORD = Path(__file__).parents[1] / "results" / "several-gpus.json"

Key = tuple[str, str]  # model, recipe
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A recipe on several GPUs, and the same on one.

    target: the speed-up over one GPU that is wished for, None where none is said.
    removed: an option of `parallel` that it was measured with, and that no longer exists.
    """

    name: str
    alone: str
    mode: str
    gpus: int
    target: float | None
    removed: str = ""

    @property
    def recipe(self) -> str:
        own = f"parallel({self.mode}, gpus={self.gpus})"
        text = resolve(own if self.alone == "baseline" else f"{own}+{self.alone}").text
        return text.replace(")", f", {self.removed})", 1) if self.removed else text


FLUX = (
    ("ulysses", "compile(blocks=repeated)+cuda_graph"),
    ("all_gather", "compile(blocks=repeated)+cuda_graph"),
    ("ulysses", "compile(blocks=repeated)"),
    ("all_gather", "compile(blocks=repeated)"),
    ("ulysses", "compile+cuda_graph"),
    ("all_gather", "compile+cuda_graph"),
    ("ulysses", "compile"),
    ("all_gather", "compile"),
)
"""Modes, and the other techniques of the recipe. What matters most comes first."""
FUSED = (
    *(
        f"fused({how})+channels_last@vae+compile@vae+cuda_graph+gpu_postprocess"
        for how in ("fp8, attention=fp8", "bf16")
    ),
    "fused(fp8, attention=fp8, convolutions=fp8)@denoiser,vae+cuda_graph@denoiser,vae+gpu_postprocess",
)
"""Recipes of FLUX's fused blocks, whose keys and values are exchanged. In fp8, 1.7x is 1.2 s on two H200s."""
CACHED = ("ulysses", "teacache(hits=0.5)+compile(blocks=repeated)+cuda_graph")
"""A step cache as well, for which no speed-up is wished: its hits are one GPU's work alone."""
COPIES = "messages=copies"
"""An option that has been removed: FLUX's collectives by copy engines. Two recipes were measured with it."""
_RENAMED = (("parallel(guidance", "parallel(cfg"), ("parallel(ring", "parallel(all_gather"))
"""Modes in records of this benchmark that have other names now. It never measured what `ring` means now."""
UNET: tuple[tuple[str, float | None], ...] = (
    ("cuda_graph", 1.6),
    ("compile+cuda_graph", 1.6),
    ("channels_last+compile@denoiser,vae+cuda_graph", 1.6),
    ("compile", 1.6),
    ("baseline", None),
)
"""What else SDXL's recipes say, and the target. What costs least to find out comes first."""
TARGETS = {2: 1.7, 4: 2.9}


def cases(gpus: int) -> list[Case]:
    """Return what is measured, what matters most first. Guidance has two branches, however many GPUs there are."""
    listed = [Case("flux-dev", alone, mode, gpus, TARGETS.get(gpus)) for mode, alone in FLUX]
    listed += [Case("flux-dev", alone, "all_gather", gpus, TARGETS.get(gpus)) for alone in FUSED]
    mode, alone = CACHED
    listed.append(Case("flux-dev", alone, mode, gpus, None))
    return listed + [Case("sdxl", alone, "cfg", 2, target) for alone, target in UNET]


def removed_cases(gpus: int) -> list[Case]:
    """Return what was measured with an option that has been removed."""
    return [Case("flux-dev", alone, mode, gpus, TARGETS.get(gpus), COPIES) for mode, alone in FLUX[:2]]


def renamed(recipe: str) -> str:
    """Return a recipe of a record with the names that modes have now."""
    for old, new in _RENAMED:
        recipe = recipe.replace(old, new)
    return recipe


@click.command("several_gpus")
@click.option("--gpus", type=click.IntRange(2, 8), default=2, show_default=True, help="For FLUX.")
@click.option("--only", type=click.Choice(["flux-dev", "sdxl"]), help="This model. Default: both.")
@click.option(
    "--only-recipe",
    multiple=True,
    help="This recipe, shared or of one GPU, and what else is given so. Default: all, one GPU before several.",
)
@measures(record=f"results/{RECORD.name}", repeats=3, warmup=1)
@click.option("--steps", type=click.IntRange(1, 1000), help="Instead of the model's own number.")
@click.option("--profile", is_flag=True, help="Measure nothing; write where the time of a step goes.")
def several_gpus(
    gpus: int,
    only: str | None,
    only_recipe: tuple[str, ...],
    how: Measuring,
    steps: int | None,
    profile: bool,
) -> int:
    """One image over several GPUs against one GPU, one line a recipe; resumable."""
    chosen = [case for case in cases(gpus) if only in (None, case.name)]
    record = how.record or RECORD
    recipes = _chosen(chosen, only_recipe)
    if profile:
        return _profile(chosen, recipes, record, how)
    status = 0
    with studies.start_launcher(how.device) as launcher:
        for name, recipe in _left(chosen, recipes, read_records(record)):
            if how.is_over:
                return how.ended(f"{name} {recipe}")
            before = time.monotonic()
            new = measure(name, recipe, steps or full_length(name), how, launcher)
            if new.outcome is not Outcome.MEASURED:
                status = MEASURED_IN_PART
            if new.outcome is not Outcome.UNSUPPORTED:  # on a machine with more GPUs it would be measured
                with locked(record):
                    write_records(record, _with(read_records(record), new, record))
            _say(f"{line(rows_of([new])[0])} ({time.monotonic() - before:.0f} s)")
    return status


def _chosen(among: Sequence[Case], texts: Sequence[str]) -> set[str]:
    """The recipes to measure, in full.

    Raises:
        click.UsageError: there is no such recipe.
    """
    choices = {text for case in among for text in (resolve(case.alone).text, case.recipe)}
    requested = {resolve(text).text for text in texts}
    if missing := requested - choices:
        raise click.UsageError(
            f"--only-recipe: {', '.join(sorted(missing))} is none of {', '.join(sorted(choices))} (with these --gpus "
            "and --only)"
        )
    return requested or choices


def _say(text: str) -> None:
    """At once, also where the output is a pipe."""
    click.echo(text)
    sys.stdout.flush()


def _left(chosen: Sequence[Case], recipes: set[str], records: Sequence[Record]) -> list[tuple[str, str]]:
    """Models and recipes to measure. One GPU is measured again where something is left to be compared with it."""
    done = {_key(record) for record in records if record.outcome.is_final}
    shared = [case for case in chosen if case.recipe in recipes and _several(case) not in done]
    compared = {_one(case) for case in shared}
    missing = []
    for case in chosen:
        alone = _one(case)
        if alone[1] in recipes and (alone in compared or alone not in done):
            missing.append(alone)
        if case in shared:
            missing.append(_several(case))
    return [(source.removeprefix(SYNTHETIC), recipe) for source, recipe in dict.fromkeys(missing)]


def _key(record: Record) -> Key:
    return record.trial.model.name, renamed(record.trial.recipe.text)


def _one(case: Case) -> Key:
    return SYNTHETIC + case.name, resolve(case.alone).text


def _several(case: Case) -> Key:
    return SYNTHETIC + case.name, case.recipe


def pair(case: Case, records: Iterable[Record]) -> tuple[Record | None, Record | None]:
    """The case's record, and that of one GPU which was measured before it; None for what there is not.

    Args:
        records: in the order in which they were measured.

    Returns:
        Of one GPU, where nothing was measured on several the latest; of several.
    """
    alone: Record | None = None
    for record in records:
        if _key(record) == _one(case):
            alone = record
        elif _key(record) == _several(case):
            return alone, record
    return alone, None


def _with(records: list[Record], new: Record, path: Path) -> list[Record]:
    check_device(records, new, path)
    return _added(records, new, _key)


def _added(records: Sequence[T], new: T, key_of: Callable[[T], Key]) -> list[T]:
    """The known ones and a new one, without what it supersedes: of one GPU what nothing is compared with any more."""
    kept = [*(old for old in records if not _is_of_several(key_of(new)) or key_of(old) != key_of(new)), new]
    keys = [key_of(record) for record in kept]
    return [record for k, record in enumerate(kept) if _is_of_several(keys[k]) or _is_compared(k, keys)]


def _is_of_several(key: Key) -> bool:
    return rest_of(key[1]) != key[1]


def _is_compared(place: int, keys: Sequence[Key]) -> bool:
    """Whether one of one GPU is the latest, or one of several GPUs has come before the next of its kind."""
    for model, recipe in keys[place + 1 :]:
        if (model, recipe) == keys[place]:
            return False
        if (model, rest_of(recipe)) == keys[place]:
            return True
    return True


def rest_of(recipe: str) -> str:
    """A canonical recipe without `parallel`."""
    return "+".join(part for part in recipe.split("+") if not part.startswith("parallel")) or BASELINE


def profile_file(record: Path) -> Path:
    """Where the profiles that go with a record lie."""
    return record.with_name(f"{record.stem}-profile.json")


def read_profiles(record: Path) -> list[Profile]:
    path = profile_file(record)
    return [Profile(**item) for item in json.loads(path.read_text(encoding="utf-8"))] if path.exists() else []


def _profile(chosen: Sequence[Case], recipes: set[str], record: Path, how: Measuring) -> int:
    profiled_cases = [
        (case.name, recipe, gpus)
        for case in chosen
        if case.alone != "baseline"
        for recipe, gpus in ((resolve(case.alone).text, 1), (case.recipe, case.gpus))
        if recipe in recipes
    ]
    for name, recipe, gpus in dict.fromkeys(profiled_cases):
        if how.is_over:
            return how.ended(f"{name} {recipe}")
        new = profiled(name, recipe, gpus, how.device)
        path = profile_file(record)
        with locked(path):
            profiles = _added(
                read_profiles(record), new, lambda profile: (profile.model, renamed(profile.recipe))
            )
            path.write_text(
                json.dumps([asdict(profile) for profile in profiles], indent=1) + "\n", encoding="utf-8"
            )
        _say(
            f"{name} {recipe}: {new.step:.1f} ms a step: compute {new.compute:.1f}, communication "
            f"{new.communication:.1f}, waiting {new.waiting:.1f}, idle {new.idle:.1f}, of it while the CPU was "
            f"launching {new.launch:.1f}; CPU {new.cpu:.1f}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(run(several_gpus))
