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
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from vivace.benchmark.load_testing.load_figures import figures_of, lone_latencies, throughput
from vivace.benchmark.load_testing.load_rows import DONE, LoadRow, LoadStage, RequestSettings, Samples, key_of
from vivace.benchmark.load_testing.load_target import LoadTarget
from vivace.benchmark.load_testing.loads import LoadLimit, Progress, closed_loop, poisson
from vivace.benchmark.load_testing.sending import send
from vivace.errors import Unsupported

_LEAST_REQUESTS = 6
_WARM_UPS = 2
_LONE = LoadStage(kind="closed", clients=1)

Report = Callable[[LoadRow], None]


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
    report: Report,
    progress: Callable[[LoadStage, int, float], None],
) -> list[LoadRow]:
    """Return the rows of a plan, including stored ones.

    Args:
        kept: rows of earlier runs; what they hold is not measured again.
        report: called with each row that is measured.
        progress: called with the load, its requests that have ended, and its seconds.

    Raises:
        Unsupported: the server draws nothing.
    """
    earlier = {row.key: row for row in kept}
    rows: list[LoadRow] = []
    left = [stage for stage in plan.stages if key_of(label, settings, stage) not in earlier]
    until = None if plan.minutes is None else time.monotonic() + 60 * plan.minutes
    if left:
        asyncio.run(_warm_up(target))
    for stage in plan.stages:
        row = earlier.get(key_of(label, settings, stage))
        if row is None:
            seconds = None if until is None else max(0.0, until - time.monotonic()) / len(left)
            left.remove(stage)
            row = _measured(target, plan, label, settings, stage, rows, seconds, progress)
            report(row)
        rows.append(row)
    return rows


def _measured(
    target: LoadTarget,
    plan: LoadPlan,
    label: str,
    settings: RequestSettings,
    stage: LoadStage,
    before: Sequence[LoadRow],
    seconds: float | None,
    progress: Callable[[LoadStage, int, float], None],
) -> LoadRow:
    rate = None if stage.fraction is None else stage.fraction * capacity(before)
    limit = LoadLimit(plan.num_requests, seconds, min(_LEAST_REQUESTS, plan.num_requests or _LEAST_REQUESTS))
    row = LoadRow(
        label=label,
        request=settings,
        server=target.entry,
        client={
            "platform": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
        },
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        stage=stage,
        rate=rate,
        slo_s=_slo(plan, settings, before),
        samples=Samples(),
    )

    def report(number: int, elapsed_s: float) -> None:
        progress(stage, number, elapsed_s)

    seed = f"{plan.seed}, {stage.name}" + (f", {stage.repeat}" if stage.repeat else "")
    samples = asyncio.run(_load(target, stage, rate, limit, seed, report))
    row = row.model_copy(update={"samples": samples})
    if stage == _LONE:
        if DONE not in samples.outcome:
            raise Unsupported(f"{target.url} drew no image for one client: {dict(figures_of(row).errors)}")
        row = row.model_copy(update={"slo_s": _slo(plan, settings, [row])})
    return row


async def _load(
    target: LoadTarget, stage: LoadStage, rate: float | None, limit: LoadLimit, seed: str, progress: Progress
) -> Samples:
    if rate is None:
        return await closed_loop(target, stage.clients or 1, limit, seed, progress)
    return await poisson(target, rate, limit, seed, progress)


def capacity(rows: Sequence[LoadRow]) -> float:
    """Return the highest throughput of the first closed loops, images a second.

    One in which a request failed is none: its clients paused then, and a refusal takes less time than an image.

    Raises:
        Unsupported: requests failed in each of them.
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
    """Return the longest good latency by variant; empty before one client was measured."""
    if plan.slo_s is not None:
        return (plan.slo_s,) * len(settings.variants)
    lone = next((row for row in rows if row.stage == _LONE), None)
    return () if lone is None else tuple(plan.slo_factor * each for each in lone_latencies(lone))


async def _warm_up(target: LoadTarget) -> None:
    """Draw an image or two of each size.

    Raises:
        Unsupported: the server draws none, with its own words.
    """
    order = random.Random("warm-up")
    sizes = {variant.size: variant for variant in target.variants}
    for variant in sizes.values():
        alone = replace(target, variants=(variant,))
        for number in range(_WARM_UPS):
            _, body = alone.request(number, order, cycles=True)
            outcome = await send(alone, body)
            kind = await outcome.checked()
            if kind == DONE:
                continue
            words = f"{kind}: {outcome.message}" if outcome.message else kind
            key = "; give --api-key-file FILE" if outcome.status in (401, 403) else ""
            raise Unsupported(f"{target.url} draws no image ({words}){key}")
