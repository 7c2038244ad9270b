"""What it rests on that a technique runs on a device."""

from pathlib import Path
from typing import Any

import pytest

from vivace.cli.doctor import _claims, _claims_in_words
from vivace.evidence.standing import CPU, ClaimBasis, TechniqueClaim, claims, devices_of
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.stats import Interval
from vivace.technique import Machine


def gpu(major: int, minor: int) -> Machine:
    return Machine("cuda", "the GPU", (major, minor), "c++", has_all_packages=True)


def row(recipe: str, **changes: Any) -> EvidenceRow:
    figures = {"latency": Interval(1.0, None, None), "num_techniques": 1, "same_picture": True}
    return EvidenceRow(recipe=recipe, **figures | changes)


def table(kind: Any, device_name: str, *rows: EvidenceRow, device: str = "cuda") -> EvidenceTable:
    return EvidenceTable(
        kind=kind, place="x", model="sdxl", gpu=device_name, device=device, baseline="baseline", rows=rows
    )


def claim_of(recipe: str, machine: Machine, name: str, *tables: EvidenceTable) -> TechniqueClaim:
    (claim,) = (each for each in claims(machine, name, tables) if each.recipe == recipe)
    return claim


TABLES = (
    table("committed", "NVIDIA H100 80GB HBM3", row("bf16+quantize(fp8)+compile"), row("fused(fp8)")),
    table("community", "NVIDIA GeForce RTX 4090", row("quantize(int8)+compile(mode=max-autotune)")),
    table("own", "NVIDIA GeForce RTX 4090", row("quantize(int8)")),
    table("published", "RTX 4090", row("quantize(nf4)")),
    table("community", "NVIDIA GeForce RTX 4090", row("quantize(int4)", latency=None, outcome="crashed")),
)


@pytest.mark.parametrize(
    ("recipe", "standing", "why"),
    [
        ("quantize(int8)", ClaimBasis.HERE, "RTX 4090"),
        ("compile(max-autotune)", ClaimBasis.OTHERS, "RTX 4090"),
        ("compile(default)", ClaimBasis.DECLARED, ""),
        ("quantize(nf4)", ClaimBasis.DECLARED, ""),
        ("quantize(int4)", ClaimBasis.DECLARED, ""),
        ("fused(fp8)", ClaimBasis.COMPILED, ""),
        ("fused(fp8, convolutions=fp8)", ClaimBasis.COMPILED, ""),
    ],
)
def test_on_an_rtx_4090(recipe: str, standing: ClaimBasis, why: str) -> None:
    claim = claim_of(recipe, gpu(8, 9), "NVIDIA GeForce RTX 4090", *TABLES)
    assert (claim.standing, claim.why, claim.devices) == (standing, why, why)


def test_what_a_card_lacks_is_refused_whatever_was_measured() -> None:
    tables = (table("own", "NVIDIA GeForce RTX 4090", row("attention(flash3_fp8)")),)
    claim = claim_of("attention(flash3_fp8)", gpu(8, 9), "NVIDIA GeForce RTX 4090", *tables)
    assert claim.standing is ClaimBasis.REFUSED
    assert "9.x" in claim.why
    assert claim.devices == ""
    for recipe in ("quantize(fp8)", "fused(fp8)", "quantize(nvfp4)"):
        assert claim_of(recipe, gpu(8, 6), "NVIDIA GeForce RTX 3090").standing is ClaimBasis.REFUSED


def test_a_record_of_the_generation_is_more_than_none() -> None:
    claim = claim_of("fused(fp8)", gpu(9, 0), "NVIDIA H200", *TABLES)
    assert (claim.standing, claim.devices) == (ClaimBasis.GENERATION, "H100")
    assert claim_of("fused(fp8)", gpu(9, 0), "NVIDIA H100", *TABLES).standing is ClaimBasis.VIVACE
    claim = claim_of("quantize(int8)", gpu(8, 9), "NVIDIA L40S", *TABLES)
    assert (claim.standing, claim.devices) == (ClaimBasis.GENERATION, "RTX 4090")


def test_cpus_and_gpus_say_nothing_of_each_other() -> None:
    tables = (*TABLES, table("committed", "Some Xeon", row("quantize(int8)"), device="cpu"))
    cpu = Machine("cpu", "the CPU", None, "c++", has_all_packages=True)
    claim = claim_of("quantize(int8)", cpu, "Another CPU", *tables)
    assert (claim.standing, claim.devices) == (ClaimBasis.VIVACE, CPU)
    assert claim_of("quantize(fp8)", cpu, "Another CPU", *tables).standing is ClaimBasis.DECLARED


def test_doctor_tells_that_nobody_measured_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    made, advice = _claims(gpu(8, 9), "NVIDIA GeForce RTX 4060")
    assert any("no record is of NVIDIA GeForce RTX 4060 or its generation" in line for line in advice)
    lines = "\n".join(_claims_in_words(made))
    assert "runs here    compiled only:\n             fused(bf16), fused(fp8)" in lines
    assert "cannot       attention(flash3)" in lines
    made, advice = _claims(gpu(9, 0), "NVIDIA H100 PCIe")
    assert advice == []
    assert "runs here    measured on its generation (H100" in "\n".join(_claims_in_words(made))


def test_devices_by_whose_records_they_are() -> None:
    by_choice = devices_of(TABLES, "community")
    assert {device for devices in by_choice.values() for device in devices} == {"RTX 4090"}
    assert len([devices for devices in devices_of(TABLES, "committed").values() if devices == ["H100"]]) == 4
