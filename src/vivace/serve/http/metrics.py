"""Metrics for Prometheus: read from the ledger at each scrape, so that they add up."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vivace.serve.queue.jobs import ImageJob, State
from vivace.serve.queue.pool import ReplicaPool

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


_PATHS = (
    "/",
    "/livez",
    "/readyz",
    "/metrics",
    "/v1/models",
    "/v1/models/",
    "/v1/images/generations",
    "/v1/images/edits",
    "/v1/images/files/",
)


class Metrics:
    """The text of /metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._phases = Histogram(
            "vivace_phase_seconds",
            "Seconds of an image by phase",
            ["phase"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._steps = Histogram(
            "vivace_steps",
            "Denoising steps of an image",
            buckets=(1, 2, 4, 8, 16, 32, 64),
            registry=self.registry,
        )

        self._seconds = Histogram(
            "vivace_image_seconds",
            "Seconds from accepting an image until it is drawn",
            buckets=_SECONDS,
            registry=self.registry,
        )

        self._answers = Counter(
            "vivace_http_answers", "Answers by path and status", ["path", "status"], registry=self.registry
        )

    def observe_answer(self, path: str, status: int) -> None:
        """Count an answer; paths that are not the server's count as one."""
        path = next(
            (own for own in _PATHS if path == own or (own[-1] == "/" != own and path.startswith(own))),
            "other",
        )
        self._answers.labels(path, status).inc()

    def watch(self, pool: ReplicaPool) -> None:
        """Report the jobs and workers of a pool, too."""
        self.registry.register(_OfPool(pool))

    def observe(self, job: ImageJob, event: dict[str, Any]) -> None:
        """Count a finished job."""
        self._steps.observe(event["steps"])
        self._seconds.observe(time.monotonic() - job.accepted_at)
        for phase, seconds in event["phases"].items():
            self._phases.labels(phase).observe(seconds)
        if job.began_at is not None:
            self._phases.labels("queue").observe(job.began_at - job.accepted_at)

    def observe_encoding(self, seconds: float) -> None:
        self._phases.labels("encode").observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _OfPool(Collector):
    def __init__(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def collect(self) -> Iterator[Metric]:
        ledger, line = self._pool.ledger, self._pool.line
        yield CounterMetricFamily("vivace_images_accepted", "Images that were accepted", ledger.accepted)
        yield CounterMetricFamily(
            "vivace_images_rejected", "Images that were refused for want of room", ledger.rejected
        )
        states = GaugeMetricFamily(
            "vivace_images", "Accepted images by state; their sum is accepted", labels=["state"]
        )
        for state in State:
            states.add_metric([state.value], ledger.states[state])
        yield states
        yield GaugeMetricFamily("vivace_waiting_seconds", "Predicted seconds of waiting", line.seconds())
        up = GaugeMetricFamily("vivace_worker_up", "Whether a worker can draw", labels=["worker"])
        restarts = CounterMetricFamily("vivace_worker_restarts", "Restarts of a worker", labels=["worker"])
        exchanges = CounterMetricFamily("vivace_lora_exchanges", "Exchanges of LoRAs", labels=["worker"])
        memory = GaugeMetricFamily(
            "vivace_worker_memory_bytes", "Memory of a worker", labels=["worker", "kind"]
        )
        energy = CounterMetricFamily(
            "vivace_worker_energy_joules",
            "Energy of a worker's GPU from when it was ready to its last image",
            labels=["worker"],
        )
        for replica in self._pool.replicas:
            name = [str(replica.number)]
            up.add_metric(name, float(replica.is_able))
            restarts.add_metric(name, replica.num_restarts)
            exchanges.add_metric(name, replica.num_exchanges)
            if replica.energy_j is not None:
                energy.add_metric(name, replica.energy_j)
            for kind, num_bytes in replica.memory.items():
                memory.add_metric([*name, kind.removesuffix("_bytes")], num_bytes)
        yield from (up, restarts, exchanges, memory, energy)
