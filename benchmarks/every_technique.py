"""Measure every technique that keeps the image, one at a time, each beside its baseline.

    python -m benchmarks.every_technique sd15 --limit-s 500      measure what is missing, until the time limit
    python -m benchmarks.every_technique sd15 --compile 4        only compile, four recipes at a time, and time that
    python -m benchmarks.every_technique sd15 --best 5           the five fastest again, at full length
    python -m benchmarks.every_technique sd15 --only int8+compile --steps 50    this recipe, at full length

The model has random weights and its native size. Single techniques are timed over eight steps, which
docs/techniques-measured.md scales to the model's number of steps; the best recipes, and FLUX's ten configurations of a
published study, are timed at full length. A row is two rounds of the recipe between two rounds of its baseline (A B B
A), each in a process of its own. Each pair is added to the record at once, and the same command resumes with what is
missing, was timed too seldom, or was measured while the host's speed changed.

The eager steps of UNets are bound by the CPU that launches kernels, so such rows would measure the host. Their baseline
is `cuda_graph`, and every recipe that goes with it has it too.

`--compile` fills the compiler's disk cache, so that timing does not wait for it. The first calls are kept in a separate
record, since processes that compile in parallel disturb each other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import click
import numpy as np

import vivace
from benchmarks.command import MEASURED_IN_PART, Measuring, locked, measures, run
from benchmarks.every_model import line, write_records
from vivace.benchmark import Timing, studies
from vivace.benchmark.launcher import Launcher
from vivace.cli.progress import for_this_terminal
from vivace.errors import RecipeError, StoreError
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome, Record
from vivace.stats.intervals import MIN_SAMPLES

RESULTS = Path(__file__).parents[1] / "results"
FAMILIES = ("sd15", "sdxl", "flux-dev")
STEPS = 8
COMMON = {"sd15": "cuda_graph", "sdxl": "cuda_graph"}
"""The baseline of a model, which its recipes have too where they can; none: as published."""
ROUNDS = 2
MOST_DRIFT = 1.1
"""A row is refused if the baseline's rounds before and after it differ by more than this ratio."""

ALONE = (
    "inference_mode",
    "gpu_postprocess",
    "channels_last",
    "fuse_qkv",
    "attention(efficient)",
    "attention(flash)",
    "attention(cudnn)",
    "attention(flex)",
    "attention(flash3)",
    "attention(flash4)",
    "attention(sage)",
    "attention(xformers)",
    "cuda_graph",
    "int8",
    "int8_dynamic",
    "fp8_weight",
    "fp8",
    "fp8_static",
    "nf4",
    "int4",
    "int4_gemm",
    "quantize(q8_0, backend=gguf)",
    "quantize(int8, backend=sdnq)",
    "layerwise_casting",
    "offload(model)",
    "offload(group)",
    "offload(group, stream=True)",
    "vae_tiling",
    "vae_slicing",
    "prompt_cache",
    "tiny_vae",
    "fp16",
    "bf16",
    "attention(math)",
    "offload(sequential)",
    "tf32+fp32",
    "fp32",
)
"""The slow ones last. Other backends than torchao want their extras: pip install 'vivace[gguf,sdnq]'."""

_HALF_GB = {"sd15": 0.9, "sdxl": 2.6, "flux-dev": 12}
"""Half of the denoiser's weights, as an example of what `offload` can keep on the GPU."""

COMPILED = (
    "compile",
    "compile(blocks=repeated)",
    "compile(dynamic=True)",
    "compile(reduce-overhead)",
    "fuse_qkv+channels_last+compile",
    "int8+compile",
    "int8_dynamic+compile",
    "fp8_weight+compile",
    "fp8+compile",
    "fp8_static+compile",
    "nf4+compile",
    "int4+compile",
)
"""`compile` alone, and with techniques that depend on it."""

_ALL = "denoiser,text_encoder_2,vae"
CONFIGURATIONS = (
    "compile",
    "compile@denoiser,vae",
    f"compile@{_ALL}",
    "int8",
    "int8+compile",
    "int8@denoiser,text_encoder_2",
    "int8@denoiser,text_encoder_2+compile",
    "int8@denoiser,text_encoder_2+compile@denoiser,vae",
    f"int8@{_ALL}+compile@{_ALL}",
)
"""With the baseline, the ten configurations of the first study: 8-bit weights and compile on the denoiser, T5 and VAE.
SD 1.5 has no second text encoder and uses `text_encoder` instead."""

Key = tuple[str, int]  # recipe, steps


