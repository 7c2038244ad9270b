"""Residual blocks and norms of UNets and VAEs, with fewer passes over memory: each replaces one of diffusers'.

Convolutions stay cuDNN's, without their biases, each of which PyTorch adds in a pass of its own. Activations are in
channels_last, as cuDNN's convolutions in 16 bits want them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vivace.fused import image_operations as images


class FusedResnet(nn.Module):  # type: ignore[misc]
    """Takes the place of diffusers' `ResnetBlock2D`: biases and the time embedding are added by the norms' kernels."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm1, self.norm2 = block.norm1, block.norm2
        self.conv1, self.conv2 = block.conv1, block.conv2
        self.conv_shortcut, self.time_emb_proj = block.conv_shortcut, block.time_emb_proj
        shortcut = block.conv_shortcut
        bias = self.conv2.bias
        if shortcut is not None and shortcut.bias is not None:
            bias = bias + shortcut.bias
        self.register_buffer("bias", bias.detach().clone())
        time_bias = (
            self.conv1.bias if block.time_emb_proj is None else block.time_emb_proj.bias + self.conv1.bias
        )
        self.register_buffer("time_bias", time_bias.detach().clone())

    def forward(self, input_tensor: torch.Tensor, temb: torch.Tensor | None = None) -> torch.Tensor:
        x = images.channels_last(input_tensor)
        if self.time_emb_proj is None:
            time = self.time_bias.expand(len(x), -1)
        else:
            assert temb is not None
            time = nn.functional.linear(nn.functional.silu(temb), self.time_emb_proj.weight, self.time_bias)
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
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "ResnetBlock2D":
                parent._modules[name] = FusedResnet(child).eval().requires_grad_(False)
                number += 1
        norm, act = getattr(parent, "conv_norm_out", None), getattr(parent, "conv_act", None)
        if isinstance(norm, nn.GroupNorm) and type(act).__name__ == "SiLU":
            parent.conv_norm_out, parent.conv_act = FusedNorm(norm), nn.Identity()
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
