"""Joules of loops: power between two moves of a counter, cases resumed, and the page that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import energy
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.energy import Device, loop, read_rows
from benchmarks.energy import energy as command
from benchmarks.energy_cases import CASES

QUICK = ["--device", "cpu", "--shrink", "48", "--seconds", "0.01", "--warmup-s", "0"]
PRODUCTS = ["--only", "zeros", "--only", "tensor, qkv"]


class SlowCounter:
    """A GPU of constant power, whose calls take some time, and whose counter moves ten times a second."""

    def __init__(self, watts: float, call_s: float) -> None:
        self.now, self._watts, self._call_s, self._launched = 0.0, watts, call_s, 0.0

    def call(self, _: int) -> None:
        self._launched = max(self._launched, self.now) + self._call_s

    def device(self) -> Device:
        return Device(self._mark, lambda: self._watts * 0.1 * (self.now // 0.1), clock=lambda: self.now)

    def _mark(self) -> object:
        end = self._launched

        def wait() -> None:
            self.now = max(self.now, end)

        return wait


@pytest.mark.parametrize(("watts", "call_s"), [(690.0, 240e-6), (120.0, 5e-3)])
def test_a_calls_joules_are_power_by_time(watts: float, call_s: float) -> None:
    gpu = SlowCounter(watts, call_s)
    row = loop(gpu.call, gpu.device(), seconds=1.3, warmup_s=0.25)
    assert row["us"] == pytest.approx(call_s * 1e6, rel=1e-3)
    assert row["w"] == pytest.approx(watts, rel=0.015), "the counter alone is off by 8 %"
    assert row["j"] == pytest.approx(watts * call_s, rel=0.015)
    assert row["calls"] == pytest.approx(1.3 / call_s, rel=0.05)


@pytest.mark.long
def test_a_record_is_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "energy.json"
    arguments = ["--record", str(record), *QUICK, *PRODUCTS]
    assert run(command, [*arguments, "--limit-s", "0"]) == MEASURED_IN_PART
    assert "the same command goes on" in capfd.readouterr().err
    assert not record.exists()
    assert run(command, arguments) == MEASURED_IN_PART, "a CPU has no attention in e4m3"
    lines = capfd.readouterr().out.splitlines()
    rows = read_rows(record)
    assert len(lines) == len(rows) == 2 * sum("zeros" in c.name or "tensor, qkv" in c.name for c in CASES)
    assert [line for line in lines if "joules not counted" not in line and "runs on GPUs" not in line] == []
    assert "attention in fp8" in rows["attention fp8, zeros", 0]["reason"]
    monkeypatch.setattr(energy, "loop", lambda *_: pytest.fail("it is in the record"))
    assert run(command, arguments) == MEASURED_IN_PART
    assert capfd.readouterr().out.count("(in the record already)") == len(rows) - 2
    assert run(command, [*arguments, "--shrink", "96"]) == 3
    assert "give --record another file" in capfd.readouterr().err
