"""Matmuls of the fused transformer: one weight for all rows of tokens, or one for the text's and one for the image's.

In bf16 biases are added by the matmul. In fp8 both factors are in e4m3, each with one scale, and sums are accumulated
fast (in the tensor cores' own 22 bits); biases are left to the kernel that reads the result, where they cost nothing.
On GPUs GELU, and in fp8 the rounding of its output, are part of the matmul. The text's matmuls, which leave most of the
GPU idle, run beside the image's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from vivace.fused.operations import Rows
    from vivace.kernels.reference import Tokens


@functools.cache
def product_class() -> Any:
    """The class of a fused matmul's weights."""
    import torch

    from vivace.fused.scales import spread

    class Product(torch.nn.Module):  # type: ignore[misc]
        """Weights (streams, outputs, inputs), one or two streams, and biases (streams, outputs).

        Args:
            linears: for each stream the Linear layers whose outputs lie side by side.
            quantize: store e4m3, with a scale for each stream's weight, (streams,).
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
                    scales.append(scale)
                weights.append(whole)
            self.weight = torch.nn.Parameter(torch.stack(weights), requires_grad=False)
            self.register_buffer("spread_scale", spread(torch.cat(scales)) if quantize else None)
            biases = [torch.cat([_bias(layer) for layer in layers]) for layers in linears]
            self.register_buffer("bias", torch.stack(biases).bfloat16() if with_bias else None)

        @property
        def scale(self) -> torch.Tensor | None:
            """Of each stream's weight, (streams,), fp32."""
            return None if self.spread_scale is None else self.spread_scale[..., 0]

        @property
        def left_bias(self) -> torch.Tensor | None:
            """The bias, if the reader of the result has to add it."""
            return self.bias if self.scale is not None else None

        def forward(self, rows: Rows, tokens: Tokens, onto: torch.Tensor | None = None) -> torch.Tensor:
            """Return the product (rows, outputs) in bf16; in bf16 it may be added to `onto`, in place."""
            made = self._empty(rows, torch.bfloat16) if onto is None else onto
            if made.is_meta:
                return made
            with _side_by_side(made, len(self.weight)) as places:
                for stream, span in enumerate(self._spans(tokens)):
                    values, weight = rows.values[span], self.weight[stream]
                    with places[stream]:
                        if self.scale is not None:
                            assert onto is None
                            given = (_of(rows.scale, stream), self.scale[stream])
                            scaled_product(values, weight, given, made[span])
                        elif onto is not None:
                            made[span].addmm_(values, weight.t())
                        elif self.bias is not None:
                            torch.addmm(self.bias[stream], values, weight.t(), out=made[span])
                        else:
                            torch.mm(values, weight.t(), out=made[span])
            return made

        def activated(
            self, rows: Rows, tokens: Tokens, scales: torch.Tensor | None, onto: torch.Tensor | None = None
        ) -> Rows:
            """Return GELU of the product and its bias.

            Args:
                scales: for e4m3, (2, streams): the scales of the output, and their inverses.
                onto: write it here.
            """
            from vivace.fused.operations import Rows

            dtype = torch.bfloat16 if scales is None else torch.float8_e4m3fn
            made = self._empty(rows, dtype) if onto is None else onto
            with _side_by_side(made, len(self.weight)) as places:
                for stream, span in enumerate(self._spans(tokens)):
                    values, weight, bias = rows.values[span], self.weight[stream], self.bias[stream]
                    if made.is_meta or not len(values):
                        continue
                    with places[stream]:
                        if scales is None or self.scale is None:
                            product_with_gelu(values, weight, bias, made[span])
                        else:
                            given = (_of(rows.scale, stream), self.scale[stream], _of(scales[0], stream))
                            inverse = _of(scales[1], stream)
                            scaled_product_with_gelu(values, weight, bias, given, inverse, made[span])
            return Rows(made, None if scales is None else scales[0])

        def _empty(self, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
            shape = (rows.values.shape[0], self.weight.shape[1])
            return torch.empty(shape, dtype=dtype, device=self.weight.device)

        def _spans(self, tokens: Tokens) -> list[slice]:
            split = tokens.num_text_rows
            return [slice(None)] if len(self.weight) == 1 else [slice(0, split), slice(split, None)]

    return Product


@contextlib.contextmanager
def _side_by_side(made: torch.Tensor, number: int) -> Iterator[list[Any]]:
    """Yield a context for each of one or two matmuls; on GPUs two run on two streams, and both are done at the end."""
    import torch

    if number == 1 or not made.is_cuda:
        yield [contextlib.nullcontext()] * number
        return
    main, side = torch.cuda.current_stream(made.device), _side_stream(made.device)
    side.wait_stream(main)
    yield [torch.cuda.stream(side), contextlib.nullcontext()]
    main.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    import torch

    return torch.cuda.Stream(device)


def scaled_product(
    values: torch.Tensor, weight: torch.Tensor, scales: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> None:
    """Write the product of two e4m3 factors and their scales to `out`, in bf16; on a CPU it is computed in fp32.

    Args:
        values: (rows, inputs); weight: (outputs, inputs).
        scales: of values and weight, fp32, one element each.
    """
    if values.is_cuda:
        from vivace.fused.cublas_lt import multiply

        multiply(values, weight, scales, None, out)
    else:
        out.copy_((values.float() @ weight.float().t()) * scales[0] * scales[1])


def scaled_product_with_gelu(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inverse: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write GELU(product + bias), divided by its scale, to `out`, in e4m3.

    Args:
        bias: (outputs,), bf16.
        scales: of values, weight and `out`.
        inverse: of the scale of `out`.
    """
    from vivace.kernels import reference

    if values.is_cuda:
        from vivace.fused.cublas_lt import multiply

        multiply(values, weight, (scales[0], scales[1], inverse), bias, out)
    else:
        product = (values.float() @ weight.float().t()) * scales[0] * scales[1]
        out.copy_(reference.to_e4m3(reference.gelu(product + bias.float()) / scales[2]))


def product_with_gelu(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, out: torch.Tensor
) -> None:
    """Write GELU(product + bias) to `out`, in bf16."""
    import torch

    from vivace.kernels import reference

    if values.is_cuda:
        # On GPUs its GELU is the tanh form, in cuBLASLt's epilogue.
        torch._addmm_activation(bias, values, weight.t(), use_gelu=True, out=out)
    else:
        out.copy_(reference.gelu(values.float() @ weight.float().t() + bias.float()))


def _of(scales: Any, stream: int) -> Any:
    """A stream's scale, where each has one, or the one of all."""
    return scales[stream] if len(scales) > 1 else scales[0]


def _quantized_weight(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    from vivace.kernels.reference import quantize_whole

    if weight.is_meta:
        return torch.empty_like(weight, dtype=torch.float8_e4m3fn), weight.new_empty(1, dtype=torch.float32)
    return quantize_whole(weight)


def _bias(layer: torch.nn.Linear) -> torch.Tensor:
    return layer.bias.detach() if layer.bias is not None else layer.weight.new_zeros(layer.weight.shape[0])
