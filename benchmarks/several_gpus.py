"""Measure one picture over several GPUs against one GPU, on full-size models with random weights.

    python -m benchmarks.several_gpus --limit-s 400               on 2 GPUs, until the time is over
    python -m benchmarks.several_gpus --gpus 4 --only flux-dev    FLUX.1 [dev] on 4
    python -m benchmarks.several_gpus --profile                   where the time of a step goes on the first GPU
    python -m benchmarks.several_gpus --only-recipe "parallel(ulysses, gpus=2)+compile"    this one alone

Each recipe is measured in processes of its own, at the model's native size and number of steps. A record is added as
soon as it is there, and the same command goes on with what is missing; docs/several-gpus.md is made of them
(`make docs`). FLUX is compiled by its repeated blocks, which takes a fraction of the time of compiling it whole, and
whole, each with and without CUDA graphs; every number of GPUs is compared with one GPU and the same of both, measured
by the same invocation: the next one may meet another machine, and so it measures one GPU anew. SDXL comes with its step
recorded first: that takes seconds, and compiling it cold 100 to 140 s on each GPU. Eager it says little: on one GPU its
step waits for the CPU, however much of it there is to compute.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

import vivace
from benchmarks.command import MEASURED_IN_PART, Measuring, locked, measures, run
from benchmarks.every_model import line, write_records
from benchmarks.every_technique import check_device, full_length, measure, read_records
from vivace.benchmark import studies
from vivace.errors import StoreError
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of
from vivace.spec.recipe import BASELINE
from vivace.spec.record import Outcome, Record
from vivace.techniques.parallel import COPIES

RECORD = Path(__file__).parents[1] / "results" / "several-gpus.json"
PROFILE_STEPS = 4

Key = tuple[str, str]  # model, recipe
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A recipe on several GPUs, and the same on one.

    target: the speed-up over one GPU that is wished for, None where none is said.
    """

    name: str
    alone: str
    mode: str
    gpus: int
    target: float | None

    @property
    def recipe(self) -> str:
        own = f"parallel({self.mode}, gpus={self.gpus})"
        return resolve(own if self.alone == "baseline" else f"{own}+{self.alone}").text


FLUX = (
    ("ulysses", "compile(blocks=repeated)+cuda_graph"),
    ("ring", "compile(blocks=repeated)+cuda_graph"),
    ("ulysses, messages=copies", "compile(blocks=repeated)+cuda_graph"),
    ("ring, messages=copies", "compile(blocks=repeated)+cuda_graph"),
    ("ulysses", "compile(blocks=repeated)"),
    ("ring", "compile(blocks=repeated)"),
    ("ulysses", "compile+cuda_graph"),
    ("ring", "compile+cuda_graph"),
    ("ulysses", "compile"),
    ("ring", "compile"),
)
"""Modes, with how their messages travel, and what else the recipe says. What matters most comes first."""
CACHED = ("ulysses", "teacache(hits=0.5)+compile(blocks=repeated)+cuda_graph")
"""A step cache as well, for which no speed-up is wished: its hits are one GPU's work alone."""
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
    """What matters most comes first. Guidance has two branches, however many GPUs there are."""
    found = [Case("flux-dev", alone, mode, gpus, TARGETS.get(gpus)) for mode, alone in FLUX]
    mode, alone = CACHED
    found.append(Case("flux-dev", alone, mode, gpus, None))
    return found + [Case("sdxl", alone, "guidance", 2, target) for alone, target in UNET]


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
    """One picture over several GPUs against one GPU, one line a recipe; resumable."""
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
            found = measure(name, recipe, steps or full_length(name), how, launcher)
            if found.outcome is not Outcome.MEASURED:
                status = MEASURED_IN_PART
            if found.outcome is not Outcome.UNSUPPORTED:  # on a machine with more GPUs it would be measured
                with locked(record):
                    write_records(record, _with(read_records(record), found, record))
            _say(f"{line(rows_of([found])[0])} ({time.monotonic() - before:.0f} s)")
    return status


def _chosen(among: Sequence[Case], given: Sequence[str]) -> set[str]:
    """The recipes to measure, in full.

    Raises:
        click.UsageError: there is no such recipe.
    """
    known = {text for case in among for text in (resolve(case.alone).text, case.recipe)}
    wanted = {resolve(text).text for text in given}
    if missing := wanted - known:
        raise click.UsageError(
            f"--only-recipe: {', '.join(sorted(missing))} is none of {', '.join(sorted(known))} (with these --gpus "
            "and --only)"
        )
    return wanted or known


