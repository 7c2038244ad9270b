"""What it rests on that a technique runs on a device."""

from pathlib import Path
from typing import Any

import pytest

from vivace.cli.doctor import _claims, _claims_in_words
from vivace.evidence.committed import committed_tables, community_tables
from vivace.evidence.standing import CPU, ClaimBasis, TechniqueClaim, claims
from vivace.evidence.tables import EvidenceRow, EvidenceTable
from vivace.foundation.hardware import Near, near
from vivace.foundation.stats import Interval
from vivace.machinery.technique import Machine
from vivace.recipes.resolve import resolve


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


CARDS = {
    "NVIDIA GeForce RTX 2080": gpu(7, 5),
    "NVIDIA A100-SXM4-40GB": gpu(8, 0),
    "NVIDIA GeForce RTX 3090": gpu(8, 6),
    "NVIDIA GeForce RTX 4060": gpu(8, 9),
    "NVIDIA GeForce RTX 4090": gpu(8, 9),
    "NVIDIA L4": gpu(8, 9),
    "NVIDIA B200": gpu(10, 0),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": gpu(12, 0),
    "NVIDIA GB10": gpu(12, 1),
    "AMD Instinct MI300X": Machine("cuda", "the GPU", None, "c++", has_all_packages=True, is_rocm=True),
    "Apple M3 Max": Machine("mps", "the GPU", None, "c++", has_all_packages=True),
}
FIRST_WITH = {"bf16": (8, 0), "fp8": (8, 9), "mxfp8": (10, 0), "nvfp4": (10, 0)}
"""Capabilities from which NVIDIA's GPUs multiply in a precision."""


@pytest.mark.parametrize("name", CARDS)
def test_nothing_runs_in_a_precision_that_a_card_lacks(name: str) -> None:
    machine = CARDS[name]
    capability = machine.capability
    for claim in claims(machine, name, [*committed_tables(), *community_tables()]):
        assert claim.standing is not ClaimBasis.HERE
        (technique,) = resolve(claim.recipe)
        precision = technique.facts.arithmetic.precision or ""
        least = FIRST_WITH.get(precision)
        lacks = (
            precision.endswith(("fp8", "fp4"))
            if capability is None
            else least is not None and capability < least
        )
        if lacks:
            assert claim.standing is ClaimBasis.REFUSED, claim.recipe
        if claim.standing in (ClaimBasis.VIVACE, ClaimBasis.GENERATION):
            assert near(name, "H200") is not Near.OTHER, "vivace's GPU records are of Hopper"
    refused = {each.recipe for each in claims(machine, name, ()) if each.standing is ClaimBasis.REFUSED}
    assert ("attention(flash3_fp8)" in refused) is (capability != (9, 0))
    assert ("fused(bf16)" in refused) is (capability is None or capability < (8, 0))
