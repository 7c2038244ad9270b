"""What a new size costs with each way of compiling, and what the ways cost in each step.

    python -m benchmarks.sizes --limit-s 500                    tiny-sd and tiny-flux, or on a GPU SDXL and FLUX.1 [dev]
    python -m benchmarks.sizes --model synthetic:flux-dev --way "compile(sizes={announced})"

Each case is a model with one way: `compile`, which announces nothing, `compile(sizes=[...])` and `compile(sizes=any)`,
each for the whole denoiser and for its repeated blocks. A case is a process of its own with an empty cache. The session
is warmed up, on the announced sizes or on the first of them. Then it is called twice at every size: those that
are announced, and others that nobody announced. The record has the seconds of both calls and the graphs that each
compiled. At the end the denoiser's steps are timed at every announced size in turns with those of an uncompiled session
in the same process, so that ways can be compared by their ratios to it; `compile` is timed at its first size before it
has seen a second one, which is plain static compiling.

Text is encoded beforehand, and nothing is decoded. On a CPU the times are CPU time with one thread, of the process and
the C++ compilers that it starts, which other programs disturb less than the clock.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import click

import vivace
from benchmarks.command import record_on, run
from benchmarks.record_files import read_lines
from vivace.answers.formatting import seconds
from vivace.benchmark.rounds.worker import import_all
from vivace.errors import StoreError, UsageError, VivaceError
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.sizes import Size
from vivace.foundation.stats import median_interval
from vivace.machinery.compilation.compiled_code import TRITON_VARIABLE, VARIABLE
from vivace.measure.accelerator import synchronise
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import encode
from vivace.runtime.session import Session

RECORD = Path(__file__).parents[1] / "results" / "sizes.jsonl"
SIZES: dict[str, tuple[str, str]] = {
    "tiny-sd": ("128x128 160x96", "96x128"),
    "tiny-flux": ("128x128 160x96", "96x128"),
    "synthetic:sdxl": ("1024x1024 1216x832", "896x1152"),
    "synthetic:flux-dev": ("1024x1024 1216x832", "896x1152"),
}
"""The announced sizes, the first of which the others' sessions are warmed up on, and sizes that are not announced."""
MODELS = {"cpu": ("tiny-flux", "tiny-sd"), "cuda": ("synthetic:sdxl", "synthetic:flux-dev")}
WAYS = (
    "compile(blocks=repeated)",
    "compile(blocks=repeated, sizes={announced})",
    "compile(blocks=repeated, sizes=any)",
    "compile",
    "compile(sizes={announced})",
    "compile(sizes=any)",
)
FAILED_IN_PART = 4
_UNCOMPILED = "inference_mode"
_PROMPT = "a red circle above a blue square"

Key = tuple[str, str]  # model, way
Case = dict[str, Any]


@click.command("sizes")
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Default: results/sizes.jsonl, on a GPU results/sizes-cuda.jsonl.",
)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no case after this many seconds.")
@click.option(
    "--model", "models", multiple=True, type=click.Choice(list(SIZES)), help="Default: by the device."
)
@click.option("--way", "ways", multiple=True, help="A recipe, with {announced} for the list. Default: six.")
@click.option("--turns", type=click.IntRange(1, 1000), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(1, 1000), default=8, show_default=True, help="Of each call.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def sizes(
    record: Path | None,
    limit_s: float | None,
    models: Sequence[str],
    ways: Sequence[str],
    turns: int,
    steps: int,
    device: str,
) -> int:
    """Measure what new sizes cost with each way of compiling, one line per case; resumable."""
    chosen = choose_device(device)
    for model in models or MODELS[chosen]:
        for way in ways or WAYS:
            recipe_of(model, way)
    record = record or record_on(RECORD, chosen)
    stored = read_cases(record)
    here = environment(chosen)
    _check_device(stored, here, record)
    started = time.monotonic()
    failed, left = 0, []
    for model in models or MODELS[chosen]:
        for way in ways or WAYS:
            if (model, way) in stored:
                click.echo(f"{line(stored[model, way])} (in the record already)")
            elif limit_s is not None and time.monotonic() - started >= limit_s:
                left.append(f"{model} {way}")
            else:
                click.echo(f"{model} {way}: compiling", err=True)
                try:
                    case = _in_a_process(model, way, chosen, turns, steps)
                except (VivaceError, RuntimeError) as error:  # the others go on
                    click.echo(f"{model} {way}: failed: {(str(error).splitlines() or [repr(error)])[0]}")
                    failed += 1
                else:
                    _append(record, case | {"environment": here.model_dump(mode="json")})
                    click.echo(line(case))
    if left:
        click.echo(f"{limit_s:g} s are over; the same command goes on with {', '.join(left)}", err=True)
    return FAILED_IN_PART if failed else 0