def _say(text: str) -> None:
    """At once, also where the output is a pipe."""
    click.echo(text)
    sys.stdout.flush()


def _left(chosen: Sequence[Case], recipes: set[str], records: Sequence[Record]) -> list[tuple[str, str]]:
    """Models and recipes to measure. One GPU is measured again where something is left to be compared with it."""
    done = {_key(record) for record in records if record.outcome.is_final}
    shared = [case for case in chosen if case.recipe in recipes and _several(case) not in done]
    compared = {_one(case) for case in shared}
    wanted = []
    for case in chosen:
        alone = _one(case)
        if alone[1] in recipes and (alone in compared or alone not in done):
            wanted.append(alone)
        if case in shared:
            wanted.append(_several(case))
    return [(source.removeprefix(SYNTHETIC), recipe) for source, recipe in dict.fromkeys(wanted)]


def _key(record: Record) -> Key:
    return record.trial.model.name, record.trial.recipe.text


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


def _added(known: Sequence[T], new: T, key_of: Callable[[T], Key]) -> list[T]:
    """The known ones and a new one, without what it supersedes: of one GPU what nothing is compared with any more."""
    found = [*(old for old in known if not _is_of_several(key_of(new)) or key_of(old) != key_of(new)), new]
    keys = [key_of(one) for one in found]
    return [one for k, one in enumerate(found) if _is_of_several(keys[k]) or _is_compared(k, keys)]


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


@dataclass(frozen=True)
class Profile:
    """Where the time of a step went on the first GPU, milliseconds.

    compute: kernels of its own share. communication: messages (NCCL's kernels, or copies and the kernels that wait for
    the others in front of them) beside which nothing was computed, each as long as the fastest of its kind; waiting:
    what they took beyond that, for data that was not there yet or because there was more of it. idle: nothing ran.
    launch: the part of idle in which the CPU was not waiting for the GPU, but busy with launching what comes next.
    cpu: what the CPU took from the beginning of a step to that of the next, less its waiting for the GPU. Where it is
    as long as the step, the CPU is what bounds it, here or in another process; the profiler itself adds to it.
    """

    model: str
    recipe: str
    gpus: int
    step: float
    compute: float
    communication: float
    waiting: float
    idle: float
    launch: float
    cpu: float


Span = tuple[str, float, float]
"""A kernel's name, start and end, in one unit of time."""


def where_time_goes(
    spans: Sequence[Span], messages: Sequence[str] = ("nccl",)
) -> tuple[float, float, float, float]:
    """Compute, communication, waiting and idle time between the first kernel's start and the last one's end.

    Kernels of several streams may run at the same time: time in which anything was computed counts as compute.

    Args:
        messages: what the name of a message's kernel or copy has in it.
    """

    def is_message(name: str) -> bool:
        return any(part in name.lower() for part in messages)

    sent = [span for span in spans if is_message(span[0])]
    own = _union([(start, end) for name, start, end in spans if not is_message(name)])
    fastest: dict[str, float] = {}
    for name, start, end in sent:
        fastest[name] = min(fastest.get(name, end - start), end - start)
    either = _union([(start, end) for _, start, end in spans])
    total = either[-1][1] - either[0][0]
    compute = _length(own)
    bare = _length(either) - compute
    needed = sum(fastest[name] for name, _, _ in sent)
    took = sum(end - start for _, start, end in sent)
    communication = bare * needed / took if took else 0.0
    return compute, communication, bare - communication, total - _length(either)


def launch_bound(spans: Sequence[Span], waits: Sequence[tuple[float, float]]) -> float:
    """Time without a kernel, between the first one's start and the last one's end, in which the CPU did not wait.

    Args:
        waits: when the CPU waited for the GPU.
    """
    ran = _union([(start, end) for _, start, end in spans])
    gaps = [(before[1], after[0]) for before, after in itertools.pairwise(ran)]
    return _length(gaps) - _shared(gaps, _union(waits))


def cpu_a_step(begins: Sequence[float], waits: Sequence[tuple[float, float]]) -> float:
    """From the beginning of a step to that of the next, less the CPU's waiting for the GPU, on average."""
    first, last = min(begins), max(begins)
    waited = _shared([(first, last)], _union(waits))
    return (last - first - waited) / max(1, len(begins) - 1)


