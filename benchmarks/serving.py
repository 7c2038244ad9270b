"""What serving costs: start-up, a killed worker, what HTTP adds, throughput beside a loop, goodput, LoRAs, replicas.

    python -m benchmarks.serving                          tiny-sd on this machine, about six minutes on a CPU
    python -m benchmarks.serving --threads 1              the same, with a core for the worker and one for the rest
    python -m benchmarks.serving --model synthetic:flux-dev --recipe "fused(fp8)+cuda_graph" --minutes 4
    python -m benchmarks.serving --model synthetic:sdxl --recipe "bf16+compile" --minutes 1 --num-loras 20 --gpus 2

Each part prints its line and is written to the record at once; the same command goes on with the parts that are
missing. Loads are those of `vivace bench --endpoint`. Calls of a session in this process and requests of eight clients
follow each other in pairs, so that a slow phase of the machine meets both.
"""

from __future__ import annotations

import asyncio
import gc
import re
import tempfile
import time
import urllib.request
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from benchmarks.command import run
from benchmarks.lora import write_random
from benchmarks.record_files import read_list, write_list
from benchmarks.serving_process import RunningServer, server
from benchmarks.serving_rows import PARTS, Part, ServingRow, share
from vivace.benchmark.load_testing.images_endpoint import ImagesEndpoint
from vivace.benchmark.load_testing.load_rows import DONE, LoadRow, LoadStage, RequestSettings, Samples
from vivace.benchmark.load_testing.load_target import LoadTarget, Variant
from vivace.benchmark.load_testing.stages import LoadLimit, LoadPlan, closed_loop, measure
from vivace.foundation.spec.environment import Environment
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment

if TYPE_CHECKING:
    from vivace.runtime.session import Session

RECORD = Path(__file__).parents[1] / "results" / "serving.json"
CLIENTS = 8
_PROMPT = "a red circle above a blue square"
_PAIRS = 3
_KILLS = 3
_SHARES = {"pairs": 0.4, "loads": 0.5, "loras": 0.1, "replicas": 0.15}
"""Of the minutes, by part; starts and loading come on top."""
_RANK = 16
_SETTINGS = RequestSettings(
    model=None, fields={"output_format": "webp"}, variants=((None, None),), prompts_sha256=""
)


@dataclass
class Serving:
    """The measurement of one recipe on one device, part by part."""

    model: str
    recipe: str
    environment: Environment
    record: Path
    minutes: float
    threads: int | None = None
    rows: dict[tuple[str, str, str], ServingRow] = field(default_factory=dict)
    parts: tuple[Part, ...] = PARTS
    """That are measured."""
    began: float = field(default_factory=time.monotonic)

    def part(self, part: Part) -> ServingRow | None:
        """Return what the record has of a part, if it is of the same recipe."""
        row = self.rows.get((self.model, self.environment.device_name, part))
        return row if row is not None and row.recipe == self.recipe else None

    def keep(
        self,
        part: Part,
        *,
        seconds: tuple[tuple[float, ...], ...] = (),
        phases: tuple[dict[str, float], ...] = (),
        loads: tuple[LoadRow, ...] = (),
        number: int = 1,
    ) -> None:
        """Write a part to the record, and print its line."""
        row = ServingRow(
            model=self.model,
            recipe=self.recipe,
            environment=self.environment,
            part=part,
            seconds=seconds,
            phases=phases,
            loads=loads,
            number=number,
        )
        self.rows[row.key] = row
        write_list(self.record, [each.model_dump_json() for each in self.rows.values()])
        for line in row.lines:
            click.echo(line)
        click.echo(f"{part} after {time.monotonic() - self.began:.0f} s", err=True)

    def seconds_of(self, part: Part) -> float:
        return 60 * self.minutes * _SHARES[part]

    @property
    def options(self) -> tuple[str, ...]:
        """Of each server."""
        return () if self.threads is None else ("--threads", str(self.threads))

    def is_missing(self, *parts: Part) -> bool:
        """Return whether one of the parts is to be measured."""
        return any(part in self.parts and self.part(part) is None for part in parts)


