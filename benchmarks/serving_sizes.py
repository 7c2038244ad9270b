"""How long small images wait beside large ones: percentiles of latency at Poisson arrivals, for two orders of the line.

    python -m benchmarks.serving_sizes             tiny-sd on this machine, about three minutes on a CPU

Requests of two sizes arrive at a share of what the worker can draw. The same arrivals are sent to two servers one after
the other: with the line as it is, short images first with a bound on their age, and in the order of arrival.
"""

from __future__ import annotations

import json
import random
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import uvicorn

from benchmarks.command import run
from benchmarks.record_files import write_list
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.sizes import Size
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment
from vivace.serve.http.app import create_app
from vivace.serve.queue.jobs import ImageJob, JobQueue
from vivace.serve.queue.process import Workers
from vivace.serve.settings import ServeSettings

RECORD = Path(__file__).parents[1] / "results" / "serving-sizes-cpu.json"
_PROMPT = "a red circle above a blue square"
_READY_S = 900.0


class SizesRow(Spec):
    """Latencies of one order of the line.

    Attributes:
        order: "short first" or "arrival".
        load: requested seconds of drawing for each second.
        alone_s: of a small and of a large image alone.
        small_s, large_s: latencies in the order of arrival.
    """

    model: str
    recipe: str
    environment: Environment
    order: str
    load: float
    sizes: tuple[str, str]
    alone_s: tuple[float, float]
    small_s: tuple[float, ...]
    large_s: tuple[float, ...]

    @property
    def line(self) -> str:
        def percentiles(seconds: tuple[float, ...]) -> str:
            return ", ".join(f"p{q} {float(np.percentile(seconds, q)):.2f} s" for q in (50, 95, 99))

        return (
            f"{self.order}: {self.sizes[0]} ({len(self.small_s)}, alone {self.alone_s[0]:.2f} s) "
            f"{percentiles(self.small_s)}; {self.sizes[1]} ({len(self.large_s)}, alone {self.alone_s[1]:.2f} s) "
            f"{percentiles(self.large_s)}, at {self.load:.0%} load"
        )


class _ByArrival(JobQueue):
    """A line in the order of arrival, to compare with."""

    def _next(self, lora: str | None) -> ImageJob:
        return min(self._jobs, key=lambda job: job.accepted_at)


@contextmanager
def server(settings: ServeSettings, *, by_arrival: bool) -> Iterator[str]:
    """Run a server in this process; yield its URL once it is ready."""

    app = create_app(settings, Workers(settings))
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until = time.monotonic() + _READY_S
    while not (running.started and app.state.pool.is_ready):
        if time.monotonic() > until or not thread.is_alive():
            raise click.ClickException("the server is not ready")
        time.sleep(0.05)
    if by_arrival:
        app.state.pool.line.__class__ = _ByArrival
    yield f"http://127.0.0.1:{running.servers[0].sockets[0].getsockname()[1]}"
    running.should_exit = True
    thread.join()


def draw(url: str, size: str, seed: int) -> float:
    """Request an image; return the seconds until it came."""
    body = json.dumps({"prompt": _PROMPT, "seed": seed, "size": size, "output_format": "jpeg"}).encode()
    headers = {"content-type": "application/json", "accept": "image/jpeg"}
    began = time.perf_counter()
    request = urllib.request.Request(f"{url}/v1/images/generations", body, headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
    return time.perf_counter() - began


def arrivals(number: int, rate: float, share: float) -> list[tuple[float, bool]]:
    """Return when requests come, in seconds, and whether each is a large one: the same for each order."""
    chance = random.Random(3)
    now, made = 0.0, []
    for _ in range(number):
        now += chance.expovariate(rate)
        made.append((now, chance.random() < share))
    return made


def latencies(url: str, sizes: tuple[str, str], requests: list[tuple[float, bool]]) -> list[float]:
    """Send requests when they are due; return the latency of each."""
    began = time.monotonic()
    with ThreadPoolExecutor(64) as clients:
        sent = []
        for seed, (due, is_large) in enumerate(requests):
            time.sleep(max(0.0, began + due - time.monotonic()))
            sent.append(clients.submit(draw, url, sizes[is_large], seed))
        return [each.result() for each in sent]


def measured(
    model: str, recipe: str, device: str, sizes: tuple[Size, Size], number: int, load: float, share: float
) -> list[SizesRow]:
    """Measure both orders."""
    settings = ServeSettings(
        model=model, recipe=recipe, device=device, threads=1, sizes=sizes, max_queue=10_000, max_wait_s=1e6
    )
    names = (str(sizes[0]), str(sizes[1]))
    rows = []
    requests: list[tuple[float, bool]] = []
    for by_arrival in (False, True):
        with server(settings, by_arrival=by_arrival) as url:
            small, large = (float(np.median([draw(url, name, seed) for seed in range(7)])) for name in names)
            if not requests:
                requests = arrivals(number, load / (share * large + (1 - share) * small), share)
            took = latencies(url, names, requests)
        rows.append(
            SizesRow(
                model=model,
                recipe=recipe,
                environment=environment(device),
                order="arrival" if by_arrival else "short first",
                load=load,
                sizes=names,
                alone_s=(small, large),
                small_s=tuple(s for s, (_, is_large) in zip(took, requests, strict=True) if not is_large),
                large_s=tuple(s for s, (_, is_large) in zip(took, requests, strict=True) if is_large),
            )
        )
    return rows


@click.command()
@click.option("--model", default="tiny-sd", show_default=True)
@click.option("--recipe", default="distilled(lcm, steps=4)+tiny_vae", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--small", default="64x64", show_default=True)
@click.option("--large", default="256x256", show_default=True)
@click.option("--requests", "number", type=click.IntRange(min=20), default=300, show_default=True)
@click.option("--load", type=click.FloatRange(0.1, 0.99), default=0.8, show_default=True)
@click.option(
    "--share", type=click.FloatRange(0.01, 0.99), default=0.2, show_default=True, help="Of large ones."
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
def serving_sizes(
    model: str,
    recipe: str,
    device: str,
    small: str,
    large: str,
    number: int,
    load: float,
    share: float,
    record: Path,
) -> int:
    """Measure how long small images wait beside large ones."""
    sizes = Size.of(small), Size.of(large)
    rows = measured(model, recipe, choose_device(device), sizes, number, load, share)
    write_list(record, [row.model_dump_json() for row in rows])
    for row in rows:
        click.echo(row.line)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(serving_sizes))