@click.command("every_technique")
@click.argument("name", metavar="MODEL", type=click.Choice(FAMILIES))
@measures(record="results/techniques-MODEL.json", repeats=3, warmup=3, rounds=ROUNDS)
@click.option("--only", multiple=True, metavar="RECIPE", help="This recipe, over --steps; repeat for more.")
@click.option("--steps", type=click.IntRange(1, 1000), help=f"For --only. Default: {STEPS}.")
@click.option(
    "--part",
    type=click.Choice(["alone", "compiled", "configurations", "all"]),
    default="all",
    show_default=True,
)
@click.option("--best", type=click.IntRange(1, 50), help="The fastest so far again, at full length.")
@click.option("--compile", "at_once", type=click.IntRange(1, 64), help="Only compile, this many at a time.")
@click.option("--alone", "without_baseline", is_flag=True, help="Measure without a baseline beside it.")
def every_technique(
    name: str,
    how: Measuring,
    only: Sequence[str],
    steps: int | None,
    part: str,
    best: int | None,
    at_once: int | None,
    without_baseline: bool,
) -> int:
    """Every technique on one model with random weights, one line per recipe; resumable."""
    record = how.record or record_file(name)
    if steps is not None and not only:
        raise click.UsageError("--steps is for recipes that are named; add --only RECIPE")
    asked = cases(name, part, only, steps or STEPS)
    records = read_records(record)
    done = {key_of(record) for record in finished(name, records)}
    if at_once is not None:
        return _compile(name, [case for case in asked if case not in done], record, at_once, how)
    if best is not None:
        asked = [(recipe, full_length(name)) for recipe in fastest(name, records, best)]
    with studies.start_launcher(how.device) as launcher:
        for recipe, length in asked:
            if (recipe, length) in done:
                continue
            if how.is_over:
                return how.ended(recipe)
            _measure_case(name, recipe, length, how, launcher, record, without_baseline)
    return 0


def _measure_case(
    name: str, recipe: str, length: int, how: Measuring, launcher: Launcher, record: Path, is_alone: bool
) -> None:
    """Measure one case, once more if the host's speed changed meanwhile, and add it to the record."""
    for attempt in range(2):
        before = time.monotonic()
        if is_alone:
            found = [measure(name, recipe, length, how, launcher)]
        else:
            found = measure_beside(name, recipe, length, how, launcher)
        row = rows_of(found)[-1]
        moved = has_moved(*found) if len(found) == 2 and row.outcome is Outcome.MEASURED else None
        told = f"; the host's speed changed: {moved}" if moved else ""
        click.echo(f"{length} steps, {line(row)} ({time.monotonic() - before:.0f} s{told})")
        if moved is None or attempt == 1:
            break
    if is_alone:
        add(found[0], record, baseline(name))
    else:
        add_pair(found[0], found[1], record)


def record_file(name: str) -> Path:
    return RESULTS / f"techniques-{name}.json"


def first_calls_file(record: Path) -> Path:
    """Return the path of the first calls of `--compile`."""
    return record.with_name(f"{record.stem}-compiling.json")


def full_length(name: str) -> int:
    return CATALOGUE[name].num_inference_steps


def key_of(record: Record) -> Key:
    return record.trial.recipe.text, record.trial.workload.num_inference_steps


def num_timed(record: Record) -> int:
    """Return the number of timed calls of all rounds."""
    return sum(len(round_.samples) for round_ in record.rounds)


def is_done(name: str, record: Record, beside: Record | None) -> bool:
    """Whether a row is complete: timed often enough for an interval on a steady host, or failed for good.

    Args:
        beside: the baseline that was measured beside it.
    """
    if record.outcome is not Outcome.MEASURED:
        return record.outcome.is_final
    if beside is None or (num_timed(record) < MIN_SAMPLES and key_of(record)[1] == full_length(name)):
        return False
    if len(beside.rounds) < ROUNDS:  # an old row of one process
        return name not in COMMON
    return has_moved(beside, record) is None


def has_moved(beside: Record, record: Record) -> str | None:
    """Return how the host's speed changed while a row was measured; None if by no more than MOST_DRIFT."""
    medians = [
        float(np.median([s.total_s for s in round_.samples])) for round_ in beside.rounds if round_.samples
    ]
    if len(medians) > 1 and max(medians) > MOST_DRIFT * min(medians):
        return f"the baseline took {min(medians):.3g} and {max(medians):.3g} s"
    rows = rows_of([beside, record])
    if len(rows) == 2 and rows[1].cpu_differs:
        return f"Python took {rows[1].cpu_ratio:.2f} times as long as beside the baseline"
    return None


def finished(name: str, records: Sequence[Record]) -> list[Record]:
    """Return the complete rows (see `is_done`)."""
    return [one for one, beside in with_baselines(records, baseline(name)) if is_done(name, one, beside)]


