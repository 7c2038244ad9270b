"""vivace serve --ray: the server on a Ray cluster."""

from __future__ import annotations

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Any

import click

from vivace.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from vivace.serve.settings import ServeSettings

_POLL_S = 1.0


def check_options(port: int, gpus: str | None, idle_unload: float | None, batch: bool) -> None:
    """Raise UsageError for options that are for one machine."""
    if gpus is not None:
        raise UsageError("--gpus is for one machine; with --ray, give --replicas N or MIN-MAX")
    if idle_unload is not None:
        raise UsageError("--idle-unload is for one machine; with --ray, give --replicas MIN-MAX")
    if batch:
        raise UsageError("--batch is for one machine; with --ray, images are drawn one by one")
    if port == 0:
        raise UsageError("--port 0 is for one machine; with --ray, name the port")


def serve_on_ray(settings: ServeSettings, address: str, replicas: str | None, host: str, port: int) -> int:
    """Deploy the server on a cluster, and keep it until SIGTERM or Ctrl+C."""
    from vivace.serve.ray_application import NAME, Replicas, application, connect, num_gpus

    number = None if replicas is None else Replicas.of(replicas)
    connect(address, host, port)
    from ray import serve
    from ray.exceptions import RayError

    total = 0 if settings.device == "cpu" else num_gpus()
    if settings.device == "cuda" and not total:
        raise Unsupported(f"--ray {address}: the cluster has no GPUs; use --device cpu")
    number = number or Replicas(max(1, total), max(1, total))
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    try:
        try:
            serve.run(application(settings, number, min(1, total)), name=NAME)
        except (RayError, RuntimeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise Unsupported(
                f"--ray {address}: Ray Serve did not start it ({first}); see its logs"
            ) from None
        place = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        click.echo(f"{place}/ is a page to draw with, {place}/v1 the API, on the cluster's head", err=True)
        _watch(place, None if settings.keys is None else next(iter(settings.keys.names)), ended)
    finally:
        click.echo("accepted images end, then the replicas", err=True)
        serve.shutdown()
    return 0


def _watch(place: str, key: str | None, ended: threading.Event) -> None:
    """Print the server's readiness until it ends.

    Raises:
        Unsupported: no replica will ever draw.
    """
    before = ""
    while not ended.wait(_POLL_S):
        answer = _readiness(place, key)
        if "problem" in answer:
            raise Unsupported(str(answer["problem"]))
        status = str(answer.get("status", "no answer"))
        if status != before:
            click.echo(f"{time.strftime('%H:%M:%S')} {status}", err=True)
            before = status


def _readiness(place: str, key: str | None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        try:
            with opener.open(
                urllib.request.Request(f"{place}/readyz", headers=headers), timeout=10
            ) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            content = error.read()
        answered = json.loads(content)
    except (OSError, ValueError):
        return {}
    return answered if isinstance(answered, dict) else {}