def recipe_of(model: str, way: str) -> str:
    """Return a way's recipe, with the model's announced sizes for its placeholder.

    Raises:
        UsageError: the way has another placeholder.
        RecipeError: it is no recipe.
    """
    announced = SIZES[model][0].split()
    try:
        text = way.format(announced=f"[{', '.join(announced)}]")
    except (KeyError, IndexError, ValueError):
        raise UsageError(
            f"--way {way}: the only placeholder is {{announced}}, for the list of sizes"
        ) from None
    resolve(text)
    return text


def _in_a_process(*case: Any) -> Case:
    """Measure in a new process: kernels that were compiled once in a process are found again in its memory."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measure, *case).result()


def measure(model: str, way: str, device: str, turns: int, steps: int) -> Case:
    """Measure one case: warm-up, calls of every size, and steps of the announced sizes."""
    import_all()
    import torch
    from torch._inductor import config

    if device == "cpu":
        torch.set_num_threads(1)
        config.compile_threads = 1  # so that compilers are children of this process, whose CPU time is known
    announced, others = ([Size.of(text) for text in texts.split()] for texts in SIZES[model])
    recipe = recipe_of(model, way)
    is_announced = "{announced}" in way
    with _empty_cache():
        session = vivace.load(model, recipe, device=device)
        call, plain = _call(session, steps), _call(vivace.load(model, _UNCOMPILED, device=device), steps)
        warmed = [
            _first_calls(session, call, size) for size in (announced if is_announced else announced[:1])
        ]
        step_s = {}
        if not is_announced and "any" not in way:  # the first size, as if there were no other
            step_s[str(announced[0])] = _turns(call, plain, announced[0], device, turns, steps)
        new = [_first_calls(session, call, size) for size in (*announced, *others)]
        for size in announced:
            if str(size) not in step_s:
                step_s[str(size)] = _turns(call, plain, size, device, turns, steps)
        session.close()
    return {
        "model": model,
        "way": way,
        "recipe": recipe,
        "num_inference_steps": steps,
        "clock": _clock(device).__name__,
        "warmed": warmed,
        "new": new,
        "unannounced": [str(size) for size in others],
        "step_s": step_s,
    }


def _first_calls(session: Session, call: Callable[[Size], None], size: Size) -> Case:
    """Return the seconds of two calls of a size, and how many graphs each compiled."""
    clock = _clock(session.device)
    times: list[float] = []
    graphs = [_graphs(session)]
    for _ in range(2):
        start = clock()
        call(size)
        synchronise(session.device)
        times.append(clock() - start)
        graphs.append(_graphs(session))
    return {
        "size": str(size),
        "first_s": times[0],
        "second_s": times[1],
        "graphs": graphs[1] - graphs[0],
        "graphs_later": graphs[2] - graphs[1],
    }


def _turns(
    call: Callable[[Size], None],
    plain: Callable[[Size], None],
    size: Size,
    device: str,
    turns: int,
    steps: int,
) -> dict[str, list[float]]:
    """Return seconds per step, compiled and not, call by call in turns."""
    clock = _clock(device)
    step_s: dict[str, list[float]] = {"compiled": [], "uncompiled": []}
    for each in (call, plain):
        each(size)
    for turn in range(turns):
        sides = [("compiled", call), ("uncompiled", plain)]
        for name, each in sides if turn % 2 == 0 else sides[::-1]:
            synchronise(device)
            start = clock()
            each(size)
            synchronise(device)
            step_s[name].append((clock() - start) / steps)
    return step_s


def _call(session: Session, steps: int) -> Callable[[Size], None]:
    import torch

    with torch.no_grad():
        inputs = encode(session, [_PROMPT])

    def once(size: Size) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        session(
            **inputs, width=size.width, height=size.height, num_inference_steps=steps,
            output_type="latent", generator=generator,
        )  # fmt: skip

    return once


def _graphs(session: Session) -> int:
    evidence = session.evidence()
    return int(str(evidence.get("compiled_graphs", evidence.get("cuda_graphs_recorded", 0))))


def _clock(device: str) -> Callable[[], float]:
    return cpu_time if device == "cpu" else time.perf_counter


def cpu_time() -> float:
    """Return the seconds of CPU time of this process and its children."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


