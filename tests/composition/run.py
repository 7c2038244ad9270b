"""Run every legal pair and the seeded random recipes on the embedded models, or the named ones, each in a separate
process.

    python -m tests.composition.run --limit-s 600
    python -m tests.composition.run --named --device cuda

The first writes results/composition-cpu.json, with compile's "eager" backend; the second, with the real inductor,
results/composition-named-cuda.json. The record is rewritten after each recipe, one line each. The same command
continues where it stopped: it runs what is missing, what crashed or timed out, and recipes whose declarations changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from tests.composition.recipes import (
    EXACT,
    MODELS,
    NUM_RANDOM,
    SEED,
    STEPS,
    Case,
    legal_pairs,
    members,
    named_recipes,
    random_recipes,
)
from tests.composition.worker import COMMAND, EQUAL_DB, DrawRequest, without_picture
from vivace.architectures import CATALOGUE
from vivace.errors import RecipeError, Unsupported
from vivace.foundation.processes.launcher import Launcher, last_line
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.measure.machine import choose_device
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

RESULTS = Path(__file__).parents[2] / "results"
DEVICES = ("cpu", "cuda")
TIMEOUT_S = 120.0
COMPILE_TIMEOUT_S = 900.0
"""For the named recipes and their members, which inductor compiles: on a busy CPU a graph may take a minute."""
STATED = ("measured", "unsupported", "no_effect")
EXACT_LEAST_DB = 40.0
WORST_MEMBER_DB = 6.0
_COUNTS = {"pairs", "random", "named"}
_COMPILATION = ("compiled_graphs", "graph_breaks")
REPEAT_LEAST_DB = 60.0
"""Required between two calls with the same noise, for every recipe."""

Row = dict[str, Any]


class Drawer:
    """Generates cases one at a time; a context manager that owns the worker process and the references."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self._launcher = Launcher(COMMAND, tries_gpu=device != "cpu")
        self._folder = tempfile.TemporaryDirectory()
        self._references: set[tuple[str, int]] = set()

    def __enter__(self) -> Drawer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._launcher.close()
        self._folder.cleanup()

    def draw(self, case: Case, timeout_s: float = TIMEOUT_S) -> Row:
        """A row: the case, `outcome`, `reason`, `psnr_db` to the baseline in fp32, `faults`, and `wall_s`.

        That of a named recipe also has `compiled_graphs` and `graph_breaks`, and one that few steps draw flat `steps`,
        over which it was drawn again.

        Raises:
            RuntimeError: the baseline itself cannot be drawn.
        """
        started = time.monotonic()
        row = self._answer(case, STEPS[case.model], timeout_s)
        if row["faults"] == ["flat"] and not resolve(case.recipe).same_picture:
            # These few steps may be too few for techniques that change the image; the quality gate judges that. A
            # recipe that does not compose gives a flat image with all of the model's steps as well.
            steps = CATALOGUE[case.model].num_inference_steps
            row = self._answer(case, steps, timeout_s) | {"steps": steps}
        wall_s = round(time.monotonic() - started, 2)
        return asdict(case) | row | {"wall_s": wall_s, "declared": declared(case.recipe)}

    def _answer(self, case: Case, steps: int, timeout_s: float) -> Row:
        if (case.model, steps) not in self._references:
            row = self._request(case.model, BASELINE, steps, (), True, TIMEOUT_S)
            if row["outcome"] != "measured" or row["faults"]:
                raise RuntimeError(f"{case.model} draws no baseline over {steps} steps: {row}")
            self._references.add((case.model, steps))
        tell = _COMPILATION if case.kind == "named" else ()
        return self._request(case.model, case.recipe, steps, tell, False, timeout_s)

    def _request(
        self, model: str, recipe: str, steps: int, tell: Sequence[str], is_reference: bool, timeout_s: float
    ) -> Row:
        request = DrawRequest(
            model=model,
            recipe=recipe,
            device=self._device,
            steps=steps,
            code=str(Path(self._folder.name) / "code"),
            tell=tuple(tell),
            reference=str(Path(self._folder.name) / f"{model}-{steps}.npy"),
            is_reference=is_reference,
            threads=1,
        )
        ending = self._launcher.run(request, timeout_s)
        if ending.value is not None:
            return ending.value
        if ending.timed_out:
            return without_picture("timed_out", f"no image in {timeout_s:g} s")
        how = f"signal {ending.signal}" if ending.signal else f"exit status {ending.status}"
        return without_picture("crashed", f"{how}: {last_line(ending.log) or 'no message'}")