def baseline(name: str) -> str:
    """The recipe that a model's rows are compared with, canonical."""
    return resolve(COMMON.get(name, BASELINE)).text


def recipe_of(name: str, text: str) -> str:
    """Return a recipe in canonical form, with the baseline's techniques added if they go with it."""
    common = COMMON.get(name)
    if common is None or text == BASELINE:
        return resolve(text).text
    try:
        return resolve(f"{text}+{common}").text
    except RecipeError:
        return resolve(text).text


def alone(name: str) -> list[str]:
    """Return ALONE in canonical form for this model; first the eager model, where that is not the baseline."""
    halved = f"offload(group, stream=True, keep={_HALF_GB[name]})"
    texts = [_own_precision(name, text) for text in (*ALONE, halved)]
    return [BASELINE, *(text for text in texts if text != baseline(name))] if name in COMMON else texts


def compiled(name: str) -> list[str]:
    """Return COMPILED in canonical form for this model."""
    return [_own_precision(name, text) for text in COMPILED]


def _own_precision(name: str, text: str) -> str:
    """Add bf16 where it is needed: fp8 with a scale per row needs bf16, and UNets default to fp16."""
    needs_bf16 = text in ("fp8", "fp8+compile") and CATALOGUE[name].cuda_dtype != "bf16"
    return recipe_of(name, f"bf16+{text}" if needs_bf16 else text)


def configurations(name: str) -> list[str]:
    """Return the study's configurations in canonical form for this model."""
    texts: tuple[str, ...] = CONFIGURATIONS
    if name == "sd15":
        texts = tuple(text.replace("text_encoder_2", "text_encoder") for text in texts)
    return [resolve(text).text for text in texts]


def read_records(path: Path) -> list[Record]:
    """Read the records in the order of measurement; empty if there is no such file.

    Raises:
        StoreError: the file is not a list of Records.
    """
    if not path.exists():
        return []
    try:
        return [Record.model_validate(item) for item in json.loads(path.read_text())]
    except (OSError, ValueError, TypeError) as error:
        why = str(error).splitlines()[0]
        raise StoreError(
            f"{path} is not a record of this script ({why}); give --record another file"
        ) from error


def check_device(records: Iterable[Record], new: Record, path: Path) -> None:
    """Check that a record is of the same device as the others, since rows are compared with each other.

    Raises:
        StoreError: the file is of another device.
    """
    for old in records:
        if old.environment.device_name != new.environment.device_name:
            raise StoreError(
                f"{path} was made on {old.environment.device_name}, and this is {new.environment.device_name}; give "
                "--record another file"
            )


def add(new: Record, path: Path, baseline: str = BASELINE, behind: Record | None = None) -> list[Record]:
    """Add a record to the file, which other processes may have changed. Failed attempts are replaced; baselines are all
    kept, each for the rows after it.

    Args:
        baseline: the baseline recipe in canonical form.
        behind: the baseline that the same process measured before. Another process may have added one since, from
            another GPU, with which the new record must not be compared.

    Returns:
        All records of the file.

    Raises:
        StoreError: the file is of another device.
    """
    with locked(path):
        records = read_records(path)
        check_device(records, new, path)
        found = [old for old in records if key_of(old)[0] == baseline or key_of(old) != key_of(new)]
        index = len(found)
        if behind is not None and key_of(new)[0] != baseline:
            start = [one.model_dump_json() for one in found].index(behind.model_dump_json()) + 1
            others = (k for k in range(start, len(found)) if key_of(found[k]) == key_of(behind))
            index = next(others, index)
        found.insert(index, new)
        write_records(path, found)
    return found


def add_pair(beside: Record, new: Record, path: Path) -> list[Record]:
    """Add a row after the baseline that was measured beside it, in place of an older row of the same key. Baselines
    that no row is compared with are dropped.

    Returns:
        All records of the file.

    Raises:
        StoreError: the file is of another device.
    """
    own = key_of(beside)[0]
    with locked(path):
        records = read_records(path)
        check_device(records, new, path)
        kept = [(one, base) for one, base in with_baselines(records, own) if key_of(one) != key_of(new)]
        used = [base for _, base in kept if base is not None]
        found = [one for one, base in kept if base is not None or any(one is base_ for base_ in used)]
        found += [beside, new]
        write_records(path, found)
    return found


def row_of(record: Record, among: Sequence[Record], baseline: str = BASELINE) -> Row:
    """Return a record's row, compared with its baseline."""
    (row,) = [row for row in rows_with_baselines(among, baseline) if row.record is record]
    return row


