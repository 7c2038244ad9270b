"""vivace serve"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import click
from pydantic import Field

from vivace.cli.command import command
from vivace.errors import Unsupported, UsageError
from vivace.foundation.spec.recipe_syntax import BEST
from vivace.foundation.spec.settings import (
    FOLDER,
    DeviceName,
    Option,
    Positional,
    Settings,
    Threads,
    read_by,
)
from vivace.foundation.spec.sizes import Size, in_order

if TYPE_CHECKING:
    from vivace.foundation.spec.task_names import Device
    from vivace.serve.http.keys import Keys
    from vivace.serve.settings import ServeSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus-client", "python-multipart")
_BATCHES = (2, 4)
_BACKLOG = 128
_CONNECTIONS = 2_000
"""At once; those beyond get 503."""
_FILES = 8_192


class ServeCommand(Settings):
    model: Annotated[str, Positional()]
    recipe: Annotated[
        str | None,
        Option(
            "Recipe to apply; default: best, which keeps the image.",
            metavar="R",
        ),
    ] = None
    tune_minutes: Annotated[
        float | None,
        Field(gt=0, le=10_000),
        Option("Search for the recipe first, as `vivace tune` does.", "--tune", metavar="MIN"),
    ] = None
    device: DeviceName = "auto"
    gpus: Annotated[
        str | None,
        Option("One replica on each of these GPUs; default: the first.", metavar="all|I,J"),
    ] = None
    ray_address: Annotated[
        str | None,
        Option(
            "Serve on a Ray cluster: HOST:PORT, or auto for this host's; every node needs the folder of --loras.",
            "--ray",
            metavar="ADDRESS",
        ),
    ] = None
    replicas: Annotated[
        str | None,
        Option("With --ray; MIN-MAX lets Ray scale. Default: one for each GPU.", metavar="N|MIN-MAX"),
    ] = None
    threads: Annotated[Threads, Option("CPU threads of each worker.")] = None
    sizes: Annotated[
        tuple[Size, ...],
        read_by(lambda text: in_order(text.split(","))),
        Option("Sizes to warm up before the server is ready; default: the model's own.", metavar="WxH,..."),
    ] = ()
    task: Annotated[
        Literal["text", "image", "inpaint", "edit"] | None,
        Option("Serve only this task; default: every task of the model's weights."),
    ] = None
    batch: Annotated[
        bool,
        Option(
            "Draw 2 or 4 images at once where that is measured to gain 10 %; images differ in their last bits."
        ),
    ] = False
    any_size: Annotated[bool, Option("Also draw other sizes; the first image of each takes longer.")] = False
    loras: Annotated[
        Path | None,
        Option(
            "Folder of LoRAs; requests name its .safetensors files, without the suffix.",
            metavar="DIR",
            path=FOLDER,
        ),
    ] = None
    max_queue: Annotated[int, Field(ge=1, le=1_000_000), Option("Maximum number of waiting images.")] = 64
    max_wait: Annotated[float, Field(ge=0, le=86_400), Option("Longest predicted wait, in seconds.")] = 300.0
    timeout: Annotated[float, Field(ge=0, le=86_400), Option("Time limit of a request, in seconds.")] = 600.0
    idle_unload: Annotated[
        float | None,
        Field(ge=0, le=100_000),
        Option("Free the GPU after so many idle minutes.", metavar="MIN"),
    ] = None
    host: Annotated[str, Option("Address to listen on; any but this machine needs --api-key-file.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Field(ge=0, le=65_535), Option()] = 8000
    key_file: Annotated[
        Path | None,
        Option(
            "A file with the keys that requests must bear, KEY or NAME KEY a line; read again when it changes.",
            "--api-key-file",
            metavar="F",
        ),
    ] = None
    served_model_name: Annotated[str, Option("The model's name in requests and answers.", metavar="NAME")] = (
        ""
    )
    public_url: Annotated[
        str,
        Option(
            "This server's URL as clients see it, for the URLs of images; default: that of each request.",
            metavar="URL",
        ),
    ] = ""
    allowed_origins: Annotated[
        str,
        Option("Sites whose pages may draw here, e.g. https://example.org.", metavar="URL,..."),
    ] = ""
    hosts: Annotated[
        tuple[str, ...],
        Option(
            "Without a key, also answer requests to this host name; default: localhost and its addresses. Repeatable.",
            "--allow-host",
            metavar="NAME",
        ),
    ] = ()
    log_prompts: Annotated[bool, Option("Write prompts to the log.")] = False


@command(ServeCommand)
def serve(settings: ServeCommand) -> int:
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
    from vivace.serve.http.keys import Keys

    keys = None if settings.key_file is None else Keys.read(settings.key_file)
    _check_key(keys, settings.host)
    origins = tuple(
        _url("--allowed-origins", each, has_path=False)
        for each in settings.allowed_origins.split(",")
        if each
    )
    public_url = settings.public_url and _url("--public-url", settings.public_url)
    if settings.replicas is not None and settings.ray_address is None:
        raise UsageError("--replicas is for --ray; on one machine, give --gpus")
    if settings.ray_address is not None:
        _check_ray_options(settings.gpus, settings.idle_unload, settings.batch)
    if settings.recipe is not None and settings.tune_minutes is not None:
        raise UsageError("--recipe is the recipe, and --tune searches for one; give one of them")
    _listening(settings.host, settings.port).close()  # before a recipe is searched for, which may take hours
    lora_files = _loras(settings.loras)
    if settings.tune_minutes is not None:
        chosen, why = _tuned(settings.model, settings.tune_minutes, settings.device)
    else:
        from vivace.evidence.recommendation.best import best_recipe, is_best

        chosen, why = settings.recipe or BEST, "as given"
        if is_best(chosen):
            best = best_recipe(chosen, settings.model, device=settings.device, task=settings.task)
            chosen, why = best.recipe, f"{BEST}: {best.why}"
    from vivace.models.find import find_model
    from vivace.recipes.resolve import resolve
    from vivace.serve.settings import ServeSettings

    located = find_model(settings.model)
    replicas_on = _gpus(settings.gpus)
    serving = ServeSettings(
        model=located.model.name,
        recipe=resolve(chosen).text,
        why=why,
        device="cuda" if replicas_on and settings.device == "auto" else settings.device,
        gpus=replicas_on,
        threads=settings.threads,
        sizes=settings.sizes,
        task=settings.task,
        batches=_BATCHES if settings.batch else (),
        any_size=settings.any_size,
        loras=lora_files,
        lora_folder=settings.loras,
        max_queue=settings.max_queue,
        max_wait_s=settings.max_wait,
        timeout_s=settings.timeout,
        idle_unload_s=None if settings.idle_unload is None else 60 * settings.idle_unload,
        keys=keys,
        served_name=settings.served_model_name,
        public_url=public_url,
        origins=origins,
        hosts=_hosts(settings.hosts, keys),
        logs_prompts=settings.log_prompts,
    )
    click.echo(f"{serving.model} with {serving.recipe} ({why})", err=True)
    if settings.ray_address is not None:
        with _drawers_on_ray(serving, settings.ray_address, settings.replicas) as make_pool:
            return _run(serving, settings.host, settings.port, make_pool)
    from vivace.models.reading_limits import read_ahead

    read_ahead(located.weights)
    return _run(serving, settings.host, settings.port)


def _run(settings: ServeSettings, host: str, port: int, make_pool: Callable[..., Any] | None = None) -> int:
    import logging
    import signal

    from vivace.serve.http.hosts import is_loopback

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listening = _listening(host, port)
    name = f"[{host}]" if ":" in host else host
    place = f"http://{name}:{listening.getsockname()[1]}"
    click.echo(f"{place}/ is a page to draw with, {place}/v1 the API", err=True)
    if not is_loopback(host.lower()):
        click.echo(
            "other machines reach this server: put it behind a proxy, for TLS and against connections that stay idle",
            err=True,
        )
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again after all images have ended
    if make_pool is None:
        problem = asyncio.run(_serve_here(settings, listening))
    else:
        problem = asyncio.run(_serve(settings, listening, make_pool))
    if problem is not None:
        raise Unsupported(problem)
    return 0


async def _serve_here(settings: ServeSettings, listening: socket.socket) -> str | None:
    """Serve with workers of this machine, whose template imports libraries while this process does; see `_serve`."""
    from vivace.serve.queue.process import Workers

    workers = Workers(settings)
    await workers.template()
    from vivace.serve.queue.pool import ReplicaPool

    return await _serve(settings, listening, functools.partial(ReplicaPool, workers=workers))


async def _serve(
    settings: ServeSettings, listening: socket.socket, make_pool: Callable[..., Any]
) -> str | None:
    """Serve until SIGTERM or Ctrl+C; return why no worker will ever draw, if that ended it."""
    import logging

    import uvicorn

    from vivace.foundation.processes.system import allow_open_files
    from vivace.serve.http.app import create_app

    allow_open_files(_FILES)
    app = create_app(settings, make_pool, lambda: setattr(server, "should_exit", True))
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


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        UsageError: the host is not this machine's, or the port is taken.
    """
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


