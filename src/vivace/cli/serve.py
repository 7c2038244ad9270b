"""vivace serve"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import signal
import socket
from typing import TYPE_CHECKING, Any

import click

from vivace.cli.command import command
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.recipe_syntax import BEST
from vivace.serve.settings import ServeSettings

if TYPE_CHECKING:
    from vivace.serve.queue.pool import WorkerSource

_NEEDED = ("fastapi", "uvicorn", "prometheus-client", "python-multipart")
_BACKLOG = 128
_CONNECTIONS = 2_000
"""At once; those beyond get 503."""
_FILES = 8_192


@command(ServeSettings)
def serve(settings: ServeSettings) -> int:
    """Serve a model and its recipe behind the OpenAI images API, with a page to draw with.

    Requests are those of POST /v1/images/generations and /v1/images/edits; seed, num_inference_steps, guidance_scale,
    negative_prompt and loras are further fields. /readyz says when the model is loaded and its sizes are warmed,
    /metrics is for Prometheus.
    SIGTERM lets accepted images end.

    \b
        vivace serve tiny-sd
        vivace serve flux-dev --recipe "fused(fp8)+cuda_graph" --gpus all --sizes 1024x1024,832x1216
        vivace serve sdxl --host 0.0.0.0 --api-key-file key.txt
        vivace serve flux-dev --ray auto --replicas 2-8
    """
    _check_installed()
    settings.check()
    _listening(settings).close()  # before a recipe is searched for, which may take hours
    settings = _resolved(settings)
    click.echo(f"{settings.model} with {settings.recipe} ({settings.why})", err=True)
    problem = asyncio.run(_serve(settings))
    if problem is not None:
        raise Unsupported(problem)
    return 0


def _resolved(settings: ServeSettings) -> ServeSettings:
    """Return settings with the model's own name, the recipe in full, and GPUs by their UUIDs."""
    from vivace.evidence.recommendation.best import best_recipe, is_best
    from vivace.models.find import find_model
    from vivace.models.reading_limits import read_ahead
    from vivace.recipes.resolve import resolve

    recipe, why = settings.recipe, settings.why
    if settings.tune_minutes is not None:
        recipe, why = _tuned(settings, settings.tune_minutes)
    elif is_best(recipe):
        best = best_recipe(recipe, settings.model, device=settings.device, task=settings.task)
        recipe, why = best.recipe, f"{BEST}: {best.why}"
    located = find_model(settings.model)
    changes: dict[str, Any] = {"model": located.model.name, "recipe": resolve(recipe).text, "why": why}
    if settings.gpus:
        changes["gpus"] = _gpus(settings.gpus)
        changes["device"] = "cuda" if settings.device == "auto" else settings.device
    if settings.ray_address is None:
        read_ahead(located.weights)
    return settings.model_copy(update=changes)


async def _serve(settings: ServeSettings) -> str | None:
    """Serve until SIGTERM or Ctrl+C; return why no worker will ever draw, if that ended it."""
    workers = await _workers(settings)
    import uvicorn

    from vivace.foundation.processes.system import allow_open_files
    from vivace.serve.http.access import is_loopback
    from vivace.serve.http.app import create_app

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listening = _listening(settings)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    place = f"http://{host}:{listening.getsockname()[1]}"
    click.echo(f"{place}/ is a page to draw with, {place}/v1 the API", err=True)
    if not is_loopback(settings.host.lower()):
        click.echo(
            "other machines reach this server: put it behind a proxy, for TLS and against connections that stay idle",
            err=True,
        )
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again after all images have ended
    allow_open_files(_FILES)
    app = create_app(settings, workers, lambda: setattr(server, "should_exit", True))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            limit_concurrency=_CONNECTIONS,
            backlog=_BACKLOG,
            log_level="warning",
            timeout_graceful_shutdown=max(1, int(settings.timeout_s)),
            server_header=False,
        )
    )
    # A second Ctrl+C cancels what is in progress, and uvicorn logs each cancellation as a failure.
    logging.getLogger("uvicorn.error").addFilter(lambda record: not server.force_exit)
    await server.serve(sockets=[listening])
    problem: str | None = app.state.problem
    return problem


async def _workers(settings: ServeSettings) -> WorkerSource:
    """Return what makes workers: here a template that imports libraries while this process does, or Ray's actors."""
    if settings.ray_address is not None:
        from vivace.serve.queue.ray_workers import RayWorkers

        return RayWorkers(settings)
    from vivace.serve.queue.process import Workers

    workers = Workers(settings)
    await workers.template()
    return workers


def _listening(settings: ServeSettings) -> socket.socket:
    """Return a socket that listens."""
    host, port = settings.host, settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as error:
        raise UsageError(
            f"--host {host} --port {port}: {error.strerror or error}; give another, or --port 0 for a free one"
        ) from None
    return listening


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name.replace("-", "_")) is None]
    if missing:
        raise Unsupported(f"serve needs {', '.join(missing)}: pip install {' '.join(missing)}")


def _tuned(settings: ServeSettings, minutes: float) -> tuple[str, str]:
    """Search for a recipe, and return it with its proof."""
    from vivace.tuning import tune

    tuned = tune(settings.model, minutes=minutes, device=settings.device)
    click.echo(str(tuned), err=True)
    row = tuned.row
    if tuned.pick is None or row is None or row.speedup is None:
        raise Unsupported(
            f"--tune {minutes:g}: no recipe was proven to be faster; give more minutes, or --recipe"
        )
    why = f"found by tune: {row.speedup.point:.2f}x the baseline's speed here, quality passed"
    return tuned.pick.recipe.text, why


def _gpus(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the UUIDs of GPUs, or their numbers where there are none."""
    from vivace.foundation.hardware.this_machine import gpu_uuids

    if names == ("all",) and (uuids := gpu_uuids()):
        return uuids
    from vivace.benchmark.places.local_pool import gpus_of_this_host
    from vivace.benchmark.rounds.worker_requests import WORKER
    from vivace.foundation.processes.launcher import Launcher

    with Launcher(WORKER) as launcher:  # PyTorch counts them, in a process of its own
        places = gpus_of_this_host(launcher, "all")
    if names == ("all",):
        return tuple(str(place.uuid or place.index) for place in places)
    wrong = [name for name in names if not name.isdigit() or int(name) >= len(places)]
    if wrong:
        raise UsageError(
            f"--gpus {','.join(names)}: give all, or numbers from 0 to {len(places) - 1}; got {wrong[0]!r}"
        )
    return tuple(str(places[int(name)].uuid or name) for name in names)
