"""The endpoints under load, after their images are drawn: one client, eight of them, and users who come at random.

The requests are those of `vivace bench --endpoint`, with the prompts, sizes and settings of the proof. An image is in
time within three times A's median latency, for both sides, so that their goodput can be compared.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from vivace.benchmark.load_testing.aiperf import read_aiperf
from vivace.benchmark.load_testing.load_rows import LoadRow, RequestSettings, read_rows, write_rows
from vivace.benchmark.load_testing.load_target import LoadTarget, Variant, with_model
from vivace.benchmark.load_testing.stages import LoadPlan, measure
from vivace.errors import UsageError, VivaceError
from vivace.proofs.sides.prepare_sides import ImageSource, Prepared
from vivace.proofs.sides.probes import main_jobs
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.sides import EndpointSide

LEAST_REQUESTS = 8
"""Least number of requests: one for each client."""
_CLIENTS = (LEAST_REQUESTS,)
_FRACTIONS = (0.8,)
_SLO_FACTOR = 3.0
OnLoad = Callable[[str], object]
"""Called with the description of the load that begins."""


@dataclass(frozen=True)
class LoadRequest:
    """The loads to put on the endpoints.

    Attributes:
        num_requests: of each load; None for none.
        aiperf_a, aiperf_b: artifacts of runs of AIPerf on a side.
    """

    num_requests: int | None = None
    aiperf_a: Path | None = None
    aiperf_b: Path | None = None


@dataclass(frozen=True)
class SideLoad:
    """A load on a side, or the reason why there is none."""

    side: Literal["A", "B"]
    row: LoadRow | None
    reason: str = ""


def check_loads(prepared: Prepared, request: LoadRequest) -> None:
    """Raise an error for an invalid request before anything is drawn.

    Raises:
        UsageError: a side is not an images endpoint.
        StoreError: a folder has no run of AIPerf.
    """
    endpoints = [source for source in (prepared.a, prepared.b) if isinstance(source.side, EndpointSide)]
    if request.num_requests is not None and not endpoints:
        raise UsageError("--requests: neither A nor B is an images endpoint (http://HOST:PORT/v1)")
    for letter, source, folder in _aiperf(prepared, request):
        if not isinstance(source.side, EndpointSide):
            raise UsageError(
                f"--aiperf-{letter}: {letter.upper()} is not an images endpoint but {source.side.text}"
            )
        read_aiperf(folder, source.side.text, None)


def measure_loads(
    prepared: Prepared, store: ProofStore, request: LoadRequest, on_load: OnLoad = lambda text: None
) -> list[SideLoad]:
    """Return the loads on both sides. Stored loads are not measured again."""
    slo_s = _slo(prepared, store)
    loads = [
        SideLoad(_upper(letter), read_aiperf(folder, f"{source.side.text} (AIPerf)", slo_s))
        for letter, source, folder in _aiperf(prepared, request)
    ]
    if request.num_requests is None:
        return loads
    letters: tuple[Letter, ...] = ("a", "b")
    for letter, source in zip(letters, (prepared.a, prepared.b), strict=True):
        if isinstance(source.side, EndpointSide):
            plan = LoadPlan(_CLIENTS, _FRACTIONS, request.num_requests, None, _SLO_FACTOR, slo_s)
            try:
                rows = _measured(prepared, source, store.loads_file(letter), plan, on_load)
                loads += [SideLoad(_upper(letter), row) for row in rows]
            except VivaceError as error:
                loads.append(SideLoad(_upper(letter), None, str(error)))
    return loads


def _measured(
    prepared: Prepared, source: ImageSource, path: Path, plan: LoadPlan, on_load: OnLoad
) -> list[LoadRow]:
    side = source.side
    assert isinstance(side, EndpointSide)
    target = asyncio.run(with_model(_target(prepared, side, prepared.key(source))))
    settings = RequestSettings(
        model=target.model,
        fields=target.fields,
        variants=tuple((variant.size, variant.lora) for variant in target.variants),
        prompts_sha256=hashlib.sha256("\n".join(target.prompts).encode()).hexdigest(),
    )
    kept = [row for row in read_rows(path) if len(row.samples.outcome) == plan.num_requests]

    def report(row: LoadRow) -> None:
        kept.append(row)
        write_rows(path, kept)

    begun: set[str] = set()

    def progress(stage: Any, number: int, seconds: float) -> None:
        if stage.name not in begun:
            begun.add(stage.name)
            on_load(f"{side.text}: {stage.name}, {plan.num_requests} requests")

    return measure(target, plan, side.text, settings, list(kept), report, progress)


def _target(prepared: Prepared, side: EndpointSide, key: str | None) -> LoadTarget:
    settings = prepared.settings
    fields = {name: value for name, value in side.fields.items() if name != "model"}
    fields |= {name: settings.call[name] for name in _FIELDS if name in settings.call}
    sizes = [
        f"{each.width}x{each.height}"
        for each in prepared.settings_by_size
        if each.width is not None and each.height is not None
    ]
    return LoadTarget(
        url=side.url,
        model=side.fields.get("model"),
        fields=fields,
        prompts=prepared.prompts,
        variants=tuple(Variant(size) for size in sizes) or (Variant(),),
        timeout_s=prepared.request.timeout_s,
        key=key,
    )


_FIELDS = ("num_inference_steps", "guidance_scale")


def _slo(prepared: Prepared, store: ProofStore) -> float | None:
    """Return the longest good latency; None if A's is unknown, and with several sizes, which each have their own."""
    if len(prepared.settings_by_size) > 1:
        return None
    images = [store.image("a", job) for job in main_jobs(prepared)]
    seconds = [image.seconds for image in images if image is not None and image.seconds is not None]
    return _SLO_FACTOR * median(seconds) if seconds else None


def _aiperf(prepared: Prepared, request: LoadRequest) -> list[tuple[Letter, ImageSource, Path]]:
    folders: tuple[tuple[Letter, ImageSource, Path | None], ...] = (
        ("a", prepared.a, request.aiperf_a),
        ("b", prepared.b, request.aiperf_b),
    )
    return [(letter, source, folder) for letter, source, folder in folders if folder is not None]


def _upper(letter: Letter) -> Literal["A", "B"]:
    return "A" if letter == "a" else "B"