def _url(option: str, text: str, *, has_path: bool = True) -> str:
    """Return a URL without the slash at its end.

    Raises:
        UsageError: it is none.
    """
    from urllib.parse import urlsplit

    text = text.strip().rstrip("/")
    try:
        parts = urlsplit(text)
        is_url = (
            parts.scheme in ("http", "https") and bool(parts.hostname) and text.isascii() and parts.port != 0
        )
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or parts.username or (parts.path and not has_path):
        raise UsageError(f"{option} {text[:100]}: give a URL such as https://images.example.org")
    return text


def _check_key(keys: Keys | None, host: str) -> None:
    from vivace.serve.http.hosts import is_loopback

    if keys is None and not is_loopback(host.lower()):
        raise UsageError(f"--host {host} lets other machines in; give --api-key-file FILE, too")


def _hosts(names: tuple[str, ...], keys: Keys | None) -> frozenset[str]:
    from vivace.serve.http.hosts import name_of

    if names and keys is not None:
        raise UsageError("--allow-host is for a server without a key; with one, any name is answered")
    wrong = [name for name in names if name_of(name) != name.lower() or ":" in name]
    if wrong:
        raise UsageError(f"--allow-host {wrong[0][:100]}: give a name as in a URL, without port and scheme")
    return frozenset(name.lower() for name in names)