@contextmanager
def _empty_cache() -> Iterator[None]:
    """Compile everything anew, into a folder that is deleted afterwards."""
    with TemporaryDirectory(prefix="vivace-") as folder:
        folders = {VARIABLE: folder, TRITON_VARIABLE: str(Path(folder) / "triton")}
        with mock.patch.dict("os.environ", folders):
            yield


def ratios(case: Case, size: str) -> list[float]:
    """Return the compiled seconds per step over the uncompiled, for each turn."""
    times = case["step_s"][size]
    return [own / other for own, other in zip(times["compiled"], times["uncompiled"], strict=True)]


def recompiled(case: Case, *, unannounced: bool) -> int:
    """Return how many graphs the calls after the warm-up compiled, at the announced sizes or at the others."""
    return sum(
        entry["graphs"] + entry["graphs_later"]
        for entry in case["new"]
        if (entry["size"] in case["unannounced"]) == unannounced
    )


def line(case: Case) -> str:
    """Describe a case in one line."""
    warm = sum(entry["first_s"] for entry in case["warmed"])
    parts = []
    for size in case["step_s"]:
        interval = median_interval([ratios(case, size)])
        between = "" if interval.low is None else f" [{interval.low:.3f}, {interval.high:.3f}]"
        parts.append(f"{size} {interval.point:.3f}{between}")
    slowest = max(case["new"], key=lambda entry: entry["first_s"])
    return (
        f"{case['model']} {case['way']}: warm-up {seconds(warm)} of {len(case['warmed'])} sizes; then "
        f"{recompiled(case, unannounced=False)} graphs for the announced sizes, "
        f"{recompiled(case, unannounced=True)} for others, the slowest first call {seconds(slowest['first_s'])} "
        f"({slowest['size']}); a step against uncompiled {', '.join(parts)}"
    )


def read_cases(path: Path) -> dict[Key, Case]:
    """Read the cases of a record; empty if there is no such file.

    Raises:
        StoreError: the file holds something else.
    """
    return read_lines(path, line, lambda case: (case["model"], case["way"]))


def _append(record: Path, case: Case) -> None:
    record.parent.mkdir(parents=True, exist_ok=True)
    with record.open("a", encoding="utf-8") as file:
        file.write(json.dumps(case) + "\n")


def _check_device(cases: dict[Key, Case], here: Environment, path: Path) -> None:
    for case in cases.values():
        there = case["environment"]["device_name"]
        if there != here.device_name:
            raise StoreError(
                f"{path} was made on {there}, and this is {here.device_name}; give --record another file"
            )


if __name__ == "__main__":
    raise SystemExit(run(sizes))