def declared(recipe: str) -> str:
    """Return a digest of a recipe's techniques with every knob and target, including the defaults."""
    return hashlib.sha256(resolve(recipe).spec.model_dump_json().encode()).hexdigest()[:8]


def complaint(row: Row, singles: dict[tuple[str, str], Row]) -> str | None:
    """Return which rule of composition a row breaks, or None.

    Args:
        row: of a pair, a random or a named recipe.
        singles: by (model, recipe), at least its members.
    """
    if row["outcome"] not in STATED:
        return f"{row['outcome']}: {row['reason']}"
    if row["outcome"] != "measured":
        return None if row["reason"] else f"{row['outcome']} without a reason"
    if row["faults"]:
        return f"the image is {', '.join(row['faults'])}"
    if row["repeat_psnr_db"] < REPEAT_LEAST_DB:
        return f"a second call with the same noise is {row['repeat_psnr_db']} dB from the first"
    if row["kind"] == "named" and not row["compiled_graphs"]:
        return "nothing was compiled"
    if not resolve(row["recipe"]).same_picture:
        return None
    psnr_db = row["psnr_db"]
    if set(row["names"]) <= EXACT:
        return None if psnr_db >= EXACT_LEAST_DB else f"exact techniques, but {psnr_db} dB to the reference"
    worst_db = EQUAL_DB
    for member in members(Case(row["kind"], row["model"], row["recipe"], tuple(row["names"]))):
        alone = singles[member.model, member.recipe]["psnr_db"]
        worst_db = min(worst_db, EQUAL_DB if alone is None else alone)
    # Members that are nearly equal to the reference must allow as much rounding as exact ones.
    least_db = min(worst_db - WORST_MEMBER_DB, EXACT_LEAST_DB)
    return (
        None if psnr_db >= least_db else f"{psnr_db} dB to the reference, its worst member alone {worst_db}"
    )


def in_order() -> list[Case]:
    """Return all cases in a seeded order, four pairs per random recipe, so a stopped run covers some of each."""
    rng = random.Random(SEED)
    pairs, recipes = legal_pairs(), random_recipes()
    rng.shuffle(pairs)
    mixed: list[Case] = []
    while pairs or recipes:
        mixed += [*pairs[:4], *recipes[:1]]
        pairs, recipes = pairs[4:], recipes[1:]
    return mixed


def sample(num_pairs: int, num_random: int, seed: int = SEED) -> list[Case]:
    """Return a seeded sample in which every technique appears, pairs first.

    None of its random recipes is in fp16, which most CPUs emulate: half a minute an image.
    """
    rng = random.Random(seed)
    pairs, recipes = legal_pairs(), random_recipes()
    rng.shuffle(pairs)
    chosen: list[Case] = []
    missing = set(TECHNIQUES)
    # First the cases with the most new techniques, alternating between the models.
    while missing:
        model = MODELS[len(chosen) % len(MODELS)]
        best = max((c for c in pairs if c.model == model), key=lambda case: len(missing & set(case.names)))
        chosen.append(best)
        missing -= set(best.names)
    rest = [case for case in pairs if case not in chosen]
    assert len(chosen) <= num_pairs
    quick = [case for case in recipes if "fp16" not in case.recipe]
    return [*chosen, *rest[: num_pairs - len(chosen)], *rng.sample(quick, num_random)]


def with_members(cases: Iterable[Case]) -> list[Case]:
    """Return each case after the single members that it is compared with, each member once."""
    unique: dict[tuple[str, str, str], Case] = {}
    for case in cases:
        # A recipe that changes the image is not compared with its members.
        alone = members(case) if resolve(case.recipe).same_picture and not set(case.names) <= EXACT else []
        for member in (*alone, case):
            unique.setdefault((member.kind, member.model, member.recipe), member)
    return list(unique.values())


def record_of(device: str, named: bool) -> Path:
    """Return the path of a device's record."""
    return RESULTS / f"composition-{'named-' if named else ''}{device}.json"