def _tuned(model: str, minutes: float, device: str) -> tuple[str, str]:
    """Search for a recipe, and return it with its proof.

    Raises:
        Unsupported: nothing was proven.
    """
    from vivace.tuning import tune

    tuned = tune(model, minutes=minutes, device=cast("Device", device))
    click.echo(str(tuned), err=True)
    row = tuned.row
    if tuned.pick is None or row is None or row.speedup is None:
        raise Unsupported(
            f"--tune {minutes:g}: no recipe was proven to be faster; give more minutes, or --recipe"
        )
    return (
        tuned.pick.recipe.text,
        f"found by tune: {row.speedup.point:.2f}x the baseline's speed here, quality passed",
    )


def _gpus(text: str | None) -> tuple[str, ...]:
    if text is None:
        return ()
    from vivace.foundation.hardware.this_machine import gpu_uuids

    if text == "all" and (uuids := gpu_uuids()):
        return uuids
    from vivace.benchmark.places.local_pool import gpus_of_this_host
    from vivace.benchmark.rounds.worker_requests import WORKER
    from vivace.foundation.processes.launcher import Launcher

    with Launcher(WORKER) as launcher:  # PyTorch counts them, in a process of its own
        places = gpus_of_this_host(launcher, "all")
    if text == "all":
        return tuple(str(place.uuid or place.index) for place in places)
    names = text.split(",")
    wrong = [name for name in names if not name.isdigit() or int(name) >= len(places)]
    if wrong:
        raise UsageError(f"--gpus {text}: give all, or numbers from 0 to {len(places) - 1}; got {wrong[0]!r}")
    return tuple(str(places[int(name)].uuid or name) for name in names)


def _loras(folder: Path | None) -> dict[str, Path]:
    if folder is None:
        return {}
    from vivace.serve.settings import lora_files

    try:
        files = lora_files(folder)
    except OSError as error:
        raise UsageError(f"--loras {folder} cannot be read: {error.strerror}") from None
    if not files:
        raise UsageError(f"--loras {folder}: there is no .safetensors file in it")
    wrong = next((name for name in files if not name.isprintable()), None)
    if wrong is not None:
        raise UsageError(f"--loras {folder}: no request can name {wrong!r}; rename it to plain text")
    return files


def _check_ray_options(gpus: str | None, idle_unload: float | None, batch: bool) -> None:
    """Raise UsageError for options that are for one machine."""
    if gpus is not None:
        raise UsageError("--gpus is for one machine; with --ray, give --replicas N or MIN-MAX")
    if idle_unload is not None:
        raise UsageError("--idle-unload is for one machine; with --ray, give --replicas MIN-MAX")
    if batch:
        raise UsageError("--batch is for one machine; with --ray, images are drawn one by one")


@contextlib.contextmanager
def _drawers_on_ray(
    settings: ServeSettings, address: str, replicas: str | None
) -> Iterator[Callable[..., Any]]:
    """Deploy the drawers on a cluster until the block ends; yield what makes the pool of the routes."""
    from vivace.serve.queue.ray_application import NAME, Replicas, application, connect, num_gpus, pool_maker

    number = None if replicas is None else Replicas.of(replicas)
    connect(address)
    from ray import serve
    from ray.exceptions import RayError

    total = 0 if settings.device == "cpu" else num_gpus()
    if settings.device == "cuda" and not total:
        raise Unsupported(f"--ray {address}: the cluster has no GPUs; use --device cpu")
    number = number or Replicas(max(1, total), max(1, total))
    try:
        try:
            serve.run(application(settings, number, min(1, total)), name=NAME, route_prefix=None)
        except (RayError, RuntimeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unsupported(
                f"--ray {address}: Ray Serve did not start it ({first}); see its logs"
            ) from None
        yield pool_maker(number)
    finally:
        serve.shutdown()
