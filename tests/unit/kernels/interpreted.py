"""Check every kernel on the CPU: `TRITON_INTERPRET=1 python -m tests.unit.kernels.interpreted`."""

from tests import fused_kernels as kernels

if __name__ == "__main__":
    for kind, tokens in kernels.cases():
        for quantize in (False, True):
            for adds in (False, True):
                kernels.check_residual_norm(kind, tokens, 96, adds, quantize, "cpu")
            kernels.check_qk_norm_rope(kind, tokens, 5, 32, quantize, "cpu")
            kernels.check_qk_norm_rope(kind, tokens, 9, 128, quantize, "cpu")
        kernels.check_quantize(kind, 5, 200, "cpu")
    for quantize in (False, True):
        kernels.check_skinny_product(3, 130, 144, quantize, "cpu")
        kernels.check_skinny_product(33, 64, 256, quantize, "cpu")
    kernels.check_peer_barrier("cpu")
    kernels.check_of_unets("cpu")
