"""The order of the loads: a warm-up, one client, closed loops, and users at fractions of the capacity.

The capacity is the highest throughput of the closed loops. The SLO is a multiple of the latency of one client alone, as
is the convention (three times), for each size by itself.
"""

from __future__ import annotations

import asyncio
import platform
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import httpx2

from vivace.benchmark.load_testing.images_endpoint import run_async
from vivace.benchmark.load_testing.load_rows import (
    DONE,
    LoadRow,
    LoadStage,
    RequestSettings,
    Samples,
    figures_of,
    key_of,
    lone_latencies,
    throughput,
)
from vivace.benchmark.load_testing.load_target import LoadTarget, RequestOutcome, send
from vivace.errors import Unsupported

MOST_IN_FLIGHT = 900
"""Most requests at a time: a process may commonly open 1,024 files. Further users count as "not sent"."""
_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 5.0
Progress = Callable[[int, float], None]
"""Called with the requests that have ended, and the seconds since the load began."""


# In a closed loop each client sends its next request when its last one has ended, so a slow server gets fewer: right
# for throughput, wrong for the latency of users, who come whether or not the server is behind. Poisson arrivals are
# therefore due at times that are fixed before the first request, and latency counts from then, also where the request
# left later.
@dataclass(frozen=True)
class LoadLimit:
    """When a load sends its last request: after so many, or so many seconds, but not before `least`."""

    num_requests: int | None = None
    seconds: float | None = None
    least: int = 1

    def allows(self, number: int, elapsed_s: float) -> bool:
        if self.num_requests is not None and number >= self.num_requests:
            return False
        return number < self.least or self.seconds is None or elapsed_s < self.seconds


@dataclass
class _Recording:
    target: LoadTarget
    client: httpx2.AsyncClient
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
        outcome = await send(self.target, self.client, body)
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
    order = random.Random(seed)
    number = 0

    async def client() -> None:
        nonlocal number
        while limit.allows(number, recording.elapsed()):
            number += 1
            outcome = await recording.send(number - 1, None, order, cycles=clients == 1)
            if outcome.kind != DONE:  # a busy server, or none, must not be asked a thousand times a second
                await asyncio.sleep(min(_LONGEST_PAUSE_S, outcome.retry_after_s or _PAUSE_S))

    async with target.endpoint.client() as opened:
        recording = _Recording(target, opened, progress)
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
    order = random.Random(seed)
    in_flight: set[asyncio.Task[RequestOutcome]] = set()
    async with target.endpoint.client() as client, asyncio.TaskGroup() as group:
        recording = _Recording(target, client, progress)
        for number, due_s in enumerate(poisson_arrivals(rate, limit, seed)):
            await asyncio.sleep(due_s - recording.elapsed())
            if len(in_flight) >= MOST_IN_FLIGHT:
                recording.add(due_s, due_s, RequestOutcome("not sent", time.perf_counter()), 0)
                continue
            task = group.create_task(recording.send(number, due_s, order, cycles=False))
            in_flight.add(task)
            task.add_done_callback(in_flight.discard)
    return await recording.samples()


_LEAST_REQUESTS = 6
_WARM_UPS = 2
_LONE = LoadStage(kind="closed", clients=1)


@dataclass(frozen=True)
class LoadPlan:
    """The loads to measure.

    Attributes:
        clients: closed loops; that of one client comes first, whether or not it is named.
        fractions: of the capacity at which users come.
        num_requests: of each load; None for as many as the minutes allow.
        minutes: of all loads together; None without a limit.
        slo_factor: times the latency of one client; `slo_s` in its place where it is given.
        seed: of arrivals, seeds and variants.
        repeats: independent loads of each kind, one after the other.
    """

    clients: tuple[int, ...] = (8,)
    fractions: tuple[float, ...] = (0.5, 0.8, 0.95)
    num_requests: int | None = None
    minutes: float | None = 5.0
    slo_factor: float = 3.0
    slo_s: float | None = None
    seed: int = 0
    repeats: int = 1

    @property
    def stages(self) -> list[LoadStage]:
        closed = [LoadStage(kind="closed", clients=number) for number in self.clients if number != 1]
        once = [_LONE, *closed, *(LoadStage(kind="poisson", fraction=each) for each in self.fractions)]
        return [stage.model_copy(update={"repeat": k}) for k in range(self.repeats) for stage in once]


