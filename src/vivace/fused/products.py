"""Matmuls of the fused transformer: one weight for all rows of tokens, or one for the text's and one for the image's.

In bf16 biases are added by the matmul. In fp8 both factors are in e4m3, each row of the inputs and each of the weight
with its own scale, and sums are accumulated fast (in the tensor cores' own 22 bits); biases are left to the kernel that
reads the result, where they cost nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vivace.fused.operations import Rows
    from vivace.kernels.reference import Tokens


@functools.cache
def product_class() -> Any:
    """The class of a fused matmul's weights."""
    import torch

    class Product(torch.nn.Module):  # type: ignore[misc]
        """Weights (streams, outputs, inputs), one or two streams, and biases (streams, outputs).

        Args:
            linears: for each stream the Linear layers whose outputs lie side by side.
            quantize: store e4m3, with a scale (streams, 1, outputs) for each output.
            inputs: take only these columns of the weights.
            with_bias: False: the bias is added with another product.
        """

        def __init__(
            self,
            linears: Sequence[Sequence[torch.nn.Linear]],
            quantize: bool,
            inputs: slice = slice(None),
            with_bias: bool = True,
        ) -> None:
            super().__init__()
            weights, scales = [], []
            for layers in linears:
                whole = torch.cat([layer.weight.detach()[:, inputs].bfloat16() for layer in layers])
                if quantize:
                    whole, scale = _quantized_weight(whole)
                    scales.append(scale.reshape(1, -1))
                weights.append(whole)
            self.weight = torch.nn.Parameter(torch.stack(weights), requires_grad=False)
            self.register_buffer("scale", torch.stack(scales) if quantize else None)
            biases = [torch.cat([_bias(layer) for layer in layers]) for layers in linears]
            self.register_buffer("bias", torch.stack(biases).bfloat16() if with_bias else None)

        @property
        def left_bias(self) -> torch.Tensor | None:
            """The bias, if the reader of the result has to add it."""
            return self.bias if self.scale is not None else None

        def forward(self, rows: Rows, tokens: Tokens, onto: torch.Tensor | None = None) -> torch.Tensor:
            """Return the product (rows, outputs) in bf16; in bf16 it may be added to `onto`, in place."""
            split = tokens.num_text_rows
            spans = [slice(None)] if len(self.weight) == 1 else [slice(0, split), slice(split, None)]
            outputs = self.weight.shape[1]
            made = onto
            if made is None:
                made = torch.empty(
                    (rows.values.shape[0], outputs), dtype=torch.bfloat16, device=self.weight.device
                )
            if made.is_meta:
                return made
            for stream, span in enumerate(spans):
                values, weight = rows.values[span], self.weight[stream].t()
                if self.scale is not None:
                    assert rows.scale is not None
                    assert onto is None
                    scaled_product(values, weight, _aligned(rows.scale[span]), self.scale[stream], made[span])
                elif onto is not None:
                    made[span].addmm_(values, weight)
                elif self.bias is not None:
                    torch.addmm(self.bias[stream], values, weight, out=made[span])
                else:
                    torch.mm(values, weight, out=made[span])
            return made

    return Product


def scaled_product(
    values: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write (values * scale) @ (weight * weight_scale) to `out`; on a CPU in fp32.

    Args:
        values: (rows, inputs), e4m3; scale: (rows, 1), fp32.
        weight: (inputs, outputs), e4m3, its columns contiguous; weight_scale: (1, outputs), fp32.
    """
    import torch

    if values.is_cuda:
        torch._scaled_mm(
            values, weight, scale, weight_scale, out_dtype=out.dtype, use_fast_accum=True, out=out
        )
    else:
        out.copy_((values.float() @ weight.float()) * scale * weight_scale)


def _aligned(scale: torch.Tensor) -> torch.Tensor:
    """Scales where cuBLAS takes them: at a multiple of 16 bytes, which those after an odd number of rows are not."""
    return scale.clone() if scale.data_ptr() % 16 else scale


def _quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    from vivace.kernels.reference import quantize_rows

    if weight.is_meta:
        scale = weight.new_empty((weight.shape[0], 1), dtype=torch.float32)
        return torch.empty_like(weight, dtype=torch.float8_e4m3fn), scale
    return quantize_rows(weight)


def _bias(layer: torch.nn.Linear) -> torch.Tensor:
    return layer.bias.detach() if layer.bias is not None else layer.weight.new_zeros(layer.weight.shape[0])
