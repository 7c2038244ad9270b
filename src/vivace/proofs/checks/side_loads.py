"""The endpoints under load, after their images are drawn: one client, eight of them, and users who come at random.

The requests are those of `vivace bench --endpoint`, with the prompts, sizes and settings of the proof. An image is in
time within three times A's median latency, for both sides, so that their goodput can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Literal

from pydantic import Field

from vivace.benchmark.load_testing.aiperf import read_aiperf
from vivace.benchmark.load_testing.load_rows import LoadRow, LoadStage, RequestSettings, read_rows, write_rows
from vivace.benchmark.load_testing.load_target import LoadTarget, Variant
from vivace.benchmark.load_testing.stages import LoadPlan, measure
from vivace.errors import UsageError, VivaceError
from vivace.foundation.spec.settings import FOLDER, Option, Settings
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.jobs import main_jobs
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.proof_store import Letter, ProofStore

LEAST_REQUESTS = 8
"""Least number of requests: one for each client."""
_CLIENTS = (LEAST_REQUESTS,)
_FRACTIONS = (0.8,)
_SLO_FACTOR = 3.0
_NAMES: dict[Letter, Literal["A", "B"]] = {"a": "A", "b": "B"}
OnLoad = Callable[[str], object]
"""Called with the description of the load that begins."""


class LoadRequest(Settings):
    """The loads to put on the endpoints.

    Attributes:
        num_requests: of each load; None for none.
        aiperf_a, aiperf_b: artifacts of runs of AIPerf on a side.
    """

    num_requests: Annotated[
        int | None,
        Field(ge=LEAST_REQUESTS, le=100_000),
        Option(
            "Also put load on each images endpoint: N requests of one client, of eight, and of users.",
            "--requests --num-requests",
            metavar="N",
        ),
    ] = None
    aiperf_a: Annotated[
        Path | None,
        Option("Also show a run of AIPerf on A (its --artifact-dir).", metavar="DIR", path=FOLDER),
    ] = None
    aiperf_b: Annotated[Path | None, Option("Likewise, on B.", metavar="DIR", path=FOLDER)] = None

    @property
    def aiperf(self) -> list[tuple[Letter, Path]]:
        """The runs of AIPerf by side."""
        folders: dict[Letter, Path | None] = {"a": self.aiperf_a, "b": self.aiperf_b}
        return [(letter, folder) for letter, folder in folders.items() if folder is not None]


@dataclass(frozen=True)
class SideLoad:
    """A load on a side, or the reason why there is none."""

    side: Literal["A", "B"]
    row: LoadRow | None
    reason: str = ""


def check_loads(plan: ProofPlan, request: LoadRequest) -> None:
    """Raise an error for an invalid request before anything is drawn.

    Raises:
        UsageError: a side is not an images endpoint.
        StoreError: a folder has no run of AIPerf.
    """
    if request.num_requests is not None and not any(
        isinstance(side, EndpointSide) for side in (plan.a, plan.b)
    ):
        raise UsageError("--requests: neither A nor B is an images endpoint (http://HOST:PORT/v1)")
    for letter, folder in request.aiperf:
        side = plan.side(letter)
        if not isinstance(side, EndpointSide):
            raise UsageError(f"--aiperf-{letter}: {letter.upper()} is not an images endpoint but {side.text}")
        read_aiperf(folder, side.text, None)


def measure_loads(
    plan: ProofPlan, store: ProofStore, request: LoadRequest, on_load: OnLoad = lambda text: None
) -> list[SideLoad]:
    """Return the loads on both sides. Stored loads are not measured again."""
    slo_s = _slo(plan, store)
    loads = [
        SideLoad(_NAMES[letter], read_aiperf(folder, f"{plan.side(letter).text} (AIPerf)", slo_s))
        for letter, folder in request.aiperf
    ]
    for letter, name in _NAMES.items():
        side = plan.side(letter)
        if request.num_requests is not None and isinstance(side, EndpointSide):
            load = LoadPlan(_CLIENTS, _FRACTIONS, request.num_requests, None, _SLO_FACTOR, slo_s)
            try:
                rows = _measure(plan, side, store.loads_file(letter), load, on_load)
                loads += [SideLoad(name, row) for row in rows]
            except VivaceError as error:
                loads.append(SideLoad(name, None, str(error)))
    return loads


def _measure(
    plan: ProofPlan, side: EndpointSide, path: Path, load: LoadPlan, on_load: OnLoad
) -> list[LoadRow]:
    target = _target(plan, side).find_model()
    settings = RequestSettings(
        model=target.model,
        fields=target.fields,
        variants=tuple((variant.size, variant.lora) for variant in target.variants),
        prompts_sha256=hashlib.sha256("\n".join(target.prompts).encode()).hexdigest(),
    )
    rows = [row for row in read_rows(path) if len(row.samples.outcome) == load.num_requests]

    def report(row: LoadRow) -> None:
        rows.append(row)
        write_rows(path, rows)

    begun: set[str] = set()

    def progress(stage: LoadStage, number: int, seconds: float) -> None:
        if stage.name not in begun:
            begun.add(stage.name)
            on_load(f"{side.text}: {stage.name}, {load.num_requests} requests")

    return measure(target, load, side.text, settings, list(rows), report, progress)


def _target(plan: ProofPlan, side: EndpointSide) -> LoadTarget:
    fields = {name: value for name, value in side.fields.items() if name != "model"}
    fields |= {name: value for name, value in plan.settings.call.items() if name not in ("height", "width")}
    sizes = [f"{each.width}x{each.height}" for each in plan.settings_by_size if each.width and each.height]
    variants = tuple(Variant(size) for size in sizes) or (Variant(),)
    return LoadTarget(side.server, side.fields.get("model"), fields, plan.prompts, variants)


def _slo(plan: ProofPlan, store: ProofStore) -> float | None:
    """Return the longest good latency; None if A's is unknown, and with several sizes, which each have their own."""
    images = [store.image("a", job) for job in main_jobs(plan)]
    seconds = [image.seconds for image in images if image is not None and image.seconds is not None]
    return _SLO_FACTOR * median(seconds) if seconds and len(plan.settings_by_size) == 1 else None