def target_of(url: str, *, loras: tuple[str, ...] = ()) -> LoadTarget:
    variants = tuple(Variant(None, lora) for lora in loras) or (Variant(),)
    return LoadTarget(ImagesEndpoint(f"{url}/v1"), None, {"output_format": "webp"}, (_PROMPT,), variants)


def closed(target: LoadTarget, clients: int, limit: LoadLimit, label: str, seed: int = 0) -> LoadRow:
    """Return a closed loop as a row."""
    samples: Samples = asyncio.run(closed_loop(target, clients, limit, seed, lambda number, seconds: None))
    variants = tuple((variant.size, variant.lora) for variant in target.variants)
    return LoadRow(
        label=label,
        request=_SETTINGS.model_copy(update={"variants": variants}),
        server={},
        client={},
        began=time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        stage=LoadStage(kind="closed", clients=clients),
        samples=samples,
    )


def release(device: str) -> None:
    """Give back the memory of a session that is gone."""
    import torch

    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def measure_killed(serving: Serving, running: RunningServer, target: LoadTarget) -> None:
    """Measure how long the next image takes after the worker was killed, again and again."""

    def image_s() -> float:
        samples = closed(target, 1, LoadLimit(1), serving.model).samples
        if samples.outcome[0] != DONE:
            raise click.ClickException(f"an image was not drawn: {samples.outcome[0]}")
        return samples.ended_s[0] - samples.sent_s[0]

    image_s()
    usual = tuple(image_s() for _ in range(_KILLS))
    after = []
    for _ in range(_KILLS):
        running.kill_worker()
        after.append(image_s())
    serving.keep("killed", seconds=(tuple(after), usual))


