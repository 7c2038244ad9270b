"""Layers as torchao's fp8 computes them, to compare with, and attention as cuDNN does in e4m3."""

from collections.abc import Callable
from typing import Any

import torch

from vivace.machinery.kernels import reference


def round_by_row(layer: torch.nn.Linear) -> None:
    """Compute a layer with a scale for each token and for each output."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        factors = []
        for rows in (x.flatten(0, -2), layer.weight):
            values, scales = reference.quantize_rows(rows)
            factors.append(values.float() * scales)
        return (factors[0] @ factors[1].t()).unflatten(0, x.shape[:-1])

    layer.forward = forward


def outliers(
    blocks: Any, largest: float, change: Callable[[Any], None] | None = None, apart: str = "adaLN"
) -> None:
    """Multiply four outputs of each Linear layer of blocks, zero its bias, and change the layer.

    Args:
        apart: names of layers that are left as they are contain this.
    """
    for block in blocks:
        for name, layer in block.named_modules():
            if isinstance(layer, torch.nn.Linear) and apart not in name:
                if layer.bias is not None:
                    layer.bias.zero_()
                layer.weight[:: layer.out_features // 4] *= largest
                if change is not None:
                    change(layer)


def attend_in_e4m3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qk_scales: torch.Tensor,
    v_scales: torch.Tensor,
    out: torch.Tensor,
    num_keys: torch.Tensor | None = None,
) -> None:
    """Take the place of `vivace.machinery.attention_backends.cudnn_fp8.attend` on a CPU."""
    assert {each.dtype for each in (q, k, v, out)} == {torch.float8_e4m3fn}
    wide = (q.float() * qk_scales[0], k.float() * qk_scales[1], v.float() * v_scales[0])
    mask = None if num_keys is None else (torch.arange(k.shape[1]) < num_keys[:, None])[:, None, None]
    heads_first = [each.transpose(1, 2) for each in wide]
    made = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask)
    out.copy_(reference.to_e4m3(made.transpose(1, 2) * v_scales[1]))
