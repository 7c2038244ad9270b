"""Residual blocks and norms of UNets and VAEs, with fewer passes over memory: each replaces one of diffusers'.

Convolutions stay cuDNN's, without their biases, each of which PyTorch adds in a pass of its own. Activations are in
channels_last, as cuDNN's convolutions in 16 bits want them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vivace.fused import image_operations as images


class TimeProjections(nn.Module):  # type: ignore[misc]
    """The time embedding's projections for all residual blocks as one matmul.

    Their biases include those of the convolutions whose outputs they are added to.
    A step's blocks get the same tensor, so the first one computes what all of them add.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", None)
        self.register_buffer("bias", None)
        self._embedding: torch.Tensor | None = None
        self._projected: torch.Tensor | None = None

    def add(self, weight: torch.Tensor, bias: torch.Tensor) -> slice:
        """Add a projection, (channels, embedding); return the columns of it."""
        first = 0 if self.bias is None else len(self.bias)
        self.weight = weight if self.weight is None else torch.cat([self.weight, weight])
        self.bias = bias if self.bias is None else torch.cat([self.bias, bias])
        return slice(first, first + len(bias))

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return all projections of an embedding, (batch, columns)."""
        assert self.weight is not None
        if self._projected is None or embedding is not self._embedding:
            active = nn.functional.silu(embedding)
            self._embedding = embedding  # kept, so that no other tensor is taken for it
            self._projected = nn.functional.linear(active, self.weight, self.bias)
        return self._projected


class FusedResnet(nn.Module):  # type: ignore[misc]
    """Takes the place of diffusers' `ResnetBlock2D`: biases and the time embedding are added by the norms' kernels.

    Args:
        projections: of the whole model, which this block's is added to.
    """

    def __init__(self, block: Any, projections: TimeProjections) -> None:
        super().__init__()
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.conv1, self.conv2 = block.conv1, block.conv2
        self.conv_shortcut = block.conv_shortcut
        shortcut = block.conv_shortcut
        bias = self.conv2.bias
        if shortcut is not None and shortcut.bias is not None:
            bias = bias + shortcut.bias
        self.register_buffer("bias", bias.detach().clone())
        bias = self.conv1.bias.detach().clone()
        self._projections: tuple[TimeProjections, ...] = ()  # a module of the model, not of this block
        self._columns = slice(0)
        if block.time_emb_proj is not None:
            layer = block.time_emb_proj
            self._columns = projections.add(layer.weight.detach(), layer.bias.detach() + bias)
            self._projections = (projections,)
            bias = None
        self.register_buffer("time_bias", bias)

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        x = images.channels_last(input_tensor)
        if self.time_bias is not None:
            time = self.time_bias.expand(len(x), -1)
        else:
            assert temb is not None
            time = self._projections[0](temb)[:, self._columns]
        made = _convolve(self.conv1, images.group_norm(x, self.norm1, None, silu=True))
        made = _convolve(self.conv2, images.group_norm(made, self.norm2, time, silu=True))
        shortcut = x if self.conv_shortcut is None else _convolve(self.conv_shortcut, x)
        return images.add_biased(shortcut, made, self.bias)


class FusedNorm(nn.Module):  # type: ignore[misc]
    """Takes the place of a GroupNorm and the SiLU after it."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return images.group_norm(images.channels_last(x), self.norm, None, silu=True)


def fuse_convolutions(model: Any) -> int:
    """Replace the residual blocks of a model, and the norm before its last convolution; return their number."""
    model.to(memory_format=torch.channels_last)
    number = 0
    projections = TimeProjections()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "ResnetBlock2D":
                parent._modules[name] = FusedResnet(child, projections).eval().requires_grad_(False)
                number += 1
        norm, act = getattr(parent, "conv_norm_out", None), getattr(parent, "conv_act", None)
        if isinstance(norm, nn.GroupNorm) and type(act).__name__ == "SiLU":
            parent.conv_norm_out, parent.conv_act = FusedNorm(norm), nn.Identity()
    if projections.weight is not None:
        model.add_module("vivace_time_projections", projections)
    return number


def unsuited_resnet(block: Any) -> str | None:
    """Why a `ResnetBlock2D` has no fused form, or None."""
    suited = (
        (block.time_embedding_norm == "default" or block.time_emb_proj is None)
        and not block.skip_time_act
        and not block.up
        and not block.down
        and block.output_scale_factor == 1
        and type(block.nonlinearity).__name__ == "SiLU"
    )
    return None if suited else "a residual block of another form than those of Stable Diffusion"


def _convolve(layer: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
    """Convolve without the bias."""
    made = nn.functional.conv2d(
        x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    return images.channels_last(made)