def measure(
    target: LoadTarget,
    plan: LoadPlan,
    label: str,
    settings: RequestSettings,
    kept: Sequence[LoadRow],
    report: Callable[[LoadRow], None],
    progress: Callable[[LoadStage, int, float], None],
) -> list[LoadRow]:
    """Return the rows of a plan, including those of earlier runs, which are not measured again; `report` is called with
    each new row."""
    earlier = {row.key: row for row in kept}
    rows: list[LoadRow] = []
    left = [stage for stage in plan.stages if key_of(label, settings, stage) not in earlier]
    until = None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    least = min(_LEAST_REQUESTS, plan.num_requests or _LEAST_REQUESTS)
    if left:
        run_async(_warm_up(target))
    for stage in plan.stages:
        row = earlier.get(key_of(label, settings, stage))
        if row is not None:
            rows.append(row)
            continue
        seconds = None if until is None else max(0.0, until - time.monotonic()) / len(left)
        left.remove(stage)
        rate = None if stage.fraction is None else stage.fraction * capacity(rows)
        limit = LoadLimit(plan.num_requests, seconds, least)
        seed = f"{plan.seed}, {stage.name}" + (f", {stage.repeat}" if stage.repeat else "")
        show = partial(progress, stage)
        began = datetime.now(UTC).isoformat(timespec="seconds")
        if rate is None:
            samples = run_async(closed_loop(target, stage.clients or 1, limit, seed, show))
        else:
            samples = run_async(poisson(target, rate, limit, seed, show))
        row = LoadRow(
            label=label,
            request=settings,
            server=target.entry,
            client={
                "platform": f"{platform.system()} {platform.machine()}",
                "python": platform.python_version(),
            },
            began=began,
            stage=stage,
            rate=rate,
            samples=samples,
        )
        if stage == _LONE and DONE not in samples.outcome:
            errors = dict(figures_of(row).errors)
            raise Unsupported(f"{target.endpoint.url} drew no image for one client: {errors}")
        rows.append(row.model_copy(update={"slo_s": _slo(plan, settings, [*rows, row])}))
        report(rows[-1])
    return rows


def capacity(rows: Sequence[LoadRow]) -> float:
    """Return the highest throughput of the first closed loops, images a second.

    One in which a request failed is none: its clients paused then, and a refusal takes less time than an image.
    """
    closed = [row for row in rows if row.stage.kind == "closed" and row.stage.repeat == 0]
    rates = [throughput(row) for row in closed if set(row.samples.outcome) == {DONE}]
    if not rates:
        raise Unsupported(
            "requests failed in every closed loop, so the capacity is not known, of which users would come at a "
            "fraction; give --fractions none, or fewer --clients"
        )
    return max(rates)


def _slo(plan: LoadPlan, settings: RequestSettings, rows: Sequence[LoadRow]) -> tuple[float, ...]:
    if plan.slo_s is not None:
        return (plan.slo_s,) * len(settings.variants)
    lone = next((row for row in rows if row.stage == _LONE), None)
    return () if lone is None else tuple(plan.slo_factor * each for each in lone_latencies(lone))


async def _warm_up(target: LoadTarget) -> None:
    order = random.Random("warm-up")
    sizes = {variant.size: variant for variant in target.variants}
    async with target.endpoint.client() as client:
        for variant in sizes.values():
            alone = replace(target, variants=(variant,))
            for number in range(_WARM_UPS):
                _, body = alone.request(number, order, cycles=True)
                outcome = await send(alone, client, body)
                if (kind := await outcome.checked()) != DONE:
                    words = f"{kind}: {outcome.message}" if outcome.message else kind
                    key = "; give --api-key-file FILE" if outcome.status in (401, 403) else ""
                    raise Unsupported(f"{target.endpoint.url} draws no image ({words}){key}")
