"""What serving costs: the time that HTTP adds to an image, throughput beside calls in a loop, start-up, and memory.

    python -m benchmarks.serving                          tiny-sd on this machine, about four minutes on a CPU
    python -m benchmarks.serving --threads 1              the same, with a core for the worker and one for the rest
    python -m benchmarks.serving --model sdxl --recipe "fused(fp8)+cuda_graph" --record results/serving-h200.json

Blocks of calls of a session in this process and blocks of requests at eight clients follow each other; each pair of
blocks gives one ratio. What HTTP adds is a request's time at the client less the phases that the worker reports.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.command import run
from benchmarks.record_files import write_list
from vivace.measure.environment import environment
from vivace.measure.machine import choose_device
from vivace.report.summary import seconds
from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.stats import median_interval

RECORD = Path(__file__).parents[1] / "results" / "serving-cpu.json"
CLIENTS = 8
_PROMPT = "a red circle above a blue square"
_READY_S = 900.0


class ServingRow(Spec):
    """What serving one recipe costs.

    Attributes:
        ready_s: from the start of the command until /readyz.
        image_s: of calls in a loop, each block's mean.
        added_s: what HTTP adds to an image at one client: median and 95 % interval; `format` is what is sent.
        throughput: images a second at eight clients over those of the loop: geometric mean of the pairs, and interval.
        busy: share of the time at eight clients in which the worker draws: median of the blocks, least and most.
        threads: of the loop and of the worker, as asked.
        rss_bytes_per_1000: slope of the worker's memory over the images, and twice its standard error.
        images: that were requested.
    """

    model: str
    recipe: str
    environment: Environment
    ready_s: float
    image_s: tuple[float, ...]
    format: str
    added_s: tuple[float, float, float]
    throughput: tuple[float, float, float]
    rss_bytes_per_1000: tuple[float, float]
    images: int
    busy: tuple[float, float, float] | None = None
    threads: int | None = None

    @property
    def line(self) -> str:
        added, throughput = self.added_s, self.throughput
        busy = "" if self.busy is None else f", and the worker draws {self.busy[0]:.3f} of the time"
        return (
            f"{self.model}, {self.recipe}: ready in {self.ready_s:.1f} s; HTTP adds {1000 * added[0]:.1f} ms "
            f"[{1000 * added[1]:.1f}, {1000 * added[2]:.1f}] to {seconds(self.image_s[0])}; eight clients get "
            f"{throughput[0]:.3f} [{throughput[1]:.3f}, {throughput[2]:.3f}] of a loop's images a second{busy}; memory "
            f"grows by {self.rss_bytes_per_1000[0] / 1e6:+.2f} +- {self.rss_bytes_per_1000[1] / 1e6:.2f} MB in 1,000 "
            "images"
        )


@contextmanager
def server(model: str, recipe: str, device: str, *more: str) -> Iterator[tuple[str, float]]:
    """Run `vivace serve`; yield its URL and the seconds until it was ready.

    Args:
        more: further options of the command.
    """
    command = [
        sys.executable,
        "-m",
        "vivace",
        "serve",
        model,
        "--recipe",
        recipe,
        "--device",
        device,
        "--port",
        "0",
        *more,
    ]
    began = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        match = None
        while match is None:
            line = process.stderr.readline()
            if not line:
                raise click.ClickException("the server ended")
            match = re.search(r"(http://\S+)/v1 the API", line)
        threading.Thread(target=process.stderr.read, daemon=True).start()
        url = match[1]
        while not _is_ready(url):
            if time.monotonic() - began > _READY_S or process.poll() is not None:
                raise click.ClickException("the server is not ready")
            time.sleep(0.05)
        yield url, time.monotonic() - began
    finally:
        process.kill()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def draw(url: str, seed: int) -> tuple[float, float]:
    """Request one image in WebP; return the seconds at the client, and those that its phases took in the worker."""
    body = json.dumps({"prompt": _PROMPT, "seed": seed, "output_format": "webp"}).encode()
    headers = {"content-type": "application/json", "accept": "image/webp"}
    request = urllib.request.Request(f"{url}/v1/images/generations", body, headers)
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as answer:
        answer.read()
        took = time.perf_counter() - began
        phases = dict(re.findall(r"(\w+);dur=([\d.]+)", answer.headers["server-timing"]))
    return took, sum(float(phases[name]) for name in ("lora", "text", "denoise", "decode")) / 1000


def resident_bytes(url: str) -> float:
    """Return the worker's resident memory after its last image."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        text = answer.read().decode()
    match = re.search(r'vivace_worker_memory_bytes\{kind="rss",worker="1"\} (\S+)', text)
    assert match is not None
    return float(match[1])