def measure_pairs(serving: Serving, session: Session, target: LoadTarget) -> None:
    """Measure calls in a loop and requests of eight clients in turn; the first of both are a warm-up."""
    import torch

    def loop(number: int) -> tuple[float, ...]:
        times = []
        for seed in range(number):
            began = time.perf_counter()
            session(_PROMPT, generator=torch.Generator("cpu").manual_seed(seed))
            times.append(time.perf_counter() - began)
        return tuple(times)

    image_s = loop(2)[-1]
    closed(target, 1, LoadLimit(2), serving.model)
    block = max(CLIENTS, min(64, round(serving.seconds_of("pairs") / (1.5 * _PAIRS * image_s))))
    seconds, loads = [], []
    for pair in range(_PAIRS):
        seconds.append(loop(max(3, block // 2)))
        loads.append(closed(target, CLIENTS, LoadLimit(block), serving.model, pair))
        click.echo(f"pair {pair + 1} of {_PAIRS}: {share(seconds[-1], loads[-1]):.3f}", err=True)
    serving.keep("pairs", seconds=tuple(seconds), loads=tuple(loads))


def measure_loads(serving: Serving, target: LoadTarget) -> None:
    """Measure one client, and users at fractions of the capacity, which the pairs have measured already."""
    pairs = serving.part("pairs")
    if pairs is None:
        raise click.ClickException("loads are fractions of what the pairs measure; add pairs to --parts")
    plan = LoadPlan(clients=(CLIENTS,), minutes=serving.seconds_of("loads") / 60)
    rows = measure(
        target,
        plan,
        serving.model,
        _SETTINGS,
        pairs.loads[:1],
        lambda row: None,
        lambda stage, number, seconds: None,
    )
    serving.keep("loads", loads=tuple(rows))


def measure_server(serving: Serving) -> None:
    """Measure the start, the pairs and the loads of one replica."""
    import vivace

    device = serving.environment.device
    starts = []
    if serving.is_missing("ready"):
        with server(serving.model, serving.recipe, device, *serving.options) as first:
            starts.append(first)  # it fills the caches of compilers
    with server(serving.model, serving.recipe, device, *serving.options) as running:
        starts.append(running)
        if serving.is_missing("ready"):
            serving.keep(
                "ready",
                seconds=(tuple(start.seconds for start in starts),),
                phases=tuple(start.phases for start in starts),
            )
        target = target_of(running.url)
        if serving.is_missing("killed"):
            measure_killed(serving, running, target)
        if serving.is_missing("pairs"):
            session = vivace.load(serving.model, serving.recipe, device=device)
            session.pipe.set_progress_bar_config(disable=True)
            measure_pairs(serving, session, target)
            del session
            release(device)
        if serving.is_missing("loads"):
            measure_loads(serving, target)


def measure_loras(serving: Serving, number: int) -> None:
    """Measure requests of one client with one of many LoRAs at random."""
    from vivace.runtime.memory.weightless import find_weightless

    device = serving.environment.device
    pipe = find_weightless(serving.model).build()  # its layers' shapes are all that is needed
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(number):
            write_random(pipe, Path(folder) / f"random-{seed}.safetensors", _RANK, seed)
        names = tuple(f"random-{seed}" for seed in range(number))
        with server(serving.model, serving.recipe, device, "--loras", folder, *serving.options) as running:
            target = target_of(running.url, loras=names)
            closed(target, 2, LoadLimit(2), serving.model)  # a warm-up
            # Two clients: one alone takes the LoRAs in turn, and these are to come at random.
            limit = LoadLimit(seconds=serving.seconds_of("loras"), least=8)
            serving.keep("loras", loads=(closed(target, 2, limit, serving.model),), number=number)


def measure_replicas(serving: Serving, number: int) -> None:
    """Measure several GPUs, one replica on each, beside the one of the pairs."""
    pairs = serving.part("pairs")
    if pairs is None:
        raise click.ClickException("replicas are compared with the pairs; add pairs to --parts")
    gpus = ",".join(map(str, range(number)))
    with server(serving.model, serving.recipe, serving.environment.device, "--gpus", gpus) as running:
        while _num_up(running.url) < number:
            time.sleep(0.1)
        target = target_of(running.url)
        closed(target, CLIENTS * number, LoadLimit(CLIENTS * number), serving.model)  # a warm-up
        limit = LoadLimit(seconds=serving.seconds_of("replicas"), least=4 * CLIENTS * number)
        load = closed(target, CLIENTS * number, limit, serving.model)
        serving.keep("replicas", loads=(pairs.loads[-1], load), number=number)


def _num_up(url: str) -> int:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        return len(re.findall(r"(?m)^vivace_worker_up\{[^}]*\} 1\.0$", answer.read().decode()))


def _parts(text: str) -> tuple[Part, ...]:
    names = text.split(",")
    if wrong := [name for name in names if name not in PARTS]:
        raise click.BadParameter(
            f"{wrong[0]!r} is no part; there are: {', '.join(PARTS)}", param_hint="--parts"
        )
    return tuple(part for part in PARTS if part in names)


@click.command()
@click.option("--model", default="tiny-sd", show_default=True)
@click.option("--recipe", default="distilled(lcm, steps=4)+tiny_vae", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.5),
    default=5.0,
    show_default=True,
    help="Of drawing; starts and loading come on top.",
)
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of the loop and of the worker.")
@click.option("--num-loras", type=click.IntRange(min=0), default=0, show_default=True, help="Random ones.")
@click.option("--gpus", type=click.IntRange(min=1), default=1, show_default=True, help="Replicas to measure.")
@click.option(
    "--parts", default=",".join(PARTS), show_default=True, help="To measure; what the record has is left out."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
@click.option("--rerun", is_flag=True, help="Measure again what the record has.")
def serving(
    model: str,
    recipe: str,
    device: str,
    minutes: float,
    threads: int | None,
    num_loras: int,
    gpus: int,
    parts: str,
    record: Path,
    rerun: bool,
) -> int:
    """Measure what serving costs."""
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    here = environment(choose_device(device))
    rows = {row.key: row for row in read_list(record, ServingRow)}
    measured = Serving(model, recipe, here, record, minutes, threads, rows, _parts(parts))
    if rerun:
        dropped = [key for key in rows if key[:2] == (model, here.device_name) and key[2] in measured.parts]
        measured = replace(measured, rows={key: row for key, row in rows.items() if key not in dropped})
    if measured.is_missing("ready", "killed", "pairs", "loads"):
        measure_server(measured)
    if num_loras and measured.is_missing("loras"):
        measure_loras(measured, num_loras)
    if gpus > 1 and measured.is_missing("replicas"):
        measure_replicas(measured, gpus)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(serving))
