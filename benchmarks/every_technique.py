"""Measure every technique that keeps the image, one at a time, and the ten configurations of a published study.

    python -m benchmarks.every_technique sd15 --limit-s 500      measure what is missing, until the time limit
    python -m benchmarks.every_technique sd15 --compile 4        only compile, four recipes at a time, and time that
    python -m benchmarks.every_technique sd15 --best 5           the five fastest again, at full length
    python -m benchmarks.every_technique sd15 --careful          rows disturbed by the CPU's changing speed, again
    python -m benchmarks.every_technique sd15 --only int8+compile --steps 50    this recipe, at full length

The model has random weights and its native size. Single techniques are timed over eight steps, which
docs/techniques-measured.md scales to the model's number of steps. The baseline, the ten configurations and the best
recipes are timed at full length, at least three times: with fewer calls there is no interval, and so no verdict. Each
invocation measures the baseline again, since it may run on another machine; rows are compared with the baseline
measured before them. Each record is added at once, and the same command resumes with what is missing or was timed too
few times.

Eager UNets are bound by the CPU, whose speed on a shared host changes within minutes; a row says so if it differed from
its baseline's. `--careful` measures such rows again, each right after its own baseline.

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

import vivace
from benchmarks.command import MEASURED_IN_PART, Measuring, locked, measures, run
from benchmarks.every_model import line, write_records
from vivace.benchmark import studies
from vivace.benchmark.launcher import Launcher
from vivace.cli.progress import for_this_terminal
from vivace.errors import StoreError
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

ALONE = (
    "inference_mode",
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
@measures(record="results/techniques-MODEL.json", repeats=4, warmup=3)
@click.option("--only", multiple=True, metavar="RECIPE", help="This recipe, over --steps; repeat for more.")
@click.option("--steps", type=click.IntRange(1, 1000), help=f"For --only. Default: {STEPS}.")
@click.option(
    "--part",
    type=click.Choice(["alone", "compiled", "configurations", "all"]),
    default="all",
    show_default=True,
)
@click.option("--best", type=click.IntRange(1, 50), help="The fastest so far again, at full length.")
@click.option("--careful", is_flag=True, help="Measure rows again if the CPU's speed differed.")
@click.option("--compile", "at_once", type=click.IntRange(1, 64), help="Only compile, this many at a time.")
@click.option("--baseline/--no-baseline", "with_baseline", default=True, help="Measure the baseline first.")
def every_technique(
    name: str,
    how: Measuring,
    only: Sequence[str],
    steps: int | None,
    part: str,
    best: int | None,
    careful: bool,
    at_once: int | None,
    with_baseline: bool,
) -> int:
    """Every technique on one model with random weights, one line per recipe; resumable."""
    record = how.record or record_file(name)
    if steps is not None and not only:
        raise click.UsageError("--steps is for recipes that are named; add --only RECIPE")
    if careful and (only or best is not None or at_once is not None or not with_baseline):
        raise click.UsageError(
            "--careful selects its rows itself; leave out --only, --best, --compile and --no-baseline"
        )
    asked = cases(name, part, only, steps or STEPS)
    if at_once is not None:
        timed = {key_of(found) for found in read_records(record) if is_done(name, found)}
        return _compile(name, [case for case in asked if case not in timed], record, at_once, how)
    records = read_records(record)
    if best is not None:
        asked = [(recipe, full_length(name)) for recipe in fastest(records, best)]
    done = {key_of(found) for found in records if is_done(name, found)}
    if careful:
        asked, done = disturbed(records), set()
    wanted = [case for case in asked if case not in done]
    repeats = how.timing.repeats
    if (
        repeats is not None
        and repeats < MIN_SAMPLES
        and any(number == full_length(name) for _, number in wanted)
    ):
        raise click.UsageError(
            f"--repeats {repeats}: with fewer than {MIN_SAMPLES} timed calls there is no interval, so rows at full "
            f"length cannot be compared; give {MIN_SAMPLES} or more"
        )
    behind: Record | None = None
    with studies.start_launcher(how.device) as launcher:
        for length in dict.fromkeys(number for _, number in wanted):
            of_these = [recipe for recipe, number in wanted if number == length]
            if careful:
                of_these = [text for recipe in of_these for text in (BASELINE, recipe)]
            elif with_baseline:
                of_these.insert(0, BASELINE)
            for recipe in of_these:
                if how.is_over:
                    return how.ended(recipe)
                before = time.monotonic()
                found = measure(name, recipe, length, how, launcher)
                records = add(found, record, behind=behind)
                if recipe == BASELINE:
                    behind = found
                row = row_of(found, records) if with_baseline else rows_of([found])[0]
                click.echo(f"{length} steps, {line(row)} ({time.monotonic() - before:.0f} s)")
    return 0


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


def is_done(name: str, record: Record) -> bool:
    """Whether the record is complete: measured (at full length, often enough for an interval), or failed for good."""
    if record.outcome is Outcome.MEASURED and key_of(record)[1] == full_length(name):
        return num_timed(record) >= MIN_SAMPLES
    return record.outcome.is_final


def alone(name: str) -> list[str]:
    """Return ALONE in canonical form for this model."""
    halved = f"offload(group, stream=True, keep={_HALF_GB[name]})"
    return [_own_precision(name, text) for text in (*ALONE, halved)]


def compiled(name: str) -> list[str]:
    """Return COMPILED in canonical form for this model."""
    return [_own_precision(name, text) for text in COMPILED]


def _own_precision(name: str, text: str) -> str:
    """Add bf16 where it is needed: fp8 with a scale per row needs bf16, and UNets default to fp16."""
    needs_bf16 = text in ("fp8", "fp8+compile") and CATALOGUE[name].cuda_dtype != "bf16"
    return resolve(f"bf16+{text}" if needs_bf16 else text).text


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


def row_of(record: Record, among: Sequence[Record], baseline: str = BASELINE) -> Row:
    """Return a record's row, compared with its baseline."""
    (row,) = [row for row in rows_with_baselines(among, baseline) if row.record is record]
    return row


