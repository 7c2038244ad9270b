"""GPUs by name: as people write them, as drivers do, and what is no GPU that vivace knows."""

import itertools

import pytest

from vivace.cli.plan import parse_card
from vivace.errors import UsageError
from vivace.evidence.lint.columns import column_of
from vivace.evidence.recommendation.advise import checked_gpu
from vivace.evidence.recommendation.planning import card_of
from vivace.foundation.hardware import (
    CHIPS,
    Gpu,
    Near,
    architecture_of,
    capability_of,
    gpu_in,
    known_gpu,
    named_gpu,
    near,
)

WRITTEN = {
    "RTX 4070": ["RTX4070", "4070", "rtx-4070", "rtx_4070", "NVIDIA GeForce RTX 4070", "GeForce RTX™ 4070 12GB"],
    "RTX 4070 Ti": ["4070ti", "4070 Ti", "RTX4070TI", "rtx 4070-ti"],
    "RTX 4070 Super": ["4070 super", "4070s", "RTX4070SUPER"],
    "RTX 4070 Ti Super": ["rtx4070tisuper", "4070 ti s", "4070tis", "NVIDIA GeForce RTX 4070 Ti SUPER"],
    "RTX 4060 Ti 16GB": ["4060ti 16gb", "4060ti16gb", "RTX 4060 Ti (16 GB)"],
    "RTX 3060 12GB": ["3060 12gb", "RTX3060-12G", "GeForce RTX 3060 12 GB"],
    "RTX 4090 Laptop": ["NVIDIA GeForce RTX 4090 Laptop GPU", "4090 mobile", "4090m", "RTX 4090 Max-Q"],
    "RTX 4090 D": ["4090D", "NVIDIA GeForce RTX 4090 D"],
    "RTX 4050 Laptop": ["RTX 4050", "4050"],
    "GTX 1660 Super": ["gtx1660s", "1660 super"],
    "H100": ["H100 80GB HBM3", "NVIDIA H100 80GB HBM3", "h100-sxm", "H100 SXM5 80GB"],
    "H100 PCIe": ["NVIDIA H100 PCIe", "h100-pcie-80gb"],
    "H100 NVL": ["NVIDIA H100 NVL"],
    "A100 40GB": ["A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB", "a100 40g"],
    "A100 80GB": ["NVIDIA A100-SXM4-80GB", "A100 80GB PCIe"],
    "GH200": ["NVIDIA GH200 480GB"],
    "A10G": ["NVIDIA A10G", "a10g"],
    "T4": ["Tesla T4", "NVIDIA T4"],
    "V100 32GB": ["Tesla V100-SXM2-32GB"],
    "RTX A6000": ["A6000", "NVIDIA RTX A6000", "rtxa6000"],
    "RTX 6000 Ada": ["NVIDIA RTX 6000 Ada Generation", "rtx6000ada", "6000 Ada"],
    "RTX PRO 6000": [
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "6000 pro",
    ],
    "Quadro RTX 6000": ["Quadro RTX 6000"],
    "GB10": ["DGX Spark", "NVIDIA GB10"],
    "TITAN RTX": ["NVIDIA TITAN RTX"],
}  # fmt: skip


def parsed(text: str) -> float | Gpu | None:
    """What `--card` makes of a text."""
    return parse_card(text)


