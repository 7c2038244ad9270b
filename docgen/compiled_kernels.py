"""What docs/hardware.md says of kernels that were compiled for GPUs on which nothing was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vivace.answers.markdown import markdown_lines

_MEASURED = "9.0"


def content(path: Path) -> str:
    """Return the recipes whose kernels were compiled for a capability and not measured there, for the package."""
    rows = json.loads(path.read_text(encoding="utf-8"))["capabilities"]
    compiled = {
        row["capability"]: row["recipes"]
        for row in rows
        if not row["failures"] and row["capability"] != _MEASURED
    }
    return json.dumps(compiled, indent=1) + "\n"


_HEADINGS = (
    "GPU", "programs", "most shared memory, of the limit, bytes", "spilled, bytes", "matmuls in e4m3",
    "do not compile",
)  # fmt: skip


class CompiledKernels:
    """A record of `tests.unit.kernels.compiled`."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text(encoding="utf-8"))
        self._triton: str = content["triton"]
        self._rows: list[dict[str, Any]] = content["capabilities"]

    def is_only_compiled(self, recipe: str, capability: tuple[int, int] | None) -> bool:
        """Whether a recipe's kernels compile for a capability, and were not measured there."""
        return any(
            recipe in row["recipes"] and not row["failures"] and row["capability"] != _MEASURED
            for row in self._rows
            if capability is not None and row["capability"] == f"{capability[0]}.{capability[1]}"
        )

    def section(self, names: dict[str, str]) -> list[str]:
        """Return the page's section.

        Args:
            names: of GPUs, by capability.
        """
        return [
            "## Kernels, compiled",
            "",
            f"Vivace's own kernels, compiled by Triton {self._triton} without a GPU "
            "([record](../results/kernels-compiled.json)): every program, or a sample, the smallest and the largest "
            "blocks of each kernel and its flags. Only Hopper's are measured. What compiles fits the shared memory "
            "that a block may have, and multiplies e4m3 by tensor core instructions in e4m3. "
            "*Spilled* are bytes of a thread's registers, in the kernel with the most.",
            "",
            *markdown_lines(
                _HEADINGS,
                [_cells(row, names.get(row["capability"], row["capability"])) for row in self._rows],
                {"programs": "right"},
            ),
        ]


def _cells(row: dict[str, Any], name: str) -> list[str]:
    shared = (
        f"{row['most_shared_memory']:,} of {row['shared_memory_limit']:,}, `{row['most_shared_memory_of']}`"
    )
    spilled = row["spilled_bytes"]
    most = max(spilled, key=lambda kernel: spilled[kernel], default=None)
    in_e4m3 = {
        f"`{instruction}`"
        for instructions in row["matmul_instructions"].values()
        for instruction in instructions
        if "e4m3" in instruction or "f8f6f4" in instruction
    }
    return [
        name,
        str(row["programs"]) + (", a sample" if row["sampled"] else ""),
        shared,
        f"{spilled[most]:,}, `{most}`" if most else "0",
        ", ".join(sorted(in_e4m3)) or "none",
        ", ".join(f"`{kernel}`: {reason}" for kernel, reason in row["failures"].items()) or "none",
    ]