def rows_with_baselines(records: Sequence[Record], baseline: str = BASELINE) -> list[Row]:
    """Return one row per record, in order, compared with the latest earlier baseline of the same number of steps.

    Args:
        baseline: the baseline recipe in canonical form.
    """
    rows = []
    latest: dict[int, Record] = {}
    for record in records:
        recipe, steps = key_of(record)
        if recipe == baseline:
            latest[steps] = record
            rows += rows_of([record])
        elif steps in latest:
            rows.append(rows_of([latest[steps], record])[1])
    return rows


def disturbed(records: Sequence[Record]) -> list[Key]:
    """Return the cases that were measured while the CPU's speed differed from the baseline's."""
    rows = [row for row in rows_with_baselines(records) if row.latency is not None and row.cpu_differs]
    return list(dict.fromkeys(key_of(row.record) for row in rows))


def fastest(records: Sequence[Record], number: int) -> list[str]:
    """Return the `number` recipes with the greatest speed-up over eight steps."""
    rows = [
        row
        for row in rows_with_baselines(records)
        if row.speedup is not None and key_of(row.record)[1] == STEPS
    ]
    rows.sort(key=lambda row: -row.speedup.point if row.speedup else 0)
    return list(dict.fromkeys(row.recipe for row in rows))[:number]


def cases(name: str, part: str = "all", only: Sequence[str] = (), steps: int = STEPS) -> list[Key]:
    """Return the cases of this model, slow ones last; if `only` is given, these recipes over `steps` steps."""
    if only:
        return [(resolve(text).text, steps) for text in only]
    found: list[Key] = []
    if part in ("alone", "all"):
        found += [(text, STEPS) for text in alone(name)]
    if part in ("compiled", "all"):
        found += [(text, STEPS) for text in compiled(name)]
    if part in ("configurations", "all"):
        found += [(text, full_length(name)) for text in configurations(name)]
    return list(dict.fromkeys(found))


def measure(name: str, recipe: str, steps: int, how: Measuring, launcher: Launcher) -> Record:
    """Measure one recipe on the model with random weights."""
    (found,) = vivace.bench(
        SYNTHETIC + name,
        [recipe],
        num_inference_steps=steps,
        timing=how.timing,
        device=how.device,
        store=how.store,
        rerun=True,
        quality=False,
        rivals=False,
        progress=for_this_terminal(),
        launcher=launcher,
    )
    return found


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
                arguments = ["--only", recipe, "--no-baseline", "--repeats", "1", "--warmup", "1"]
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
                known = add(found[0], path)
                click.echo(f"compiling, {line(rows_of(found)[0])}")
    return status


def _start(name: str, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.every_technique", name, *arguments]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    raise SystemExit(run(every_technique))
