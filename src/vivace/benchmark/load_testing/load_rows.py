"""Stored loads: raw samples, from which figures are computed when they are read."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

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
        fraction: of the measured capacity at which users come; None where only their rate is known.
        repeat: counts independent loads of the same kind, from 0.
    """

    kind: Literal["closed", "poisson"]
    clients: int | None = None
    fraction: float | None = None
    repeat: int = 0

    @property
    def name(self) -> str:
        if self.kind == "poisson":
            return "users" if self.fraction is None else f"{self.fraction:g} of capacity"
        return "1 client" if self.clients == 1 else f"{self.clients} clients"


class RequestSettings(Spec):
    """Settings of the requests to a server.

    Attributes:
        variants: sizes and LoRAs, one of which each request has at random; None for the server's own size or no LoRA.
        prompts_sha256: of the prompts.
        without: fields that were left out of requests.
    """

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
    """Write a JSON list with one row a line, atomically."""
    replace(path, ("[\n" + ",\n".join(row.model_dump_json() for row in rows) + "\n]\n").encode())
