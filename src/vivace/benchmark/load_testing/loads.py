"""The two loads: a closed loop of clients, and users who come at random.

In a closed loop each client sends its next request when its last one has ended, so a slow server gets fewer: right
for throughput, wrong for the latency of users, who come whether or not the server is behind. Poisson arrivals are
therefore due at times that are fixed before the first request, and latency counts from then, also where the request
left later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vivace.benchmark.load_testing.load_rows import DONE, Samples
from vivace.benchmark.load_testing.load_target import LoadTarget
from vivace.benchmark.load_testing.sending import RequestOutcome, send

MOST_IN_FLIGHT = 900
"""Most requests at a time: a process may commonly open 1,024 files. Further users count as "not sent"."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0

Progress = Callable[[int, float], None]
"""Called with the requests that have ended, and the seconds since the load began."""


@dataclass(frozen=True)
class LoadLimit:
    """When a load sends its last request: after so many, or so many seconds, but not before `least`."""

    num_requests: int | None = None
    seconds: float | None = None
    least: int = 1

    def allows(self, number: int, elapsed_s: float) -> bool:
        """Return whether request `number`, from 0, is sent at this time."""
        if self.num_requests is not None and number >= self.num_requests:
            return False
        return number < self.least or self.seconds is None or elapsed_s < self.seconds


@dataclass
class _Recording:
    """Requests as they end."""

    target: LoadTarget
    progress: Progress
    began: float = field(default_factory=time.perf_counter)
    rows: list[tuple[float, float, RequestOutcome, int]] = field(default_factory=list)

    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    async def send(
        self, number: int, due_s: float | None, order: random.Random, *, cycles: bool
    ) -> RequestOutcome:
        place, body = self.target.request(number, order, cycles=cycles)
        sent_s = self.elapsed()
        outcome = await send(self.target, body)
        self.add(sent_s if due_s is None else due_s, sent_s, outcome, place)
        return outcome

    def add(self, due_s: float, sent_s: float, outcome: RequestOutcome, place: int) -> None:
        self.rows.append((due_s, sent_s, outcome, place))
        self.progress(len(self.rows), self.elapsed())

    async def samples(self) -> Samples:
        """Return the requests as they were due, once all images have been looked at."""
        rows = sorted(self.rows, key=lambda row: row[0])
        kinds = [await outcome.checked() for _, _, outcome, _ in rows]
        phases = [outcome.phases_ms for _, _, outcome, _ in rows]
        names = sorted({name for of in phases for name in of})
        return Samples(
            due_s=tuple(round(row[0], 5) for row in rows),
            sent_s=tuple(round(row[1], 5) for row in rows),
            ended_s=tuple(round(row[2].ended - self.began, 5) for row in rows),
            outcome=tuple(kinds),
            variant=tuple(row[3] for row in rows),
            phases_ms={name: tuple(of.get(name) for of in phases) for name in names},
        )


async def closed_loop(
    target: LoadTarget, clients: int, limit: LoadLimit, seed: int | str, progress: Progress
) -> Samples:
    """Run clients that each wait for their image. One client alone takes the variants in turn."""
    recording = _Recording(target, progress)
    order = random.Random(seed)
    number = 0

    async def client() -> None:
        nonlocal number
        while limit.allows(number, recording.elapsed()):
            number += 1
            outcome = await recording.send(number - 1, None, order, cycles=clients == 1)
            if outcome.kind != DONE:  # a busy server, or none, must not be asked a thousand times a second
                await asyncio.sleep(min(_LONGEST_PAUSE_S, outcome.retry_after_s or _PAUSE_S))

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(client())
    return await recording.samples()


def poisson_arrivals(rate: float, limit: LoadLimit, seed: int | str) -> list[float]:
    """Return the seconds at which users come, at random and `rate` a second on average."""
    random_ = random.Random(seed)
    arrivals: list[float] = []
    due_s = random_.expovariate(rate)
    while limit.allows(len(arrivals), due_s):
        arrivals.append(due_s)
        due_s += random_.expovariate(rate)
    return arrivals


async def poisson(
    target: LoadTarget, rate: float, limit: LoadLimit, seed: int | str, progress: Progress
) -> Samples:
    """Let users come at random, whether or not earlier ones have their images."""
    recording = _Recording(target, progress)
    order = random.Random(seed)
    in_flight: set[asyncio.Task[RequestOutcome]] = set()
    async with asyncio.TaskGroup() as group:
        for number, due_s in enumerate(poisson_arrivals(rate, limit, seed)):
            await asyncio.sleep(due_s - recording.elapsed())
            if len(in_flight) >= MOST_IN_FLIGHT:
                recording.add(due_s, due_s, RequestOutcome("not sent", time.perf_counter(), {}), 0)
                continue
            task = group.create_task(recording.send(number, due_s, order, cycles=False))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    return await recording.samples()
