"""`vivace serve` on a Ray cluster: the routes in the command's own process, a drawer on each GPU of the cluster.

Ray Serve places, scales and restarts the drawers. Needs the extras `serve` and `ray` on every node.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from vivace.benchmark.places.ray_nodes import check_answers
from vivace.errors import Unsupported, UsageError
from vivace.serve.queue.pool import Observe
from vivace.serve.queue.process import COMMAND
from vivace.serve.queue.ray_drawer import Order, RayReplica
from vivace.serve.queue.ray_pool import RayPool, Stream
from vivace.serve.settings import ModelState, ServeSettings

NAME = "vivace"
_DRAWER = "Drawer"
_NEEDED = "pip install 'ray[serve]' on every node"


@dataclass(frozen=True)
class Replicas:
    """How many drawers Ray runs: between `least` and `most`, by how many images wait."""

    least: int
    most: int

    @classmethod
    def of(cls, text: str) -> Replicas:
        """Read "N" or "MIN-MAX".

        Raises:
            UsageError: it is neither.
        """
        low, separator, high = text.partition("-")
        high = high if separator else low
        if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit()):
            raise UsageError(f"--replicas {text[:50]}: give a number, or MIN-MAX, e.g. 2-8")
        if not 1 <= int(low) <= int(high) <= 10_000:
            raise UsageError(f"--replicas {text[:50]}: give 1 or more, the smaller number first")
        return cls(int(low), int(high))


class _Deployment:
    """The drawers behind Ray Serve's handle."""

    def __init__(self) -> None:
        from ray import serve

        self._serve = serve
        self._handle = serve.get_deployment_handle(_DRAWER, app_name=NAME)

    def draw(self, order: Order) -> Stream:
        stream: Stream = self._handle.options(stream=True).draw.remote(order)
        return stream

    def state(self) -> Awaitable[tuple[ModelState | None, str | None]]:
        answer: Awaitable[tuple[ModelState | None, str | None]] = self._handle.state.remote()
        return answer

    async def num_running(self) -> int:
        status = await asyncio.to_thread(self._serve.status)
        application = status.applications.get(NAME)
        deployment = None if application is None else application.deployments.get(_DRAWER)
        if deployment is None:
            return 0
        return sum(number for state, number in deployment.replica_states.items() if str(state) == "RUNNING")


def application(
    settings: ServeSettings, replicas: Replicas, num_gpus: int, worker: tuple[str, ...] = COMMAND
) -> Any:
    """Return the drawers, for `ray.serve.run` with route_prefix=None.

    Args:
        num_gpus: of each drawer, 0 or 1.
        worker: the command line of a drawer's worker process.
    """
    from ray import serve

    is_fixed = replicas.least == replicas.most

    class RayDrawer(RayReplica):
        def __init__(self) -> None:
            context = serve.get_replica_context()
            super().__init__(settings, context.replica_id.unique_id, worker)

        async def __del__(self) -> None:
            await self.close()

    scaling: dict[str, Any] = (
        {"num_replicas": replicas.least}
        if is_fixed
        else {
            "autoscaling_config": {
                "min_replicas": replicas.least,
                "max_replicas": replicas.most,
                "target_ongoing_requests": 1,
            }
        }
    )
    drawer = serve.deployment(
        RayDrawer,
        name=_DRAWER,
        ray_actor_options={"num_cpus": settings.threads or 1, "num_gpus": num_gpus},
        max_ongoing_requests=1,
        graceful_shutdown_timeout_s=settings.timeout_s,
        health_check_period_s=2,
        **scaling,
    )
    return drawer.bind()


def pool_maker(replicas: Replicas) -> Callable[[ServeSettings, Observe], RayPool]:
    """Return a maker of the pool whose jobs these drawers draw."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException

    ahead = 1 if replicas.least == replicas.most else 2
    return lambda settings, observe: RayPool(
        settings, observe, _Deployment(), ahead, (RayError, RayServeException)
    )


def connect(address: str) -> None:
    """Connect to a cluster, and start Ray Serve there without HTTP of its own.

    Raises:
        Unsupported: Ray Serve is not installed, no cluster answers, or Ray Serve runs there already.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
        from ray import serve
    except ImportError as error:
        raise Unsupported(f"--ray needs Ray Serve: {_NEEDED} ({error})") from None
    check_answers(address)
    try:
        if not ray.is_initialized():
            ray.init(address=address, log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise Unsupported(
            f"--ray {address}: no Ray cluster was reached ({first}); start one with `ray start --head`"
        ) from None
    try:
        ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    except ValueError:
        serve.start(proxy_location="Disabled")
        return
    raise Unsupported(
        f"--ray {address}: Ray Serve runs there already; end it with `serve shutdown`, or deploy "
        "vivace.serve.queue.ray_application.application() beside what it serves"
    )


def num_gpus() -> int:
    """Return the GPUs of the cluster."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))
