"""The highest rates of this machine: measured, kept, and found again for the same device only."""

from pathlib import Path

import pytest

from tests.make import make_environment
from vivace.measure import measured_ceilings as module
from vivace.measure.measured_ceilings import keep, known_ceilings, measure_ceilings


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "_LEAST_S", 1e-4)
    monkeypatch.setattr(module, "_REPEATS", 2)
    monkeypatch.setitem(module._GEMMS, "cpu", ((64, 64, 64), (256, 256, 256)))
    monkeypatch.setitem(module._ATTENTION, "cpu", ((1, 2, 64, 32),))
    monkeypatch.setitem(module._COPIED_BYTES, "cpu", 2**20)


@pytest.mark.usefixtures("small")
def test_a_cpu_is_measured_once_and_found_again(tmp_path: Path) -> None:
    environment = make_environment()
    assert known_ceilings(environment) is None
    announced: list[str] = []
    measured = measure_ceilings(environment, report=announced.append)
    assert announced[0] == "copy"
    assert {c.name for c in measured.ceilings} == {
        "copy",
        "gemm fp32",
        "gemm bf16",
        "attention fp32",
        "attention bf16",
    }
    assert not measured.missing
    assert 1e8 < (measured.per_s("copy") or 0) < 1e13, "bytes a second of a real machine"
    cases = [c.per_s for c in measured.ceilings if c.name == "gemm fp32"]
    assert len(cases) == 2
    assert measured.per_s("gemm", "fp32") == max(cases), "the fastest shape is the ceiling"
    assert keep(measured).is_relative_to(tmp_path)
    assert known_ceilings(environment) == measured
    for other in (
        {"device_name": "another CPU"},
        {"driver": "580.1"},
        {"libraries": {"torch": "2.14.0"}},
        {"num_threads": 2},
    ):
        assert known_ceilings(environment.model_copy(update=other)) is None, other
    assert known_ceilings(environment.model_copy(update={"num_cores": 64})) == measured


@pytest.mark.usefixtures("small")
def test_an_operation_that_fails_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: str, precision: str, *shape: int) -> None:
        raise RuntimeError(f"no {precision} here\nsecond line")

    monkeypatch.setattr(module, "_gemm", refuse)
    measured = measure_ceilings(make_environment())
    assert measured.missing == {"gemm fp32": "no fp32 here", "gemm bf16": "no bf16 here"}
    assert measured.per_s("copy")
    assert measured.per_s("attention", "bf16")
