"""Residual blocks and norms of UNets and VAEs, with fewer passes over memory: each replaces one of diffusers'.

Convolutions are cuDNN's in bf16, without their biases, each of which PyTorch adds in a pass of its own; activations
are in channels_last, as cuDNN wants them. Or they are vivace's in e4m3: the norms before them round their outputs, and
they add the bias and the residual themselves. What enlarges an image is one kernel with the convolution, in bf16.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from vivace.machinery.fused import image_operations as images
from vivace.machinery.fused.lora_columns import ConvolutionSlot, LoraOwner, LorasBeside
from vivace.machinery.fused.operations import Places
from vivace.machinery.kernels import reference

Precision = Literal["bf16", "fp8"]
"""Precision of residual blocks' convolutions: cuDNN's are in bf16, vivace's in e4m3."""
_LARGEST_GROUP = 2**20
"""Elements of a GroupNorm's group that its output's bound is for: 1024 x 1024 pixels, or 128 x 128 of 64 channels. In
larger groups an element beyond it, which would be nearly all of the variance, saturates."""


class TimeProjections(LoraOwner):
    """The time embedding's projections for all residual blocks as one matmul, computed by a step's first block. Their
    biases include those of the convolutions whose outputs they are added to."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", None)
        self.register_buffer("bias", None)
        self.loras = LorasBeside()
        self._embedding: torch.Tensor | None = None
        self._projected: torch.Tensor | None = None

    def write_loras(self, rescaled_to: float | None = None) -> None:
        super().write_loras(rescaled_to)
        self._embedding = self._projected = None

    def add(self, layer: Any, added: torch.Tensor) -> slice:
        """Add a projection, and to its bias what the block adds; return the columns of it."""
        weight, bias = layer.weight.detach(), layer.bias.detach() + added
        first = 0 if self.bias is None else len(self.bias)
        self.loras.add_layer(layer, layer.in_features, slice(first, first + len(bias)))
        self.weight = weight if self.weight is None else torch.cat([self.weight, weight])
        self.bias = bias if self.bias is None else torch.cat([self.bias, bias])
        return slice(first, first + len(bias))

    def forward(self, embedding: torch.Tensor) -> torch.Tensor:
        assert self.weight is not None
        if self._projected is None or embedding is not self._embedding:
            active = nn.functional.silu(embedding)
            self._embedding = embedding  # kept, so that no other tensor is taken for it
            self._projected = nn.functional.linear(active, self.weight, self.bias)
            self.loras.add(active, self._projected)
        return self._projected


class NormedConvolution(nn.Module):
    """A GroupNorm, SiLU and a convolution of cuDNN's, in bf16."""

    def __init__(self, norm: nn.GroupNorm, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.norm, self.convolution = norm, convolution
        self.lora = ConvolutionSlot(convolution)

    def forward(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        onto: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return conv(SiLU(norm(x + added))), without the bias; `onto` is a bias (channels,) and a residual to add."""
        normed = images.group_norm(x, self.norm, added, silu=True)
        made = self.lora.add(normed, _convolve(self.convolution, normed))
        if onto is None:
            return made
        bias, residual = onto
        return images.add_biased(residual, made, bias)


class OwnConvolution(nn.Module):
    """The same in e4m3 by `vivace.machinery.kernels.convolution`, for convolutions that `has_own_form` allows."""

    def __init__(self, norm: nn.GroupNorm, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.norm = norm
        self.lora = ConvolutionSlot(convolution)
        scale = scale_of_norm(norm)
        weight = convolution.weight.detach().flatten(2).float()  # (outputs, inputs, 9)
        of_outputs = reference.scale_of(weight.abs().amax(dim=(1, 2)))
        planes = weight.permute(2, 0, 1)
        rounded = planes.new_empty(planes.shape, dtype=torch.float8_e4m3fn)
        if not weight.is_meta:
            rounded.copy_(reference.to_e4m3(planes / of_outputs[:, None]))
        self.weight = nn.Parameter(rounded, requires_grad=False)
        self.register_buffer("scale", scale)
        self.register_buffer("scales", of_outputs * scale)

    def forward(
        self,
        x: torch.Tensor,
        added: torch.Tensor | None,
        onto: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        normed = images.padded_norm(x, self.norm, added, self.scale)
        made = images.convolve(normed, self.weight, self.scales, *(onto or ()))
        if not self.lora.rank:
            return made
        return self.lora.add((normed.unpadded().float() * self.scale).permute(0, 3, 1, 2), made)


class FusedResnet(LoraOwner):
    """Replaces diffusers' `ResnetBlock2D`; the second norm's kernel adds the time embedding and the first bias."""

    def __init__(self, block: Any, projections: TimeProjections, precision: Precision) -> None:
        super().__init__()
        self.first, self.second = (
            OwnConvolution(norm, convolution)
            if precision == "fp8" and has_own_form(convolution)
            else NormedConvolution(norm, convolution)
            for norm, convolution in ((block.norm1, block.conv1), (block.norm2, block.conv2))
        )
        self.shortcut = block.conv_shortcut
        self.shortcut_lora = None if self.shortcut is None else ConvolutionSlot(self.shortcut)
        bias = block.conv2.bias
        if self.shortcut is not None and self.shortcut.bias is not None:
            bias = bias + self.shortcut.bias
        self.register_buffer("bias", bias.detach().clone())
        bias = block.conv1.bias.detach().clone()
        self._projections: tuple[TimeProjections, ...] = ()  # a module of the model, not of this block
        self._columns = slice(0)
        if block.time_emb_proj is not None:
            self._columns = projections.add(block.time_emb_proj, bias)
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
        residual = x
        if self.shortcut is not None:
            assert self.shortcut_lora is not None
            residual = self.shortcut_lora.add(x, _convolve(self.shortcut, x))
        return self.second(self.first(x, None), time, (self.bias, residual))


class FusedUpsample(LoraOwner):
    """Replaces `Upsample2D`: the large image is not made, and a pixel takes 4 neighbours: see `kernels.convolution`."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.lora = ConvolutionSlot(block.conv)
        self.plain = block  # for an image that is to have another size
        weight = block.conv.weight.detach()
        enlarging = torch.empty((16, *weight.shape[:2]), dtype=weight.dtype, device=weight.device)
        if not weight.is_meta:
            enlarging.copy_(reference.enlarging(weight))
        self.weight = nn.Parameter(enlarging, requires_grad=False)
        self.register_buffer("scales", torch.ones(len(weight), device=weight.device))

    def forward(self, hidden_states: torch.Tensor, output_size: Any = None) -> torch.Tensor:
        height, width = hidden_states.shape[-2:]
        if output_size is not None and tuple(output_size) != (2 * height, 2 * width):
            made: torch.Tensor = self.plain(hidden_states, output_size)
            return self._with_lora(hidden_states, made, tuple(output_size))
        pixels = images.pixels(images.channels_last(hidden_states))
        x = reference.padded(pixels, height, width)
        made = images.convolve(x, self.weight, self.scales, self.plain.conv.bias)
        return self._with_lora(hidden_states, made, (2 * height, 2 * width))

    def _with_lora(self, x: torch.Tensor, made: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if not self.lora.rank:
            return made
        return self.lora.add(nn.functional.interpolate(x, size=size, mode="nearest"), made)


class FusedNorm(nn.Module):
    """Replaces a GroupNorm and the SiLU after it."""

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return images.group_norm(images.channels_last(x), self.norm, None, silu=True)


def fuse_convolutions(model: Any, precision: Precision, enlarges: bool, places: Places) -> int:
    """Replace residual blocks, what enlarges an image, and the norm before the last convolution; return how many."""
    model.to(memory_format=torch.channels_last)
    number = 0
    projections = TimeProjections()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__ == "ResnetBlock2D":
                block = child.to(places.work) if precision == "fp8" else child
                fused = FusedResnet(block, projections, precision).eval().requires_grad_(False)
                parent._modules[name] = fused.to(places.home) if precision == "fp8" else fused
                number += 1
            elif enlarges and type(child).__name__ == "Upsample2D" and can_enlarge(child):
                parent._modules[name] = FusedUpsample(child).eval().requires_grad_(False)
        norm, act = getattr(parent, "conv_norm_out", None), getattr(parent, "conv_act", None)
        if isinstance(norm, nn.GroupNorm) and type(act).__name__ == "SiLU":
            parent.conv_norm_out, parent.conv_act = FusedNorm(norm), nn.Identity()
    if projections.weight is not None:
        if precision == "fp8":
            projections.to(places.home)
        model.add_module("vivace_time_projections", projections)
    return number


def scale_of_norm(norm: nn.GroupNorm) -> torch.Tensor:
    """Return the scale of a norm's e4m3 output, (1,), fp32: no element of a normalised group of n exceeds sqrt(n)."""
    bound = (_LARGEST_GROUP**0.5 * norm.weight.float().abs() + norm.bias.float().abs()).amax()
    return reference.scale_of(bound.detach().reshape(1))


def num_own(model: Any) -> int:
    return sum(isinstance(part, OwnConvolution | FusedUpsample) for part in model.modules())


def has_own_form(layer: nn.Conv2d) -> bool:
    """Whether a convolution has a form of vivace's: of 3 x 3 pixels that all stay, and of 16 channels or a multiple."""
    return bool(
        layer.kernel_size == (3, 3)
        and layer.stride == layer.padding == layer.dilation == (1, 1)
        and layer.padding_mode == "zeros"
        and layer.groups == 1
        and layer.in_channels % 16 == layer.out_channels % 16 == 0
    )


def can_enlarge(block: Any) -> bool:
    convolution = getattr(block, "conv", None)
    return (
        block.use_conv
        and block.norm is None
        and block.interpolate
        and isinstance(convolution, nn.Conv2d)
        and has_own_form(convolution)
    )


def unsuited_resnet(block: Any) -> str | None:
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
    made = nn.functional.conv2d(
        x, layer.weight, None, layer.stride, layer.padding, layer.dilation, layer.groups
    )
    return images.channels_last(made)
