"""A server under load for long: memory that does not grow, clients that go away, ten times more than can be drawn.

    python -m benchmarks.serving_soak                     tiny-sd here: 10,000 requests, then 10 and 5 minutes
    python -m benchmarks.serving_soak --requests 2000 --minutes 1
    python -m benchmarks.serving_soak --model sdxl --recipe "bf16+compile" --sizes 1024x1024,832x1216 --loras loras/

The server is `vivace serve`, a process of its own. Requests are of several sizes, numbers of steps, formats and LoRAs;
a tenth is wrong, a tenth are edits, a tenth are streams, and a tenth of the clients goes away. The record is written as
the run goes on. The same command goes on with the requests that are missing, on another run of the server, and with the
parts that are missing.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
import psutil

from benchmarks.command import run
from benchmarks.record_files import read_list, write_list
from benchmarks.serving_process import server
from benchmarks.serving_soak_rows import MemoryPoint, Part, SoakRow
from vivace.foundation.spec.environment import Environment
from vivace.measure.machine import choose_device
from vivace.measure.this_environment import environment

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "results" / "serving-soak.json"
_GENERATIONS, _EDITS = "/v1/images/generations", "/v1/images/edits"
_CLIENTS = 4
_ROUND = 100
"""Requests between two looks at the memory."""
_LEFT = 499
_OVERLOAD = 10
_OVERLOAD_SHARE = 0.5
"""Of the minutes of the clients that go away."""


@dataclass
class Soak:
    """The parts of one recipe on one device."""

    model: str
    recipe: str
    environment: Environment
    record: Path
    sizes: tuple[str, ...]
    loras: Path | None
    rows: list[SoakRow] = field(default_factory=list)

    def of(self, part: Part) -> list[SoakRow]:
        """Return the runs of a part that the record has of this recipe, device and commit."""
        return [
            row for row in self.rows if row.part == part and self._is_own(row) and self._is_of_commit(row)
        ]

    def _is_own(self, row: SoakRow) -> bool:
        own = self.model, self.recipe, self.environment.device_name
        return (row.model, row.recipe, row.environment.device_name) == own

    def _is_of_commit(self, row: SoakRow) -> bool:
        of_row, here = row.environment, self.environment
        return (of_row.vivace, of_row.source_revision) == (here.vivace, here.source_revision)

    @contextlib.contextmanager
    def server(self, *more: str) -> Iterator[Client]:
        options = ["--sizes", ",".join(self.sizes), "--threads", "1", *more]
        if self.loras is not None:
            options += ["--loras", str(self.loras)]
        with server(self.model, self.recipe, self.environment.device, *options) as running:
            yield Client(running.url)

    def keep(self, row: SoakRow) -> None:
        """Write a run to the record, in the place of an earlier state of it, and of runs of other commits."""
        kept = [other for other in self.rows if other.part != row.part or not self._is_own(other)]
        self.rows = [*kept, *(other for other in self.of(row.part) if other.began != row.began), row]
        write_list(self.record, [each.model_dump_json() for each in self.rows])

    def row(self, part: Part, began: str, **fields: Any) -> SoakRow:
        return SoakRow(
            model=self.model,
            recipe=self.recipe,
            environment=self.environment,
            part=part,
            began=began,
            **fields,
        )


@dataclass(frozen=True)
class Client:
    """What clients send to a server."""

    url: str

    def send(self, path: str, body: bytes | None, kind: str = "application/json") -> tuple[int, bytes]:
        request = urllib.request.Request(self.url + path, body, {"content-type": kind})
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return int(answer.status), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def draw(self, fields: dict[str, Any]) -> int:
        return self.send(_GENERATIONS, json.dumps({"prompt": "a red circle", **fields}).encode())[0]

    def edit(self, fields: dict[str, Any]) -> int:
        return self.send(_EDITS, _form(fields), "multipart/form-data; boundary=limit")[0]

    def leave(self, fields: dict[str, Any], seconds: float, part: float = 1.0) -> int:
        """Send a part of a request, and go away."""
        body = json.dumps({"prompt": "a red circle", **fields}).encode()
        place = urlsplit(self.url)
        head = [f"POST {_GENERATIONS} HTTP/1.1", f"host: {place.netloc}", "content-type: application/json"]
        whole = "\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body
        with contextlib.suppress(OSError):
            client = socket.create_connection((str(place.hostname), int(place.port or 80)), timeout=10)
            client.sendall(whole[: max(1, int(part * len(whole)))])
            client.settimeout(max(0.001, seconds))
            with contextlib.suppress(OSError):
                client.recv(1)
            client.close()
        return _LEFT

    def loras(self) -> list[str]:
        """Return those that fit the model."""
        return [str(name) for name in json.loads(self.send("/v1/models", None)[1])["data"][0]["loras"]]

    def metrics(self) -> dict[str, float]:
        lines = self.send("/metrics", None)[1].decode().splitlines()
        return {
            name: float(value)
            for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        }

    def wait_until_idle(self) -> dict[str, float]:
        """Wait until no image is drawn or waits; return the metrics, which must add up."""
        while True:
            metrics = self.metrics()
            states = {name: value for name, value in metrics.items() if name.startswith("vivace_images{")}
            if sum(states.values()) != metrics["vivace_images_accepted_total"]:
                raise click.ClickException(f"the states do not add up to what was accepted: {states}")
            if not any(value for name, value in states.items() if "waiting" in name or "running" in name):
                return metrics
            time.sleep(0.2)

    def point(self, requests: int) -> MemoryPoint:
        """Look at the memory of the server, which this process started, and of its workers."""
        started = psutil.Process().children()
        serving = next(each for each in started if "serve" in each.cmdline())
        workers = serving.children(recursive=True)
        gpu = [value for name, value in self.metrics().items() if re.search(r'memory_bytes\{.*"gpu"', name)]
        return MemoryPoint(
            requests=requests,
            worker_bytes=sum(worker.memory_info().rss for worker in workers),
            server_bytes=serving.memory_info().rss,
            gpu_bytes=int(sum(gpu)) if gpu else None,
        )


def _form(fields: dict[str, Any]) -> bytes:
    from PIL import Image

    picture = io.BytesIO()
    Image.effect_mandelbrot((64, 64), (-2, -1, 1, 1), 20).save(picture, "PNG")
    parts = [
        f'content-disposition: form-data; name="{name}"\r\n\r\n{value}'.encode()
        for name, value in fields.items()
    ]
    head = (
        b'content-disposition: form-data; name="image"; filename="x.png"\r\ncontent-type: image/png\r\n\r\n'
    )
    return (
        b"".join(b"--limit\r\n" + part + b"\r\n" for part in (*parts, head + picture.getvalue()))
        + b"--limit--\r\n"
    )


def restarts(metrics: dict[str, float]) -> int:
    return int(
        sum(value for name, value in metrics.items() if name.startswith("vivace_worker_restarts_total"))
    )


def fields_of(chance: random.Random, sizes: tuple[str, ...], loras: list[str]) -> dict[str, Any]:
    """Return a request of some size, number of steps and format, and perhaps with a LoRA."""
    fields: dict[str, Any] = {
        "seed": chance.randrange(1000),
        "size": chance.choice(sizes),
        "num_inference_steps": chance.choice([1, 2, 3]),
        "output_format": chance.choice(["png", "jpeg", "webp"]),
        "n": chance.choice([1, 1, 1, 2]),
    }
    if loras and chance.random() < 0.4:
        fields["loras"] = [{"name": chance.choice(loras), "scale": chance.choice([0.5, 1.0])}]
    return fields


def request(client: Client, kind: float, fields: dict[str, Any]) -> int:
    """Send one request: `kind` is from 0 to 1 and says which."""
    if kind < 0.1:
        return client.leave({**fields, "num_inference_steps": 20}, 4 * kind)
    if kind < 0.2:
        return client.edit(
            {name: value for name, value in fields.items() if name not in ("loras", "n", "size")}
        )
    if kind < 0.3:
        return client.draw({**fields, "seed": -1})
    if kind < 0.4:
        return client.draw({**fields, "stream": True, "partial_images": 1})
    return client.draw(fields)


def soak_memory(soak: Soak, number: int) -> None:
    """Send requests of every kind, as many as the record lacks."""
    missing = number - sum(row.requests for row in soak.of("memory"))
    if missing <= 0:
        return
    chance = random.Random(number - missing)
    statuses: Counter[str] = Counter()
    points: list[MemoryPoint] = []
    with soak.server("--batch") as client, ThreadPoolExecutor(_CLIENTS) as clients:
        loras = client.loras()
        began, started = _now(), time.monotonic()
        while missing > 0:
            requests = [
                (chance.random(), fields_of(chance, soak.sizes, loras)) for _ in range(min(_ROUND, missing))
            ]
            statuses.update(clients.map(lambda each: str(request(client, *each)), requests))
            missing -= len(requests)
            metrics = client.wait_until_idle()
            points.append(client.point(sum(statuses.values())))
            soak.keep(
                soak.row(
                    "memory",
                    began,
                    seconds=round(time.monotonic() - started, 1),
                    statuses=dict(statuses),
                    points=tuple(points),
                    restarts=restarts(metrics),
                )
            )


def soak_leaving(soak: Soak, seconds: float) -> None:
    """Have clients go away at random beside one that stays."""
    if soak.of("leaving"):
        return
    statuses: Counter[str] = Counter()

    def come_and_go(seed: int) -> None:
        chance = random.Random(seed)
        while time.monotonic() < until:
            fields = {"num_inference_steps": chance.choice([1, 4, 12]), "stream": chance.random() < 0.5}
            part = 1.0 if chance.random() < 0.8 else chance.random()
            statuses[str(client.leave(fields, chance.choice([0.001, 0.02, 0.1, 0.4]), part))] += 1

    with soak.server() as client:
        began, started = _now(), time.monotonic()
        until = started + seconds
        threads = [threading.Thread(target=come_and_go, args=(seed,)) for seed in range(_CLIENTS)]
        for thread in threads:
            thread.start()
        while time.monotonic() < until:
            statuses[str(client.draw({"seed": 1, "num_inference_steps": 2}))] += 1
        for thread in threads:
            thread.join()
        metrics = client.wait_until_idle()
        took = round(time.monotonic() - started, 1)
        soak.keep(
            soak.row("leaving", began, seconds=took, statuses=dict(statuses), restarts=restarts(metrics))
        )


def soak_overload(soak: Soak, seconds: float) -> None:
    """Send ten times as many requests as can be drawn, in a line that holds eight."""
    if soak.of("overload"):
        return
    fields = {"seed": 1, "num_inference_steps": 4}
    with soak.server("--max-queue", "8") as client, ThreadPoolExecutor(64) as clients:
        client.draw(fields)
        began, started = _now(), time.monotonic()
        number = 0
        while number < 10 or time.monotonic() < started + seconds / 10:
            client.draw(fields)
            number += 1
        alone = number / (time.monotonic() - started)
        before, loaded_from = _done(client.metrics()), time.monotonic()
        answers = []
        while (now := time.monotonic()) < loaded_from + seconds:
            answers.append(clients.submit(client.draw, fields))
            time.sleep(max(0.0, loaded_from + len(answers) / (_OVERLOAD * alone) - now))
        loaded = (_done(client.metrics()) - before) / (time.monotonic() - loaded_from)
        statuses = Counter(str(answer.result()) for answer in answers)
        metrics = client.wait_until_idle()
        took = round(time.monotonic() - started, 1)
        row = soak.row("overload", began, seconds=took, statuses=dict(statuses), rates=(alone, loaded))
        soak.keep(row.model_copy(update={"restarts": restarts(metrics)}))


def _done(metrics: dict[str, float]) -> float:
    return metrics['vivace_images{state="done"}']


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime())


@click.command()
@click.option("--model", default="tiny-sd", show_default=True)
@click.option("--recipe", default="tiny_vae", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--sizes", default="64x64,96x64", show_default=True)
@click.option(
    "--loras",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Default: those of tiny-sd, for tiny-sd.",
)
@click.option("--requests", "number", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option(
    "--minutes",
    type=click.FloatRange(min=0.05),
    default=10.0,
    show_default=True,
    help="Of clients that go away; half of it of overload.",
)
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), default=RECORD, show_default=True)
def serving_soak(
    model: str,
    recipe: str,
    device: str,
    sizes: str,
    loras: Path | None,
    number: int,
    minutes: float,
    record: Path,
) -> int:
    """Put load on a server for long."""
    if loras is None and model == "tiny-sd":
        loras = ROOT / "tinyworld" / "loras"
    here = environment(choose_device(device))
    soak = Soak(model, recipe, here, record, tuple(sizes.split(",")), loras, read_list(record, SoakRow))
    parts: dict[Part, Callable[[], None]] = {
        "memory": lambda: soak_memory(soak, number),
        "leaving": lambda: soak_leaving(soak, 60 * minutes),
        "overload": lambda: soak_overload(soak, 60 * minutes * _OVERLOAD_SHARE),
    }
    for part, measure in parts.items():
        measure()
        for row in soak.of(part):
            click.echo("\n".join(row.lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(run(serving_soak))
