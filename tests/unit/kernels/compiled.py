"""Compile the kernels for GPUs of several compute capabilities, without one.

python -m tests.unit.kernels.compiled 8.9 9.0 12.0 --sampled 8.0 8.6 10.0 -o results/kernels-compiled.json

Models are applied on a CPU, and launches compile instead. So what the interpreter accepts and the compiler does not is
found where there is no GPU: types that differ between branches, blocks that no layout fits, more shared memory than a
block of threads may have, matmuls in e4m3 that become others. Prints each kernel's registers, its stack (bytes of
registers that were spilled) and its shared memory. What is sampled are the smallest and the largest blocks of each
kernel, with each set of its flags, with e4m3 and without.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.errors import TritonError
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tests.unit.kernels.launches import launch_all, recipes
from tests.unit.kernels.stored_in_place import assert_all_threads_have_loaded
from tests.unit.kernels.tensor_core_instructions import assert_multiplies_in_its_types
from vivace.foundation.hardware import shared_memory_bytes
from vivace.foundation.untrusted import destinations

Capability = tuple[int, int]


class NoDevice:
    """What Triton asks of a driver before it launches. Each capability is a device, since Triton caches by device."""

    def __init__(self) -> None:
        self.capability: Capability = (9, 0)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.get_current_device(), 32)

    def get_current_device(self) -> int:
        return self.capability[0] * 10 + self.capability[1]

    def get_current_stream(self, _: int) -> int:
        return 0


@dataclass
class Launch:
    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def kind(self) -> tuple[str, bool, frozenset[str]]:
        """The kernel's name, whether any tensor is in e4m3, and the parts of the kernel that flags include."""
        flags = frozenset(name for name, value in self.options.items() if name.isupper() and value is True)
        return self.kernel.__name__, any(t.dtype == torch.float8_e4m3fn for t in self._tensors), flags

    @property
    def size(self) -> tuple[int, int]:
        """The sum of the constants that are compiled in, which are blocks' sizes, and the tensors' elements."""
        constants = (value for name, value in self.options.items() if name.isupper())
        return sum(int(value) for value in constants if value is not None), sum(
            t.numel() for t in self._tensors
        )

    @property
    def _tensors(self) -> list[torch.Tensor]:
        bases = (arg.base if isinstance(arg, TensorDescriptor) else arg for arg in self.args)
        return [arg for arg in bases if isinstance(arg, torch.Tensor)]


@dataclass
class Compiled:
    """The programs that were compiled for a capability, each once."""

    capability: Capability
    sampled: bool
    hashes: set[str] = field(default_factory=set)
    registers: int = 0
    shared_memory: tuple[int, str] = (0, "")
    """The most of any program, and its kernel's name."""
    spills: dict[str, int] = field(default_factory=dict)
    instructions: dict[str, set[str]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def compile(self, launch: Launch) -> None:
        name = launch.kernel.__name__
        try:
            self._check(launch.kernel.run(*launch.args, **launch.options | {"warmup": True}))
        except (TritonError, RuntimeError, AssertionError) as error:
            self.failures[name] = f"{type(error).__name__}: {error}"
            print(f"{name} does not compile for {text_of(self.capability)}: {error}", flush=True)

    def _check(self, program: Any) -> None:
        if program.hash in self.hashes:
            return
        self.hashes.add(program.hash)
        name, shared = program.name, program.metadata.shared
        registers, stack = _resources(program)
        print(
            f"{name}: {registers} registers, {stack} bytes of stack, {shared} bytes of shared memory",
            flush=True,
        )
        self.registers = max(self.registers, registers)
        self.shared_memory = max(self.shared_memory, (shared, name))
        if stack:
            self.spills[name] = max(stack, self.spills.get(name, 0))
        limit = shared_memory_bytes(self.capability)
        assert limit is not None
        assert shared <= limit, f"{shared} bytes of shared memory, and a block may have {limit}"
        assert_all_threads_have_loaded(name, program.asm["ttgir"])
        instructions = assert_multiplies_in_its_types(
            program.asm["ttir"], program.asm["ptx"], self.capability
        )
        if instructions:
            kinds = {
                re.sub(r"\.(?:m\d+n\d+k\d+|sync|aligned|row|col|f32)\b", "", each) for each in instructions
            }
            self.instructions.setdefault(name, set()).update(kinds)

    def record(self) -> dict[str, Any]:
        return {
            "capability": text_of(self.capability),
            "sampled": self.sampled,
            "recipes": list(recipes(self.capability)),
            "programs": len(self.hashes),
            "most_registers": self.registers,
            "shared_memory_limit": shared_memory_bytes(self.capability),
            "most_shared_memory": self.shared_memory[0],
            "most_shared_memory_of": self.shared_memory[1],
            "spilled_bytes": dict(sorted(self.spills.items())),
            "matmul_instructions": {name: sorted(kinds) for name, kinds in sorted(self.instructions.items())},
            "failures": dict(sorted(self.failures.items())),
        }


def _resources(program: Any) -> tuple[int, int]:
    """Return the registers of a thread, and its bytes of stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(program.asm["cubin"])
        file.flush()
        usage = subprocess.check_output(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", usage)[-1]
    return int(registers), int(stack)


def compiled(
    capability: Capability, sampled: bool, launch_them: Callable[[], None] | None = None
) -> Compiled:
    """Compile what runs on a capability: each program, or a sample.

    Launches are collected first, since only all of them tell the smallest and the largest.

    Args:
        launch_them: launches kernels; None: all of them.
    """
    launches: list[Launch] = []

    def collect(kernel: Any, *args: Any, **options: Any) -> None:
        launches.append(Launch(kernel, args, options))

    with mock.patch.object(JITFunction, "run", collect):
        launch_all(capability) if launch_them is None else launch_them()
    programs = Compiled(capability, sampled)
    for launch in _sample(launches) if sampled else launches:
        programs.compile(launch)
    return programs


def _sample(launches: list[Launch]) -> list[Launch]:
    """Return the smallest and the largest launch of each kind."""
    by_kind: dict[tuple[str, bool, frozenset[str]], list[Launch]] = {}
    for launch in launches:
        by_kind.setdefault(launch.kind, []).append(launch)
    return [choose(group, key=lambda each: each.size) for group in by_kind.values() for choose in (min, max)]


def text_of(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def _capability(text: str) -> Capability:
    major, _, minor = text.partition(".")
    capability = int(major), int(minor)
    if shared_memory_bytes(capability) is None:
        raise ValueError
    return capability


def main() -> int:
    parser = argparse.ArgumentParser(description="compile the kernels for compute capabilities")
    parser.add_argument("capabilities", nargs="*", type=_capability, help="e.g. 9.0: every program")
    parser.add_argument("--sampled", nargs="*", type=_capability, default=[], help="a sample of the programs")
    parser.add_argument("-o", "--output", type=Path, help="write what was compiled as JSON")
    chosen = parser.parse_args()
    device = NoDevice()
    triton.runtime.driver.set_active(device)
    records = []
    for capability in sorted({*chosen.capabilities, *chosen.sampled}):
        print(f"For {text_of(capability)}:", flush=True)
        device.capability = capability
        records.append(compiled(capability, sampled=capability not in chosen.capabilities).record())
        print(f"{records[-1]['programs']} programs for {text_of(capability)}", flush=True)
    if chosen.output is not None:
        content = json.dumps({"triton": triton.__version__, "capabilities": records}, indent=2) + "\n"
        destinations.replace(chosen.output, content.encode())
    return 1 if any(record["failures"] for record in records) else 0


if __name__ == "__main__":
    sys.exit(main())
