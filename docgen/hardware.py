"""The page docs/hardware.md: which mode of which technique runs on which hardware, and what it does to weights and
matmuls, as the techniques declare it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.block_formats import RECORD
from docgen import block_formats, memory_caps
from docgen.compiled_kernels import CompiledKernels
from vivace.answers.markdown import markdown_lines
from vivace.evidence.committed import committed_tables, community_tables
from vivace.evidence.standing import records_by_choice
from vivace.evidence.tables import EvidenceTable, Kind
from vivace.foundation.hardware import CHIPS, Chip
from vivace.machinery.technique import Arithmetic, Machine
from vivace.recipes.describe import choices, states, variants
from vivace.techniques import TECHNIQUES

_GPUS = (
    ("Turing, T4, RTX 20", (7, 5)),
    ("Ampere, A100", (8, 0)),
    ("Ampere, RTX 30", (8, 6)),
    ("Ada, RTX 40", (8, 9)),
    ("Hopper, H100", (9, 0)),
    ("Blackwell, B200", (10, 0)),
    ("Blackwell, RTX 50", (12, 0)),
)
# Plain names, since they appear in reasons.
MACHINES: dict[str, Machine] = {
    "CPU": Machine("cpu", "the CPU", None, "c++", has_all_packages=True),
    **{
        f"{name} ({major}.{minor})": Machine("cuda", "the GPU", (major, minor), "c++", has_all_packages=True)
        for name, (major, minor) in _GPUS
    },
    "AMD, ROCm": Machine("cuda", "the GPU", None, "c++", has_all_packages=True, is_rocm=True),
    "Intel, XPU": Machine("xpu", "the GPU", None, "c++", has_all_packages=True),
    "Apple, MPS": Machine("mps", "the GPU", None, "c++", has_all_packages=True),
}


def page(
    note: str, compiled: Path, answers: Path, runs: Path, tables: Sequence[EvidenceTable] | None = None
) -> str:
    """Return the page as Markdown.

    Args:
        compiled: the record of kernels compiled for each compute capability.
        answers, runs: see `docgen.memory_caps`.
        tables: records; None for those that ship with vivace.
    """
    kernels = CompiledKernels(compiled)
    bases = _bases((*committed_tables(), *community_tables()) if tables is None else tables)
    lines = [
        note,
        "# What runs on which hardware\n",
        "From the techniques' own declarations, assuming that every optional package is installed; a ✓ is declared, "
        "not measured; *compiled* is declared, and vivace's own kernels [compile](#kernels-compiled) for it and are "
        "not measured. `vivace doctor` says of each technique what it rests on for your GPU. A model can still be "
        "refused, for its precision or the size of its attention heads.\n",
        "*Weights*: how the affected layers store their weights. *Matmuls*: the precision of their matmuls (and "
        "convolutions). Only fewer bits here can make them faster; fewer bits for the weights alone save memory, "
        "and the weights are dequantised before each matmul. *As before* means the recipe's own precision: fp16 or "
        "bf16 on a GPU. [Techniques](techniques.md) says why each helps and what it costs; a "
        "[decision](adr/0005-no-tensorrt.md) says what to use instead of TensorRT's int8 convolutions.\n",
        "*Rests on*: the devices of which the tables that ship with vivace have a time, and those of which owners of "
        "cards [reported](contribute.md) one. *Declared*: those tables have none.\n",
        "**What has been run**: x86 CPUs (every test), and NVIDIA's H100 and H200, from which all GPU records are. On "
        "NVIDIA's other GPUs the rules follow what NVIDIA, PyTorch and the packages document. On AMD's (ROCm), Intel's "
        "(XPU) and Apple's (MPS) GPUs nothing has been run: PyTorch's own device functions are used there, what is "
        "known not to work is refused in words, and tests check the rules with such machines faked. If you have one, "
        "the output of `vivace doctor` and a record are welcome.\n",
    ]
    rows: list[list[str]] = []
    everywhere: list[str] = []
    reasons: dict[str, int] = {}
    for technique in TECHNIQUES.values():
        columns = [
            {state["recipe"]: state["unsupported"] for state in states(technique, machine)}
            for machine in MACHINES.values()
        ]
        numbers = {
            state["recipe"]: Arithmetic(state["weights"], state["products"])
            for state in states(technique, MACHINES["CPU"])
        }
        recipes = [
            recipe
            for recipe in numbers
            if numbers[recipe] != Arithmetic() or any(column[recipe] for column in columns)
        ]
        rest = [recipe for recipe in numbers if recipe not in recipes]
        everywhere += rest if recipes else [technique.name]
        for recipe in recipes:
            cells = [
                "compiled"
                if column[recipe] is None and kernels.is_only_compiled(recipe, machine.capability)
                else _cell(column[recipe], reasons)
                for column, machine in zip(columns, MACHINES.values(), strict=True)
            ]
            weights, products = numbers[recipe].weights, numbers[recipe].products
            basis = bases.get(choices(variants(technique)[recipe]), "declared")
            rows.append([f"`{recipe}`", str(weights), str(products), basis, *cells])
    headings = ("recipe", "weights", "matmuls", "rests on", *MACHINES)
    lines += markdown_lines(headings, rows, dict.fromkeys(MACHINES, "center"))
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items())]
    lines += [
        "",
        "Run everywhere, with weights and matmuls as before: "
        + ", ".join(f"`{recipe}`" for recipe in everywhere)
        + ".",
        "",
        *kernels.section({f"{major}.{minor}": name for name, (major, minor) in _GPUS}),
        "",
        *block_formats.section(RECORD),
        "",
        *memory_caps.section(answers, runs),
        "",
        "## GPUs by name",
        "",
        "What `--gpu`, `--card` and tables may name, as people and drivers write it: case, spaces, hyphens, NVIDIA and "
        "GeForce do not matter (`4070ti`, `RTX 4070 Ti SUPER`, `NVIDIA A100-SXM4-40GB`, `4060 Ti 16GB`). Where a chip "
        "is sold with several sizes of memory and the name does not say which, the smallest counts. Rates are those of "
        "NVIDIA's data sheets, dense, in TFLOP/s (TOP/s for int8): in 16 bits with fp16 accumulation where that is "
        "faster, with fp32 accumulation, as PyTorch multiplies bf16, and in 8 bits.",
        "",
        *markdown_lines(
            ("GPU", "architecture", "memory, GB", "GB/s", "16 bits", "bf16", "8 bits"), map(_chip, CHIPS)
        ),
    ]
    return "\n".join(lines) + "\n"


def _bases(tables: Sequence[EvidenceTable]) -> dict[tuple[object, ...], str]:
    """Return on which devices there are records of each choice of a technique, in words."""
    kinds: dict[str, Kind] = {"measured": "committed", "reported by others": "community"}
    words = {}
    for choice, records in records_by_choice(tables).items():
        devices = {
            word: sorted({device for of, device in records if of == kind}) for word, kind in kinds.items()
        }
        words[choice] = "; ".join(f"{word}: {', '.join(names)}" for word, names in devices.items() if names)
    return {choice: text for choice, text in words.items() if text}


def _chip(chip: Chip) -> list[str]:
    """Return the cells of a chip."""
    major, minor = chip.capability
    return [
        ", ".join((chip.name, *chip.aliases)),
        f"{chip.architecture} ({major}.{minor})",
        ", ".join(f"{size:g}" for size in chip.memory_gb),
        *(f"{rate:g}" for rate in (chip.bandwidth_gb_s, chip.half, round(chip.bf16, 1), chip.eight)),
    ]


def _cell(reason: str | None, reasons: dict[str, int]) -> str:
    """Return a tick, or the number of the reason; a new reason gets a new number."""
    if reason is None:
        return "✓"
    # The column's heading says what the GPU has.
    brief = re.sub(r"[,;] the GPU has \S+$", "", reason)
    return f"[{reasons.setdefault(brief, len(reasons) + 1)}]"
