"""Limits, energy and places of a real GPU."""

from pathlib import Path

import pytest

import vivace
from vivace.benchmark import Timing
from vivace.benchmark.places.local_pool import gpus_of_this_host
from vivace.benchmark.studies import start_launcher
from vivace.errors import UsageError
from vivace.foundation.spec.record import Outcome
from vivace.measure.measured_ceilings import keep, measure_ceilings
from vivace.measure.this_environment import environment

pytestmark = pytest.mark.gpu
TIMING = Timing(rounds=2, repeats=10, max_warmup=3)


def test_a_row_tells_limit_and_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path / "cache"))
    ceilings = measure_ceilings(environment("cuda"), time_limit_s=60)
    keep(ceilings)
    half, single = ceilings.per_s("gemm", "bf16"), ceilings.per_s("gemm", "fp32")
    assert half is not None
    assert single is not None
    assert half > 2 * single, "tensor cores"
    assert (ceilings.per_s("copy") or 0) > (ceilings.per_s("host_to_device") or 0) > 0
    attention = ceilings.per_s("attention", "bf16")
    assert attention is not None
    assert attention < half
    run = vivace.bench(
        "synthetic:sd15",
        ["baseline", "tiny_vae"],
        num_inference_steps=10,
        text="embeddings",
        timing=TIMING,
        store=tmp_path / "store",
    )
    for row in run.rows():
        assert row.limit is not None
        assert row.limit.problem is None
        assert row.limit.share is not None, row.limit.reason
        assert 0.05 < row.limit.share < 1
        parts = (row.limit.limit_s, row.limit.kernels_s, row.limit.gaps_s, row.limit.outside_s)
        assert row.latency is not None
        assert sum(p for p in parts if p is not None) == pytest.approx(row.latency.median.point)
        assert row.gpu is not None
        if row.gpu.reason is None:
            assert row.gpu.energy_j is not None
            assert row.gpu.power_w is not None
            # The mean power times the time is the energy, but for the pauses between calls.
            assert row.gpu.energy_j == pytest.approx(row.gpu.power_w * row.latency.median.point, rel=0.5)


def test_a_gpu_of_several_is_the_only_one_that_its_worker_sees(tmp_path: Path) -> None:
    with start_launcher("cuda") as launcher:
        places = gpus_of_this_host(launcher, "all")
        with pytest.raises(UsageError, match=f"this host has {len(places)}"):
            gpus_of_this_host(launcher, len(places) + 1)
    run = vivace.bench(
        "tiny-sd",
        ["baseline", "steps(2)", "tiny_vae"],
        num_inference_steps=3,
        quality=False,
        rivals=False,
        timing=Timing(rounds=2, repeats=2, max_warmup=1),
        store=tmp_path / "store",
        gpus="all",
    )
    assert {r.outcome for r in run} == {Outcome.MEASURED}
    used = [compared.records[0].environment.place for compared in run.comparisons]
    assert len(used) == min(len(places), 2)
    for compared in run.comparisons:
        for record in compared.records:
            assert record.environment.place in places
            uuids = {r.conditions.get("gpu_uuid") for r in record.rounds} - {None}
            assert uuids <= {record.environment.place.uuid if record.environment.place else None}
            assert "CUDA_VISIBLE_DEVICES" not in record.environment.variables
