"""Rows of `benchmarks.serving`: raw samples of each part, and the line that each says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import numpy as np

from vivace.answers.formatting import seconds
from vivace.answers.terminal import table_lines
from vivace.benchmark.load_testing.load_answer import loads_table
from vivace.benchmark.load_testing.load_rows import DONE, LoadRow
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.stats import median_interval, speedup
from vivace.foundation.stats.intervals import Interval

Part = Literal["ready", "killed", "pairs", "loads", "loras", "replicas"]
PARTS: tuple[Part, ...] = get_args(Part)
_WORKER = ("lora", "text", "denoise", "decode")
"""Phases of the worker; queue and encode are the server's."""


class ServingRow(Spec):
    """One part of what serving a recipe costs.

    Attributes:
        part: "ready" is the start; "killed" are images asked for once the worker was killed; "pairs" are calls in a
            loop and requests of eight clients in turn; "loads" is `vivace bench --endpoint`; "loras" are requests with
            one of many LoRAs at random; "replicas" are several GPUs.
        seconds: until /readyz of the first and the second start for "ready"; until the image after each kill, and of
            images before, for "killed"; of each call of the session, by pair, for "pairs".
        phases: seconds of the worker's start by phase, for each start of "ready".
        loads: on the server.
        number: LoRAs, or replicas.
    """

    model: str
    recipe: str
    environment: Environment
    part: Part
    seconds: tuple[tuple[float, ...], ...] = ()
    phases: tuple[dict[str, float], ...] = ()
    loads: tuple[LoadRow, ...] = ()
    number: int = 1

    @property
    def key(self) -> tuple[str, str, str]:
        return self.model, self.environment.device_name, self.part

    @property
    def lines(self) -> list[str]:
        return _LINES[self.part](self)


def span_rate(row: LoadRow) -> float:
    """Return the images a second of a load, from its first request to its last answer."""
    done = sum(outcome == DONE for outcome in row.samples.outcome)
    return done / (max(row.samples.ended_s) - min(row.samples.sent_s))


def added_ms(row: LoadRow, own: Sequence[str] = _WORKER) -> list[float]:
    """Return what HTTP adds to each image: the client's time less that of the phases of its own."""
    phases = [row.samples.phases_ms[name] for name in own if name in row.samples.phases_ms]
    return [
        1000 * (ended - sent) - math.fsum(phase[place] or 0.0 for phase in phases)
        for place, (sent, ended, outcome) in enumerate(
            zip(row.samples.sent_s, row.samples.ended_s, row.samples.outcome, strict=True)
        )
        if outcome == DONE
    ]


def share(loop: Sequence[float], load: LoadRow) -> float:
    """Return the images a second of a load over those of calls in a loop."""
    return span_rate(load) * math.fsum(loop) / len(loop)


def busy_share(row: LoadRow) -> float:
    """Return the share of a load's time in which the worker draws."""
    columns = [row.samples.phases_ms[name] for name in _WORKER if name in row.samples.phases_ms]
    drawn_ms = math.fsum(value for column in columns for value in column if value is not None)
    return drawn_ms / 1000 / (max(row.samples.ended_s) - min(row.samples.sent_s))


def _ready(row: ServingRow) -> list[str]:
    first, second = row.seconds[0]
    lines = [f"ready {first:.1f} s after the first start, {second:.1f} s after the second, with warm caches"]
    if row.phases and row.phases[-1]:
        phases = ", ".join(f"{name} {each:.1f}" for name, each in row.phases[-1].items())
        lines.append(f"its worker: {phases}")
    return lines


def _killed(row: ServingRow) -> list[str]:
    after, usual = row.seconds
    times = ", ".join(f"{each:.1f}" for each in after)
    return [f"the image after its worker was killed: {times} s; {seconds(float(np.median(usual)))} usually"]


def _pairs(row: ServingRow) -> list[str]:
    ratio = speedup(row.seconds, [[1 / span_rate(load)] for load in row.loads])
    image = float(np.median([each for loop in row.seconds for each in loop]))
    busy = float(np.median([busy_share(load) for load in row.loads]))
    return [
        f"eight clients: {_text(ratio)} of the images a second of calls in a loop ({seconds(image)} an image, "
        f"{len(row.loads)} pairs), and the worker draws {busy:.3f} of the time"
    ]


def _loads(row: ServingRow) -> list[str]:
    added = median_interval([added_ms(row.loads[0])])
    others = median_interval([added_ms(row.loads[0], (*_WORKER, "encode"))])
    line = f"HTTP adds {_text(added)} ms to an image, one client; {_text(others)} without encoding"
    return [line, *(line for line, _ in table_lines(loads_table(row.loads)))]


def _loras(row: ServingRow) -> list[str]:
    (load,) = row.loads
    exchanges = [value for value in load.samples.phases_ms.get("lora", ()) if value is not None]
    return [
        f"{row.number} LoRAs at random: {seconds(1 / span_rate(load))} an image, of it "
        f"{float(np.mean(exchanges)):.1f} ms for the exchange ({len(exchanges)} images)"
    ]


def _replicas(row: ServingRow) -> list[str]:
    single, several = row.loads
    return [
        f"{row.number} replicas: {span_rate(several) / span_rate(single):.2f} times the images a second of one, "
        f"at {single.stage.clients} and {several.stage.clients} clients"
    ]


_LINES: dict[Part, Callable[[ServingRow], list[str]]] = {
    "ready": _ready,
    "killed": _killed,
    "pairs": _pairs,
    "loads": _loads,
    "loras": _loras,
    "replicas": _replicas,
}


def _text(interval: Interval) -> str:
    between = "" if interval.low is None else f" [{interval.low:.3g}, {interval.high:.3g}]"
    return f"{interval.point:.3g}{between}"