def measured(model: str, recipe: str, device: str, pairs: int, block: int, threads: int | None) -> ServingRow:
    """Measure serving one recipe.

    Args:
        threads: of the loop and of the worker, on a CPU; None for as many as each chooses.
    """
    import torch

    import vivace

    if threads is not None:
        torch.set_num_threads(threads)
    more = () if threads is None else ("--threads", str(threads))
    session = vivace.load(model, recipe, device=device)
    added: list[float] = []
    ratios: list[float] = []
    busy: list[float] = []
    images: list[float] = []
    memory: list[tuple[int, float]] = []
    with server(model, recipe, device, *more) as (url, ready_s), ThreadPoolExecutor(CLIENTS) as clients:
        number = 0
        for pair in range(pairs + 1):  # the first is a warm-up
            began = time.perf_counter()
            for seed in range(block):
                session(_PROMPT, generator=torch.Generator("cpu").manual_seed(seed))
            loop_s = (time.perf_counter() - began) / block
            began = time.perf_counter()
            drawn = list(clients.map(lambda seed: draw(url, seed), range(block)))
            served_s = (time.perf_counter() - began) / block
            alone = [draw(url, seed) for seed in range(max(4, block // 4))]
            number += block + len(alone)
            memory.append((number, resident_bytes(url)))
            if pair:
                images.append(loop_s)
                ratios.append(math.log(loop_s / served_s))
                busy.append(math.fsum(of_phases for _, of_phases in drawn) / block / served_s)
                added += [took - of_phases for took, of_phases in alone]
    middle = median_interval([added])
    mean, error = float(np.mean(ratios)), float(np.std(ratios, ddof=1) / math.sqrt(len(ratios)))
    return ServingRow(
        model=model,
        recipe=recipe,
        environment=environment(device),
        ready_s=ready_s,
        image_s=tuple(images),
        format="webp",
        added_s=(middle.point, middle.low or middle.point, middle.high or middle.point),
        throughput=(math.exp(mean), math.exp(mean - 2 * error), math.exp(mean + 2 * error)),
        rss_bytes_per_1000=_slope(memory[1:]),
        images=number,
        busy=(float(np.median(busy)), min(busy), max(busy)),
        threads=threads,
    )


def _slope(points: list[tuple[int, float]]) -> tuple[float, float]:
    """Return bytes per 1,000 images by least squares, and twice the standard error."""
    x, y = np.array(points, dtype=float).T
    x = (x - x.mean()) / 1000
    slope = float(x @ y / (x @ x))
    left = y - y.mean() - slope * x
    error = math.sqrt(float(left @ left) / max(1, len(x) - 2) / float(x @ x))
    return slope, 2 * error


@click.command()
@click.option("--model", default="tiny-sd", show_default=True)
@click.option("--recipe", default="distilled(lcm, steps=4)+tiny_vae", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--pairs", type=click.IntRange(min=3), default=10, show_default=True)
@click.option("--block", type=click.IntRange(min=8), default=64, show_default=True, help="Images of a block.")
@click.option("--threads", type=click.IntRange(min=1), help="CPU threads of the loop and of the worker.")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
def serving(
    model: str, recipe: str, device: str, pairs: int, block: int, threads: int | None, record: Path
) -> int:
    """Measure what serving costs."""
    row: Any = measured(model, recipe, choose_device(device), pairs, block, threads)
    write_list(record, [row.model_dump_json()])
    click.echo(row.line)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(serving))
