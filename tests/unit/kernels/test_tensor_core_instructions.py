"""Whether a matmul that is compiled to another type's instructions is noticed."""

import pytest

from tests.unit.kernels.tensor_core_instructions import assert_multiplies_in_its_types


def dot(kind: str) -> str:
    tensor = f"tensor<128x128x{kind}>"
    return f"%2 = tt.dot %a, %b, %c, inputPrecision = tf32 : {tensor} * {tensor} -> tensor<128x128xf32> loc(#loc1)\n"


E4M3, BF16 = dot("f8E4M3FN"), dot("bf16")
MMA_E4M3 = "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32"
MMA_BF16 = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
WGMMA_E4M3 = "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3"
TCGEN05_E4M3 = "tcgen05.mma.cta_group::1.kind::f8f6f4"


@pytest.mark.parametrize(
    ("capability", "instruction"),
    [((8, 9), MMA_E4M3), ((9, 0), WGMMA_E4M3), ((10, 0), TCGEN05_E4M3), ((12, 0), MMA_E4M3)],
)
def test_the_instruction_of_each_family(capability: tuple[int, int], instruction: str) -> None:
    ptx = f"\t@%p1 {instruction} {{%r1}}, %rd1;\n"
    assert assert_multiplies_in_its_types(E4M3, ptx, capability) == {instruction}


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_bf16_in_place_of_e4m3_fails(capability: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="no tensor core multiplies in f8E4M3FN"):
        assert_multiplies_in_its_types(E4M3, f"{MMA_BF16} {{%r1}};", capability)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0)])
def test_an_older_instruction_fails(capability: tuple[int, int]) -> None:
    with pytest.raises(AssertionError, match="in place of"):
        assert_multiplies_in_its_types(E4M3, f"{MMA_E4M3} {{%r1}};", capability)


def test_some_in_bf16_fails() -> None:
    with pytest.raises(AssertionError, match="for matmuls in"):
        assert_multiplies_in_its_types(E4M3, f"{MMA_E4M3} {{%r1}};\n{MMA_BF16} {{%r1}};", (8, 9))


def test_no_tensor_core_fails() -> None:
    with pytest.raises(AssertionError, match="no tensor core"):
        assert_multiplies_in_its_types(BF16, "fma.rn.f32 %f1, %f2, %f3, %f4;", (8, 0))


def test_a_kernel_without_matmuls() -> None:
    assert assert_multiplies_in_its_types("tt.load %1", "ld.global.b32", (8, 0)) == set()
