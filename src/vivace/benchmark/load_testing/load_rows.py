"""Stored loads: raw samples, from which figures are computed when they are read."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from vivace.errors import StoreError
from vivace.foundation.spec.base import Spec
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import parse_json, read_bytes

DONE = "done"
"""The outcome of a request that returned its image; other outcomes name the failure, e.g. "HTTP 429" or "timeout"."""
_MAX_FILE = 200_000_000


class LoadStage(Spec):
    """A load.

    Attributes:
        kind: "closed" is a number of clients that each wait for their image; "poisson" is users who come at random.
        clients: of a closed loop.
        fraction: of the measured capacity at which users come.
        repeat: counts independent loads of the same kind, from 0.
    """

    kind: Literal["closed", "poisson"]
    clients: int | None = None
    fraction: float | None = None
    repeat: int = 0

    @property
    def name(self) -> str:
        if self.kind == "poisson":
            return f"{self.fraction:g} of capacity"
        return "1 client" if self.clients == 1 else f"{self.clients} clients"


class RequestSettings(Spec):
    """Settings of the requests to a server; each has one of the variants (sizes and LoRAs) at random."""

    model: str | None
    fields: dict[str, Any]
    variants: tuple[tuple[str | None, str | None], ...]
    prompts_sha256: str
    without: tuple[str, ...] = ()


class Samples(Spec):
    """Requests in the order in which they were due; times in seconds since the stage began.

    Attributes:
        due_s: when the user came; `sent_s` when the request left; `ended_s` when its answer was complete.
        outcome: "done", or what went wrong.
        variant: which of the settings' variants each had.
        phases_ms: by the server's own Server-Timing; None where an answer had none.
    """

    due_s: tuple[float, ...] = ()
    sent_s: tuple[float, ...] = ()
    ended_s: tuple[float, ...] = ()
    outcome: tuple[str, ...] = ()
    variant: tuple[int, ...] = ()
    phases_ms: dict[str, tuple[float | None, ...]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _are_as_many(self) -> Samples:
        columns = (self.sent_s, self.ended_s, self.outcome, self.variant, *self.phases_ms.values())
        if any(len(column) != len(self.due_s) for column in columns):
            raise ValueError("the columns of the samples are not of one length")
        return self


class LoadRow(Spec):
    """One load on one server.

    Attributes:
        label: names the server: its URL unless the user gave another.
        server: its description of its model.
        client: where the requests came from.
        rate: requests a second of Poisson arrivals.
        slo_s: the longest latency that is good, by variant; empty while it is not known.
    """

    label: str
    request: RequestSettings
    server: dict[str, Any]
    client: dict[str, str]
    began: str
    stage: LoadStage
    rate: float | None = None
    slo_s: tuple[float, ...] = ()
    samples: Samples

    @property
    def key(self) -> str:
        """Identify what was measured: the same command measures only what is missing."""
        return key_of(self.label, self.request, self.stage)


def key_of(label: str, request: RequestSettings, stage: LoadStage) -> str:
    text = json.dumps([label, request.digest(), stage.digest()])
    return hashlib.sha256(text.encode()).hexdigest()


def read_rows(path: Path) -> list[LoadRow]:
    """Return the rows of a file; none if there is no such file."""
    if not path.exists():
        return []
    try:
        data = parse_json(read_bytes(path, _MAX_FILE))
        if not isinstance(data, list):
            raise ValueError("it is no list")
        return [LoadRow.model_validate(row) for row in data]
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise StoreError(
            f"{path} holds no rows of `vivace bench --endpoint` ({first}); give another file"
        ) from None


def write_rows(path: Path, rows: list[LoadRow]) -> None:
    replace(path, ("[\n" + ",\n".join(row.model_dump_json() for row in rows) + "\n]\n").encode())


PERCENTILES = (50, 90, 95, 99)
_SETTLING = 0.1
"""Share of the time of Poisson arrivals that is left out at its beginning: the queue is empty then."""


# Figures of a load come without intervals: in a queue each request depends on those before it, and near the capacity
# for longer than a load lasts, so a single load cannot say how far another's figures would be from its own. Repeated
# loads show it.
@dataclass(frozen=True)
class LoadFigures:
    """Figures of a load.

    Attributes:
        num_requests: that were due; `num_done` brought an image, `errors` counts the others by kind.
        throughput: images a second.
        latency_s: seconds by percentile, of all requests: those without an image count as infinitely long.
        within_slo: the share of all requests whose image came in time; None without an SLO.
        goodput: images a second that came in time, of Poisson arrivals; None for others.
        lag_s: the 99th percentile of how much later than due requests left: what the load itself adds to latency.
        phases_ms: medians of the server's own Server-Timing.
    """

    num_requests: int
    num_done: int
    errors: dict[str, int]
    throughput: float
    latency_s: dict[int, float]
    within_slo: float | None
    goodput: float | None
    lag_s: float
    phases_ms: dict[str, float]


def figures_of(row: LoadRow) -> LoadFigures:
    samples = row.samples
    done = np.array([outcome == DONE for outcome in samples.outcome], dtype=bool)
    ended, due = (np.array(column, dtype=np.float64) for column in (samples.ended_s, samples.due_s))
    latencies = np.where(done, np.round(ended - due, 5), np.inf)
    settled = due >= (_SETTLING * due.max() if row.stage.kind == "poisson" and len(due) else 0.0)
    within = None
    if row.slo_s and len(done):
        slo = np.array(row.slo_s)[list(samples.variant)]
        within = float((latencies <= slo)[settled].mean())
    return LoadFigures(
        num_requests=len(done),
        num_done=int(done.sum()),
        errors=dict(Counter(kind for kind in samples.outcome if kind != DONE).most_common()),
        throughput=throughput(row),
        latency_s={p: _percentile(latencies[settled], p) for p in PERCENTILES} if len(done) else {},
        within_slo=within,
        goodput=None if within is None or row.rate is None else within * row.rate,
        lag_s=float(np.quantile(np.subtract(samples.sent_s, samples.due_s), 0.99)) if len(done) else 0.0,
        phases_ms=_phases(row),
    )


def _percentile(latencies: NDArray[np.float64], percent: int) -> float:
    """Return the smallest latency that so many percent of the requests do not exceed."""
    return float(np.percentile(latencies, percent, method="inverted_cdf"))


def throughput(row: LoadRow) -> float:
    """Return the images a second from the first request on; of a closed loop until its last, as clients that have gone
    leave the server idle."""
    samples = row.samples
    ends = sorted(
        end for end, outcome in zip(samples.ended_s, samples.outcome, strict=True) if outcome == DONE
    )
    if row.stage.kind == "closed" and len(ends) > (row.stage.clients or 1) + 1:
        last = max(samples.sent_s)
        ends = [end for end in ends if end <= last] or ends
    return len(ends) / (ends[-1] - min(samples.sent_s)) if ends else 0.0


def lone_latencies(row: LoadRow) -> tuple[float, ...]:
    """Return the median latency of one client by variant: by size, whatever the LoRA."""
    sizes = [size for size, _ in row.request.variants]
    done = [
        (sizes[variant], ended - due)
        for variant, due, ended, outcome in zip(
            row.samples.variant, row.samples.due_s, row.samples.ended_s, row.samples.outcome, strict=True
        )
        if outcome == DONE
    ]
    if not done:
        return ()
    overall = float(np.median([seconds for _, seconds in done]))
    by_size = {size: [seconds for other, seconds in done if other == size] for size in set(sizes)}
    return tuple(float(np.median(by_size[size])) if by_size[size] else overall for size in sizes)


def _phases(row: LoadRow) -> dict[str, float]:
    phases: dict[str, float] = {}
    for name, column in row.samples.phases_ms.items():
        values = [value for value in column if value is not None and math.isfinite(value)]
        if values:
            phases[name] = float(np.median(values))
    return phases