def _shared(one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]) -> float:
    """The length of what two unions have in common."""
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in other)


def _union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def profile_file(record: Path) -> Path:
    """Where the profiles that go with a record lie."""
    return record.with_name(f"{record.stem}-profile.json")


def read_profiles(record: Path) -> list[Profile]:
    path = profile_file(record)
    return [Profile(**item) for item in json.loads(path.read_text())] if path.exists() else []


def _profile(chosen: Sequence[Case], recipes: set[str], record: Path, how: Measuring) -> int:
    wanted = [
        (case.name, recipe, gpus)
        for case in chosen
        if case.alone != "baseline"
        for recipe, gpus in ((resolve(case.alone).text, 1), (case.recipe, case.gpus))
        if recipe in recipes
    ]
    for name, recipe, gpus in dict.fromkeys(wanted):
        if how.is_over:
            return how.ended(f"{name} {recipe}")
        one = profiled(name, recipe, gpus, how.device)
        path = profile_file(record)
        with locked(path):
            known = _added(read_profiles(record), one, lambda profile: (profile.model, profile.recipe))
            path.write_text(json.dumps([asdict(found) for found in known], indent=1) + "\n")
        _say(
            f"{name} {recipe}: {one.step:.1f} ms a step: compute {one.compute:.1f}, communication "
            f"{one.communication:.1f}, waiting {one.waiting:.1f}, idle {one.idle:.1f}, of it while the CPU was "
            f"launching {one.launch:.1f}; CPU {one.cpu:.1f}"
        )
    return 0


def profiled(name: str, recipe: str, gpus: int, device: str) -> Profile:
    """Some steps of a picture under torch.profiler, after the same without."""
    import gc

    import torch
    from torch.profiler import ProfilerActivity

    with vivace.load(SYNTHETIC + name, recipe, device=device) as session:
        _draw_steps(session)
        _draw_steps(session)
        with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
            # The denoiser's steps alone: text encoders come before them, once a picture.
            pipe = session.pipe
            denoiser = pipe.unet if getattr(pipe, "unet", None) is not None else pipe.transformer
            hook = denoiser.register_forward_pre_hook(lambda *_: _mark())
            _draw_steps(session)
            hook.remove()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        traced = _traced(found)
    del session, pipe, denoiser
    gc.collect()
    return _per_step(name, recipe, gpus, traced)


def _draw_steps(session: Any) -> None:
    import torch

    generator = torch.Generator().manual_seed(0)
    session("a red circle", num_inference_steps=PROFILE_STEPS, generator=generator, output_type="latent")


def _mark() -> None:
    """A label in the trace at which a step begins."""
    import torch

    with torch.profiler.record_function("vivace step"):
        pass


@dataclass(frozen=True)
class _Traced:
    """kernels: what ran on the GPU since the first step began; begins: of steps; waits: of the CPU for the GPU."""

    kernels: list[Span]
    begins: list[float]
    waits: list[tuple[float, float]]


def _traced(found: Any) -> _Traced:
    from torch.autograd import DeviceType

    events = found.events()
    # The GPU's own timeline has the same labels.
    begins = [
        event.time_range.start
        for event in events
        if event.name == "vivace step" and event.device_type == DeviceType.CPU
    ]
    kernels = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA
        and not event.is_user_annotation  # labels span the kernels that they are about
        and event.time_range.start >= min(begins)
    ]
    waits = [
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.name.startswith("cuda") and event.name.endswith("Synchronize")
    ]
    return _Traced(kernels, begins, waits)


def _per_step(name: str, recipe: str, gpus: int, traced: _Traced) -> Profile:
    if not traced.kernels:
        raise StoreError("--profile: no kernel of a GPU was seen; it wants a CUDA device")
    messages = ("nccl", "memcpy", "barrier_kernel") if COPIES in recipe else ("nccl",)
    parts = [part / 1e3 / PROFILE_STEPS for part in where_time_goes(traced.kernels, messages)]
    launch = launch_bound(traced.kernels, traced.waits) / 1e3 / PROFILE_STEPS
    cpu = cpu_a_step(traced.begins, traced.waits) / 1e3
    return Profile(name, recipe, gpus, sum(parts), *parts, launch, cpu)


if __name__ == "__main__":
    raise SystemExit(run(several_gpus))