@pytest.mark.parametrize(
    ("name", "written"), [(name, written) for name, several in WRITTEN.items() for written in several]
)
def test_names_are_read_as_people_write_them(name: str, written: str) -> None:
    for each in (written, written.lower(), written.upper(), f"  {written} "):
        assert named_gpu(each).name == name


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("banana", "give a name such as H100"),
        ("", "give a name such as H100"),
        ("RTX", "give a name such as H100"),
        ("RTX 4071", "did you mean 'RTX 4070'"),
        ("4090 Ti", "did you mean 'RTX 4090'"),
        ("H1000", "did you mean 'H100'"),
        ("RTX 6000", "did you mean 'RTX PRO 6000' or 'RTX 6000 Ada' or 'Quadro RTX 6000'"),
        ("8xH100", "did you mean 'H100'"),
        ("MI300X", "AMD's"),
        ("AMD Radeon RX 7900 XTX", "AMD's"),
        ("9070 XT", "AMD's"),
        ("Apple M3 Max", "Apple's"),
        ("m4", "Apple's"),
        ("Arc B580", "Intel's"),
        ("TPU v5e", "Google's"),
        ("AMD EPYC 9B14", "AMD's"),
        ("Xeon Gold", "a CPU"),
        ("A100 5GB", "A100 has 40 or 80 GB of memory, not 5"),
        ("RTX 4070 100GB", "RTX 4070 has 12 GB of memory, not 100"),
        ("H100 MIG 1g.10gb", "a part of a GPU"),
        ("\x1b[31mH100", "give a name such as"),
    ],
)
def test_other_names_are_refused_in_words(text: str, says: str) -> None:
    with pytest.raises(UsageError, match="--gpu") as failed:
        named_gpu(text)
    assert says in str(failed.value)
    assert "\x1b" not in str(failed.value)
    assert failed.value.exit_code == 2
    assert known_gpu(text) is None


def test_the_table_is_of_one_piece() -> None:
    assert len(CHIPS) > 110
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)
    for chip in CHIPS:
        assert chip.bf16 <= chip.half <= chip.eight <= chip.four, chip.name
        assert len(set(chip.memory_gb)) == len(chip.memory_gb)
        assert chip.memory_gb[0] < chip.bandwidth_gb_s < 10_000, chip.name
        assert chip.is_laptop == ("Laptop" in chip.name)
    by_architecture = itertools.groupby(sorted((c.architecture, c.capability[0]) for c in CHIPS))
    assert len({name for (name, _), _ in by_architecture}) == 7
    assert named_gpu("RTX 4090").chip.half == pytest.approx(330.3, rel=1e-3), "as Ada's white paper has it"
    assert named_gpu("RTX 3090").chip.bf16 == pytest.approx(71, rel=1e-2), "as GA102's has it"


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_all_commands_know_the_same_gpus(chip) -> None:
    """`recommend`, `plan`, `lint` and what `tune` starts from."""
    for name in (chip.name, *chip.aliases, f"NVIDIA {chip.name}"):
        assert checked_gpu(name, ()) == chip.name
        assert card_of(None, name)[0] is chip
        card = parsed(name)
        assert isinstance(card, Gpu)
        fitted = card_of(card, None)[1]
        assert fitted is not None
        assert fitted.num_bytes == 1e9 * chip.memory_gb[0]
        assert (architecture_of(name), capability_of(name)) == (chip.architecture, chip.capability)
        assert near(name, chip.name) is Near.SAME
    column = column_of(f"{chip.name} (s)")
    assert chip.name in ("A2", "L2", "GB10") or (column is not None and column.of == chip.name)


def test_a_card_is_a_size_or_a_name() -> None:
    assert (parsed("12"), parsed("12GB"), parsed("0.5"), parsed("24 g")) == (12.0, 12.0, 0.5, 24.0)
    assert isinstance(parsed("4090"), Gpu)
    for text in ("-1", "nan", "inf", "20000"):
        with pytest.raises(ValueError, match="10000 GB"):
            parsed(text)
    with pytest.raises(UsageError, match="--card 'banana'"):
        parsed("banana")


@pytest.mark.parametrize(
    ("text", "name", "rest"),
    [
        ("A100 (s)", "A100", "(s)"),
        ("model memory rtx 4090", "RTX 4090", "model memory"),
        ("p50 b200", "B200", "p50"),
        ("# Results on 1080 x 1920", "", "# Results on 1080 x 1920"),
        ("2060 steps, A2", "", "2060 steps, A2"),
        ("RTX PRO 6000 Blackwell, 28 steps", "RTX PRO 6000", "28 steps"),
    ],
)
def test_a_gpu_within_a_text(text: str, name: str, rest: str) -> None:
    assert gpu_in(text) == (name, rest)