def read(path: Path, device: str = "cpu", named: bool = False) -> Row:
    """A record: `conditions` (what it was drawn with) and `rows`; without the file one without rows."""
    if path.exists():
        row: Row = json.loads(path.read_text())
        return row
    return {"conditions": conditions(device, named), "rows": []}


def conditions(device: str = "cpu", named: bool = False) -> Row:
    from importlib.metadata import version

    from vivace.measure.machine import this_machine

    whole = {"named": len(named_recipes())} if named else {"pairs": len(legal_pairs()), "random": NUM_RANDOM}
    return {
        "device": device,
        # The CPU's model does not matter; the GPU's decides whether a technique runs.
        **({"device_name": this_machine(device).device_name} if device == "cuda" else {}),
        "threads": 1,
        "steps": STEPS,
        "seed": SEED,
        **whole,
        "libraries": {name: version(name) for name in ("torch", "diffusers", "transformers", "torchao")},
    }


def write(path: Path, record: Row) -> None:
    """Write the file under another name, then rename it: a killed run leaves the older one."""
    rows = ",\n".join(json.dumps(row) for row in record["rows"])
    text = f'{{"conditions": {json.dumps(record["conditions"])},\n"rows": [\n{rows}\n]}}\n'
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@click.command("composition")
@click.option("--named", is_flag=True, help="The named recipes, with the real inductor, instead of the rest.")
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The record.  [default: results/composition-DEVICE.json, or results/composition-named-DEVICE.json]",
)
@click.option(
    "--limit-s", type=click.FloatRange(min=0), help="Start no further recipe after so many seconds."
)
def main(named: bool, device: str, out: Path | None, limit_s: float | None) -> None:
    """Generate what the record lacks, one line per recipe. Exit 1 if a row breaks a rule, 4 if recipes are left."""
    try:
        choose_device(device)
    except Unsupported as error:
        raise click.UsageError(str(error)) from None
    out = out or record_of(device, named)
    record = read(out, device, named)
    now = conditions(device, named)
    # The number of recipes depends on the techniques; the digest of a row says whether its recipe still means the same.
    others = [name for name in now if name not in _COUNTS and now[name] != record["conditions"].get(name)]
    if others:
        raise click.UsageError(f"{out} was drawn with {record['conditions']}; give another --out")
    cases = with_members(named_recipes() if named else in_order())
    cases_by_key = {(case.kind, case.model, case.recipe): case for case in cases}
    rows_by_key = {(row["kind"], row["model"], row["recipe"]): row for row in record["rows"]}
    rows = {
        key: row
        for key, row in rows_by_key.items()
        if key in cases_by_key and row["outcome"] in STATED and row.get("declared") == declared(row["recipe"])
    }
    started = time.monotonic()
    left = [case for key, case in cases_by_key.items() if key not in rows]
    with Drawer(device) as drawer:
        while left and (limit_s is None or time.monotonic() - started < limit_s):
            case = left.pop(0)
            row = drawer.draw(case, COMPILE_TIMEOUT_S if named else TIMEOUT_S)
            rows[case.kind, case.model, case.recipe] = row
            write(out, {"conditions": now, "rows": list(rows.values())})
            summary = row["reason"] or f"{row['psnr_db']} dB"
            click.echo(
                f"{case.kind} {case.model} {case.recipe}: {row['outcome']}: {summary} ({row['wall_s']} s)"
            )
    broken = complaints(list(rows.values()))
    for recipe, why in broken:
        click.echo(f"{recipe}: {why}", err=True)
    click.echo(f"{len(rows)} in the record, {len(left)} left", err=True)
    sys.exit(1 if broken else 4 if left else 0)


def complaints(rows: list[Row]) -> list[tuple[str, str]]:
    """Return ("MODEL RECIPE", what is wrong) of each pair, random and named recipe that breaks a rule.

    Rows of an option that has been removed since are left out; members are found by the names that they have now.
    """
    rows = [row for row in rows if still_exists(row["recipe"])]
    singles = {(row["model"], resolve(row["recipe"]).text): row for row in rows if row["kind"] == "single"}
    return [
        (f"{row['model']} {row['recipe']}", why)
        for row in rows
        if row["kind"] != "single" and (why := complaint(row, singles)) is not None
    ]


def still_exists(recipe: str) -> bool:
    try:
        resolve(recipe)
    except RecipeError:
        return False
    return True


if __name__ == "__main__":
    main()
