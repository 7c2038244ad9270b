"""A VAE's attention over its fused weights, in bf16, and its residual blocks: each replaces one of diffusers'."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vivace.machinery.fused import image_operations as images
from vivace.machinery.fused.convolutions import Precision, fuse_convolutions, unsuited_resnet
from vivace.machinery.fused.operations import Places, Rows
from vivace.machinery.fused.products import Product
from vivace.machinery.kernels.reference import TokenLayout

_WIDEST_HEAD = 256
"""Channels that flash and cuDNN's attention take. The kernel for more reaches 120 TFLOP/s, matmuls five times that."""
_SCORES = 2**24
"""That are there at a time: 64 MB in fp32."""


def attend_by_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return the attention of `q` to `k` and `v`, (batch, heads, tokens, channels), by matmuls of some queries each."""
    made, num_rows = q.new_empty(q.shape), max(1, _SCORES // k.shape[2])
    scaled = q * q.shape[-1] ** -0.5
    for queries, keys, values, out in zip(*(x.flatten(0, 1) for x in (scaled, k, v, made)), strict=True):
        for part, onto in zip(queries.split(num_rows), out.split(num_rows), strict=True):
            scores = torch.mm(part, keys.t(), out_dtype=torch.float32) if q.is_cuda else part @ keys.t()
            torch.mm(scores.softmax(-1).to(values.dtype), values, out=onto)
    return made


class FusedAttention(nn.Module):
    """Replaces diffusers' `Attention` of an image's pixels to each other."""

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self.norm, self.num_heads = attention.group_norm, attention.heads
        fused = getattr(attention, "to_qkv", None)
        layers = [fused] if fused is not None else [attention.to_q, attention.to_k, attention.to_v]
        self.qkv = Product([layers], False)
        self.out = Product([[attention.to_out[0]]], False)

    def forward(self, hidden_states: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        x = images.channels_last(hidden_states)
        batch, _, height, width = x.shape
        tokens = TokenLayout(batch, 0, height * width)
        rows = images.pixels(images.group_norm(x, self.norm, None, silu=False)).flatten(0, 1)
        parts = self.qkv(Rows(rows), tokens).view(batch, height * width, 3, self.num_heads, -1)
        q, k, v = (part.transpose(1, 2) for part in parts.unbind(2))
        is_wide = q.is_cuda and q.shape[-1] > _WIDEST_HEAD
        attend = attend_by_rows if is_wide else nn.functional.scaled_dot_product_attention
        attended = attend(q, k, v).transpose(1, 2)
        onto = images.pixels(x).flatten(0, 1)
        out = self.out(Rows(attended.flatten(2).flatten(0, 1)), tokens, onto)
        return out.view(batch, height, width, -1).permute(0, 3, 1, 2)


def fuse_vae(vae: Any, convolutions: Precision, enlarges: bool, places: Places) -> int:
    """Replace the residual blocks and attentions of an `AutoencoderKL(Flux2)` in bf16; return the number of both."""
    number = fuse_convolutions(vae, convolutions, enlarges, places)
    for parent in list(vae.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "Attention":
                parent._modules[name] = FusedAttention(child).eval().requires_grad_(False)
                number += 1
    return number


def unsuited(vae: Any) -> str | None:
    if type(vae).__name__ not in ("AutoencoderKL", "AutoencoderKLFlux2"):
        return f"the fused kernels are made for the VAEs of Stable Diffusion and FLUX, and this is {type(vae).__name__}"
    for name, part in vae.named_modules():
        kind = type(part).__name__
        if kind == "ResnetBlock2D" and (reason := unsuited_resnet(part)) is not None:
            return f"{name}: {reason}"
        if kind == "Attention" and (
            part.group_norm is None
            or part.spatial_norm is not None
            or part.norm_q is not None
            or not part.residual_connection
            or part.rescale_output_factor != 1
        ):
            return f"{name}: an attention of another form than those of Stable Diffusion"
    return None
