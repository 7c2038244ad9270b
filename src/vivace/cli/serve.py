"""vivace serve"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from vivace.cli import options, serve_ray
from vivace.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from vivace.foundation.spec.sizes import Size
    from vivace.foundation.spec.task_names import Device
    from vivace.foundation.spec.workload import Task
    from vivace.serve.http.keys import Keys
    from vivace.serve.settings import ServeSettings

_NEEDED = ("fastapi", "uvicorn", "prometheus-client", "python-multipart")
_BATCHES = (2, 4)
_BACKLOG = 128
"""Connections that are accepted at once, before any is closed to make room."""


@click.command()
@click.argument("model")
@click.option(
    "--recipe",
    metavar="R",
    help="Recipe to apply; default: what `vivace recommend --same-picture` names for this GPU.",
)
@click.option(
    "--tune",
    "tune_minutes",
    type=options.FiniteFloat(0, 10_000, min_open=True),
    metavar="MIN",
    help="Search for the recipe first, as `vivace tune` does.",
)
@options.device
@click.option("--gpus", metavar="all|I,J", help="One replica on each of these GPUs; default: the first.")
@click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Serve on a Ray cluster: HOST:PORT, or auto for this host's; every node needs the folder of --loras.",
)
@click.option(
    "--replicas", metavar="N|MIN-MAX", help="With --ray; MIN-MAX lets Ray scale. Default: one for each GPU."
)
@click.option("--threads", type=click.IntRange(1, 1024), help="CPU threads of each worker.")
@click.option(
    "--sizes",
    metavar="WxH,...",
    help="Sizes to warm up before the server is ready; default: the model's own.",
)
@click.option(
    "--task",
    type=click.Choice(["text", "image", "inpaint", "edit"]),
    help="Serve only this task; default: every task of the model's weights.",
)
@click.option(
    "--batch",
    is_flag=True,
    help="Draw 2 or 4 images at once where that is measured to gain 10 %; images differ in their last bits.",
)
@click.option("--any-size", is_flag=True, help="Also draw other sizes; the first image of each takes longer.")
@click.option(
    "--loras",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Folder of LoRAs; requests name its .safetensors files, without the suffix.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(1, 1_000_000),
    default=64,
    show_default=True,
    help="Maximum number of waiting images.",
)
@click.option(
    "--max-wait",
    type=options.FiniteFloat(0, 86_400),
    default=300.0,
    show_default=True,
    help="Longest predicted wait, in seconds.",
)
@click.option(
    "--timeout",
    type=options.FiniteFloat(0, 86_400),
    default=600.0,
    show_default=True,
    help="Time limit of a request, in seconds.",
)
@click.option(
    "--idle-unload",
    type=options.FiniteFloat(0, 100_000),
    metavar="MIN",
    help="Free the GPU after so many idle minutes.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on; any but this machine needs --api-key-file.",
)
@click.option("--port", type=click.IntRange(0, 65_535), default=8000, show_default=True)
@click.option(
    "--api-key-file",
    "key_file",
    type=click.Path(path_type=Path),
    metavar="F",
    help="A file with the keys that requests must bear, KEY or NAME KEY a line; read again when it changes.",
)
@click.option(
    "--served-model-name", metavar="NAME", default="", help="The model's name in requests and answers."
)
@click.option(
    "--public-url",
    metavar="URL",
    default="",
    help="This server's URL as clients see it, for the URLs of images; default: that of each request.",
)
@click.option(
    "--allowed-origins",
    metavar="URL,...",
    default="",
    help="Sites whose pages may draw here, e.g. https://example.org.",
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Without a key, also answer requests to this host name; default: localhost and its addresses. Repeatable.",
)
@click.option("--log-prompts", is_flag=True, help="Write prompts to the log.")
def serve(
    model: str,
    recipe: str | None,
    tune_minutes: float | None,
    device: str,
    gpus: str | None,
    ray_address: str | None,
    replicas: str | None,
    threads: int | None,
    sizes: str | None,
    task: Task | None,
    batch: bool,
    any_size: bool,
    loras: Path | None,
    max_queue: int,
    max_wait: float,
    timeout: float,
    idle_unload: float | None,
    host: str,
    port: int,
    key_file: Path | None,
    served_model_name: str,
    public_url: str,
    allowed_origins: str,
    hosts: tuple[str, ...],
    log_prompts: bool,
) -> int:
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

    keys = None if key_file is None else Keys.read(key_file)
    _check_key(keys, host)
    origins = tuple(
        _url("--allowed-origins", each, has_path=False) for each in allowed_origins.split(",") if each
    )
    public_url = public_url and _url("--public-url", public_url)
    if replicas is not None and ray_address is None:
        raise UsageError("--replicas is for --ray; on one machine, give --gpus")
    if ray_address is not None:
        serve_ray.check_options(gpus, idle_unload, batch)
    if recipe is not None and tune_minutes is not None:
        raise UsageError("--recipe is the recipe, and --tune searches for one; give one of them")
    _listening(host, port).close()  # before a recipe is searched for, which may take hours
    lora_files = _loras(loras)
    if recipe is not None:
        chosen, why = recipe, "as given"
    else:
        chosen, why = _best_recorded(model) if tune_minutes is None else _tuned(model, tune_minutes, device)
    from vivace.models.find import find_model
    from vivace.recipes.resolve import resolve
    from vivace.serve.settings import ServeSettings

    located = find_model(model)
    replicas_on = _gpus(gpus)
    settings = ServeSettings(
        model=located.model.name,
        recipe=resolve(chosen).text,
        why=why,
        device="cuda" if replicas_on and device == "auto" else device,
        gpus=replicas_on,
        threads=threads,
        sizes=_sizes(sizes),
        task=task,
        batches=_BATCHES if batch else (),
        any_size=any_size,
        loras=lora_files,
        lora_folder=loras,
        max_queue=max_queue,
        max_wait_s=max_wait,
        timeout_s=timeout,
        idle_unload_s=None if idle_unload is None else 60 * idle_unload,
        keys=keys,
        served_name=served_model_name,
        public_url=public_url,
        origins=origins,
        hosts=_hosts(hosts, keys),
        logs_prompts=log_prompts,
    )
    click.echo(f"{settings.model} with {settings.recipe} ({settings.why})", err=True)
    if ray_address is not None:
        with serve_ray.drawers_on_ray(settings, ray_address, replicas) as make_pool:
            return _run(settings, host, port, make_pool)
    from vivace.models.reading_ahead import read_ahead

    read_ahead(located.weights)
    return _run(settings, host, port)


def _run(settings: ServeSettings, host: str, port: int, make_pool: Callable[..., Any] | None = None) -> int:
    import logging
    import signal

    logging.basicConfig(level=logging.INFO, format="%(message)s")
    listening = _listening(host, port)
    name = f"[{host}]" if ":" in host else host
    place = f"http://{name}:{listening.getsockname()[1]}"
    click.echo(f"{place}/ is a page to draw with, {place}/v1 the API", err=True)
    signal.signal(signal.SIGTERM, lambda *_: None)  # uvicorn sends it again after all images have ended
    if make_pool is None:
        problem = asyncio.run(_serve_here(settings, listening))
    else:
        problem = asyncio.run(_serve(settings, listening, make_pool))
    if problem is not None:
        raise Unsupported(problem)
    return 0


async def _serve_here(settings: ServeSettings, listening: socket.socket) -> str | None:
    """Serve with workers of this machine, which import libraries while this process does; see `_serve`."""
    from vivace.serve.queue.pool import EarlyProcesses, ReplicaPool

    early = EarlyProcesses(settings)
    await early.start()
    try:
        return await _serve(settings, listening, functools.partial(ReplicaPool, make_process=early.take))
    finally:
        await early.stop()


async def _serve(
    settings: ServeSettings, listening: socket.socket, make_pool: Callable[..., Any]
) -> str | None:
    """Serve until SIGTERM or Ctrl+C; return why no worker will ever draw, if that ended it."""
    import logging

    import uvicorn

    from vivace.serve.http.app import create_app
    from vivace.serve.http.connections import Connection

    app = create_app(settings, make_pool, lambda: setattr(server, "should_exit", True))
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            http=Connection,
            ws="none",
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


def _best_recorded(model: str) -> tuple[str, str]:
    """Return the best recipe on record that keeps the image, with its evidence; the baseline if there is none.

    A recipe that changes the image, as fewer steps do, is for the user to choose.
    """
    from vivace.evidence.recommendation import recommend
    from vivace.foundation.spec.recipe_syntax import BASELINE

    answer = recommend(model, same_picture=True)
    if answer.recipe in (None, BASELINE) or answer.basis is None:
        return (
            BASELINE,
            "as published: no record here or in vivace supports another recipe that keeps the image",
        )
    return answer.recipe, f"the best known that keeps the image: {answer.basis.place}, {answer.basis.gpu}"


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
    from vivace.benchmark.worker_requests import WORKER
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


def _sizes(text: str | None) -> tuple[Size, ...]:
    from vivace.foundation.spec.sizes import in_order

    try:
        return in_order(text.split(",")) if text else ()
    except ValueError as error:
        raise UsageError(f"--sizes {text}: {error}") from None


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
