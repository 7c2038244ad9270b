"""Metrics for Prometheus, read from the ledger at each scrape so that they add up; and Grafana's dashboard of them."""

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


class Metrics(Collector):
    def __init__(self) -> None:
        self._pool: ReplicaPool | None = None
        self._registry = CollectorRegistry()
        kind: dict[str, Any] = {"registry": self._registry}
        self._phases = Histogram(
            "vivace_phase_seconds", "Seconds of an image by phase", ["phase"], buckets=_SECONDS, **kind
        )
        self._steps = Histogram(
            "vivace_steps", "Denoising steps of an image", buckets=(1, 2, 4, 8, 16, 32, 64), **kind
        )
        self._seconds = Histogram(
            "vivace_image_seconds",
            "Seconds from accepting an image until it is drawn",
            buckets=_SECONDS,
            **kind,
        )
        self._answers = Counter(
            "vivace_http_answers", "Answers by path and status", ["path", "status"], **kind
        )
        self._registry.register(self)

    def observe_answer(self, path: str, status: int) -> None:
        """Count an answer; paths that are not the server's count as one."""
        path = next(
            (own for own in _PATHS if path == own or (own[-1] == "/" != own and path.startswith(own))),
            "other",
        )
        self._answers.labels(path, status).inc()

    def watch(self, pool: ReplicaPool) -> None:
        self._pool = pool

    def observe(self, job: ImageJob, event: dict[str, Any]) -> None:
        self._steps.observe(event["steps"])
        self._seconds.observe(time.monotonic() - job.accepted_at)
        for phase, seconds in event["phases"].items():
            self._phases.labels(phase).observe(seconds)
        if job.began_at is not None:
            self._phases.labels("queue").observe(job.began_at - job.accepted_at)

    def observe_encoding(self, seconds: float) -> None:
        self._phases.labels("encode").observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        if self._pool is None:
            return
        ledger = self._pool.ledger
        yield CounterMetricFamily("vivace_images_accepted", "Images that were accepted", ledger.accepted)
        yield CounterMetricFamily(
            "vivace_images_rejected", "Images that were refused for want of room", ledger.rejected
        )
        states = GaugeMetricFamily(
            "vivace_images", "Accepted images by state; their sum is accepted", labels=["state"]
        )
        for state in State:
            states.add_metric([state.value], ledger.states[state])
        waiting_s = self._pool.line.seconds()
        yield states
        yield GaugeMetricFamily("vivace_waiting_seconds", "Predicted seconds of waiting", waiting_s)
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


def _rate(metric: str) -> str:
    return f"sum(rate({metric}[$__rate_interval]))"


def _quantile(share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate(vivace_image_seconds_bucket[$__rate_interval])))"


_PHASE = "sum by (phase) (rate(vivace_phase_seconds_{}[$__rate_interval]))"
_ENERGY = f"{_rate('vivace_worker_energy_joules_total')} / {_rate('vivace_steps_count')}"
_PANELS: tuple[tuple[str, str, dict[str, str]], ...] = (
    (
        "Images a second",
        "ops",
        {
            "accepted": _rate("vivace_images_accepted_total"),
            "drawn": _rate("vivace_steps_count"),
            "refused (429)": _rate("vivace_images_rejected_total"),
        },
    ),
    ("Seconds from accepting to drawn", "s", {f"p{round(100 * q)}": _quantile(q) for q in (0.5, 0.95, 0.99)}),
    ("Images by state", "short", {"{{state}}": "sum by (state) (vivace_images)"}),
    (
        "Seconds of an image by phase",
        "s",
        {"{{phase}}": f"{_PHASE.format('sum')} / {_PHASE.format('count')}"},
    ),
    ("Predicted seconds of waiting", "s", {"waiting": "max(vivace_waiting_seconds)"}),
    (
        "Workers that can draw",
        "short",
        {
            "up": "sum(vivace_worker_up)",
            "restarts": "sum(increase(vivace_worker_restarts_total[$__rate_interval]))",
        },
    ),
    ("Memory of workers", "bytes", {"{{worker}} {{kind}}": "vivace_worker_memory_bytes"}),
    ("Energy of an image", "joule", {"J an image": _ENERGY}),
    (
        "LoRA exchanges and steps",
        "ops",
        {
            "exchanges a second": _rate("vivace_lora_exchanges_total"),
            "steps a second": _rate("vivace_steps_sum"),
        },
    ),
)
"""Title, unit, and expressions by their legends."""


def dashboard() -> dict[str, Any]:
    """Return the JSON of Grafana's dashboard: three panels in a row."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [
        {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "gridPos": {"x": 8 * (number % 3), "y": 8 * (number // 3), "w": 8, "h": 8},
            "datasource": source,
            "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + index), "expr": text, "legendFormat": legend}
                for index, (legend, text) in enumerate(expressions.items())
            ],
        }
        for number, (title, unit, expressions) in enumerate(_PANELS)
    ]
    variable = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    return {
        "title": "vivace serve",
        "uid": "vivace-serve",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }
