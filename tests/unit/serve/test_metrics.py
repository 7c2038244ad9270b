"""What /metrics and the dashboard show."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.served import Served, fake
from vivace.serve.worker.warm_session import EnergyMeter


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("loras")
    for name in ("outlines", "ink"):
        (folder / f"{name}.safetensors").touch()
    with fake(folder, loras=folder) as running:
        running.draw(n=3)
        for name in ("outlines", "outlines", "ink"):
            running.draw(loras=[{"name": name}])
        yield running


def values(server: Served) -> dict[str, float]:
    lines = server.send("/metrics").body.decode().splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    }


def test_energy_memory_exchanges_and_phases_are_counted(server: Served) -> None:
    metrics = values(server)
    assert metrics['vivace_worker_energy_joules_total{worker="1"}'] == pytest.approx(6 * 2.5)
    assert metrics['vivace_worker_memory_bytes{kind="rss",worker="1"}'] == 1000
    assert metrics['vivace_lora_exchanges_total{worker="1"}'] == 2, "the same LoRA twice is one exchange"
    for phase in ("queue", "text", "denoise", "decode", "encode"):
        assert metrics[f'vivace_phase_seconds_count{{phase="{phase}"}}'] == 6
    assert metrics["vivace_image_seconds_count"] == metrics["vivace_steps_count"] == 6
    assert metrics["vivace_steps_sum"] == 6 * 4


def test_the_dashboard_shows_what_metrics_has(server: Served) -> None:
    dashboard = json.loads(server.send("/dashboard.json").body)
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    named = {name for text in expressions for name in re.findall(r"\bvivace_\w+", text)}
    there = {re.split(r"[{ ]", name)[0] for name in values(server)}
    assert len(named) > 10
    assert named <= there
    labels = {(name, value) for text in expressions for name, value in re.findall(r'(\w+)=~"([^"]+)"', text)}
    states = set(server.states())
    assert all(name == "state" and set(value.split("|")) <= states for name, value in labels)


def test_a_gpu_without_a_counter_has_no_energy() -> None:
    assert EnergyMeter(None).since_last() == {}
    readings = iter([100.0, 130.5])
    meter = EnergyMeter(SimpleNamespace(energy_j=lambda: next(readings)))
    assert meter.since_last() == {"energy_j": 30.5}
