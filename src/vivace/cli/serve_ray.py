"""vivace serve --ray: the server on a Ray cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UsageError

if TYPE_CHECKING:
    from vivace.serve.settings import ServeSettings


def check_options(gpus: str | None, idle_unload: float | None, batch: bool) -> None:
    """Raise UsageError for options that are for one machine."""
    if gpus is not None:
        raise UsageError("--gpus is for one machine; with --ray, give --replicas N or MIN-MAX")
    if idle_unload is not None:
        raise UsageError("--idle-unload is for one machine; with --ray, give --replicas MIN-MAX")
    if batch:
        raise UsageError("--batch is for one machine; with --ray, images are drawn one by one")


@contextlib.contextmanager
def drawers_on_ray(
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