def with_baselines(records: Sequence[Record], baseline: str = BASELINE) -> list[tuple[Record, Record | None]]:
    """Return each record with the latest earlier baseline of the same number of steps; None for a baseline.

    Args:
        baseline: the baseline recipe in canonical form.
    """
    found: list[tuple[Record, Record | None]] = []
    latest: dict[int, Record] = {}
    for record in records:
        recipe, steps = key_of(record)
        if recipe == baseline:
            latest[steps] = record
        if recipe == baseline or steps in latest:
            found.append((record, None if recipe == baseline else latest[steps]))
    return found


def rows_with_baselines(records: Sequence[Record], baseline: str = BASELINE) -> list[Row]:
    """Return one row per record, in order, compared as `with_baselines` says."""
    return [
        rows_of([record] if beside is None else [beside, record])[-1]
        for record, beside in with_baselines(records, baseline)
    ]


def fastest(name: str, records: Sequence[Record], number: int) -> list[str]:
    """Return the `number` recipes with the greatest speed-up over eight steps."""
    rows = [
        row
        for row in rows_with_baselines(records, baseline(name))
        if row.speedup is not None and key_of(row.record)[1] == STEPS
    ]
    rows.sort(key=lambda row: -row.speedup.point if row.speedup else 0)
    return list(dict.fromkeys(row.recipe for row in rows))[:number]


def cases(name: str, part: str = "all", only: Sequence[str] = (), steps: int = STEPS) -> list[Key]:
    """Return the cases of this model, slow ones last; if `only` is given, these recipes over `steps` steps."""
    if only:
        return [(recipe_of(name, text), steps) for text in only]
    found: list[Key] = []
    if part in ("alone", "all"):
        found += [(text, STEPS) for text in alone(name)]
    if part in ("compiled", "all"):
        found += [(text, STEPS) for text in compiled(name)]
    if part in ("configurations", "all") and name not in COMMON:
        found += [(text, full_length(name)) for text in configurations(name)]
    return list(dict.fromkeys(found))


def measure(name: str, recipe: str, steps: int, how: Measuring, launcher: Launcher) -> Record:
    """Measure one recipe on the model with random weights, in one process."""
    (found,) = _bench(name, [recipe], steps, how, launcher, how.timing.model_copy(update={"rounds": 1}))
    return found


def measure_beside(name: str, recipe: str, steps: int, how: Measuring, launcher: Launcher) -> list[Record]:
    """Measure a recipe between rounds of its baseline; return the baseline and the recipe."""
    return _bench(name, [baseline(name), recipe], steps, how, launcher, how.timing)


def _bench(
    name: str, recipes: Sequence[str], steps: int, how: Measuring, launcher: Launcher, timing: Timing
) -> list[Record]:
    run = vivace.bench(
        SYNTHETIC + name,
        recipes,
        num_inference_steps=steps,
        timing=timing,
        device=how.device,
        store=how.store,
        rerun=True,
        quality=False,
        rivals=False,
        progress=for_this_terminal(),
        launcher=launcher,
    )
    return run.records


def _compile(name: str, cases: Sequence[Key], record: Path, at_once: int, how: Measuring) -> int:
    """Run each recipe that compiles in a separate process, one call over eight steps: compiled graphs do not depend on
    the number of steps."""
    path = first_calls_file(record)
    known = read_records(path)
    done = {found.trial.recipe.text for found in known if found.outcome.is_final}
    left = [
        text for text in dict.fromkeys(text for text, _ in cases) if "compile" in text and text not in done
    ]
    if not left:
        click.echo("all compiled already")
    status = 0
    running: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    with tempfile.TemporaryDirectory() as folder:
        while left or running:
            while left and len(running) < at_once and not how.is_over:
                recipe = left.pop(0)
                part = Path(folder) / f"{len(left)}.json"
                arguments = ["--only", recipe, "--alone", "--repeats", "1", "--warmup", "1"]
                arguments += ["--record", str(part), "--store", str(part.with_suffix(""))]
                arguments += ["--device", how.device, "--timeout", f"{how.timing.timeout_s:g}"]
                running.append((recipe, part, _start(name, arguments)))
            if not running:
                return how.ended(", ".join(left))
            time.sleep(0.2)
            for one in [one for one in running if one[2].poll() is not None]:
                running.remove(one)
                recipe, part, process = one
                found = read_records(part)
                if not found:
                    click.echo(f"{recipe}: the process ended with {process.returncode} and no record")
                    status = MEASURED_IN_PART
                    continue
                known = add(found[0], path, baseline(name))
                click.echo(f"compiling, {line(rows_of(found)[0])}")
    return status


def _start(name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.every_technique", name, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(run(every_technique))
