"""Check which instructions a kernel's matmuls compile to: a type that a GPU lacks becomes another in silence."""

from __future__ import annotations

import re

_DOT = re.compile(r"\btt\.dot .*: tensor<[\dx]+x(\w+)> \* tensor<[\dx]+x(\w+)>")
_INSTRUCTION = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.[\w.:]+")
_E4M3, _BF16 = "f8E4M3FN", "bf16"
_IN_PTX = {_E4M3: r"\.e4m3\.e4m3\b|\bkind::f8f6f4\b", _BF16: r"\.bf16\.bf16\b|\bkind::f16\b"}
_FAMILY = {9: "wgmma.mma_async", 10: "tcgen05.mma"}
"""Of a matmul in e4m3, by the capability's first number. Others have `mma.sync`."""


def assert_multiplies_in_its_types(ttir: str, ptx: str, capability: tuple[int, int]) -> set[str]:
    """Assert that matrices are multiplied by tensor cores in the types that the kernel gives; return the instructions.

    Args:
        ttir: the kernel in Triton's dialect, all functions inlined.
        ptx: the same kernel, compiled.
    """
    kinds = {kind for match in _DOT.finditer(ttir) for kind in match.groups()}
    assert len(_DOT.findall(ttir)) == len(re.findall(r"\btt\.dot\b", ttir)), "a matmul of an unknown form"
    assert kinds <= {_E4M3, _BF16}, f"matmuls in {', '.join(sorted(kinds))}"
    instructions = set(_INSTRUCTION.findall(ptx))
    for kind in kinds:
        of_kind = [each for each in instructions if re.search(_IN_PTX[kind], each)]
        assert of_kind, f"no tensor core multiplies in {kind}, only {sorted(instructions)}"
        family = _FAMILY.get(capability[0], "mma.sync")
        if kind == _E4M3:
            assert all(each.startswith(family) for each in of_kind), f"{of_kind} in place of {family}"
    for each in instructions:
        assert any(re.search(_IN_PTX[kind], each) for kind in kinds), f"{each} for matmuls in {sorted(kinds)}"
    return instructions
