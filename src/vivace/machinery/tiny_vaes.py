"""Tiny VAEs that diffusers has no class for: for FLUX.2's latents, Qwen-Image's and Qwen-Image 2.1's.

They read and make the latents of the diffusion model itself. diffusers' pipelines convert those by the statistics of
the published VAE; here the statistics change nothing. Layers have the published files' indices.
Sources: taesd.py of github.com/madebyollin/taesd (TAEF2 is its `flux_2`, TAEQI2.1 its `f16`), taehv.py of
github.com/madebyollin/taehv (TAEW2.1, which its page gives for Qwen-Image), and the pages of both on the hub.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderTiny
from diffusers.configuration_utils import ConfigMixin
from diffusers.models.autoencoders.autoencoder_tiny import AutoencoderTinyOutput
from diffusers.models.autoencoders.vae import AutoencoderMixin, DecoderOutput
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.unets.unet_2d_blocks import AutoencoderTinyBlock
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import nn

_EPS = 1e-5
"""That ERNIE-Image's pipeline adds to a variance whatever its VAE's configuration says."""


class _NeutralNorm(nn.Module):
    """Statistics by which a pipeline normalises latents: it multiplies by sqrt(variance + eps), and adds the mean."""

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(channels), persistent=False)
        self.register_buffer("running_var", torch.full((channels,), 1 - _EPS), persistent=False)


class _PooledBlock(AutoencoderTinyBlock):
    """A block that also sees statistics of the whole image."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, "relu")
        self.pool = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.GroupNorm(4, 4 * width),
            nn.ReLU(),
            nn.Conv2d(4 * width, width, 1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = super().forward(x + self.pool(x))
        return out


class AutoencoderTinyFlux2(AutoencoderTiny):
    """TAEF2: `AutoencoderTiny` with other blocks where the image is smallest."""

    def __init__(self) -> None:
        super().__init__(latent_channels=32)
        for layers, places in ((self.encoder.layers, (11, 12, 13)), (self.decoder.layers, (2, 3, 4))):
            for place in places:
                layers[place] = _PooledBlock(64)
        self.bn = _NeutralNorm(4 * 32)  # of patches of 2 x 2
        self.register_to_config(batch_norm_eps=_EPS)

    def _tiled_encode(self, x: torch.Tensor) -> torch.Tensor:
        """Encode as a whole: `AutoencoderTiny`'s tiles have four channels."""
        latents: torch.Tensor = self.encoder(x)
        return latents


def _conv(inputs: int, outputs: int, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 3, padding=1, **options)


class _Encoder(nn.Module):
    """Layers whose images are in 0 .. 1; diffusers' are in -1 .. 1."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.run(images.add(1).div(2))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class _Decoder(_Encoder):
    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        return self.run(torch.tanh(latents / 3) * 3).mul(2).sub(1)


class _ImageVae(ModelMixin, AutoencoderMixin, ConfigMixin):
    """Encodes and decodes images as Qwen-Image's pipelines ask: (batch, channels, 1, height, width)."""

    temperal_downsample = (False, True, True)  # diffusers' spelling: its length tells the scale, 8

    def __init__(self, encoder: nn.Module, decoder: nn.Module, channels: int) -> None:
        super().__init__()
        self.encoder, self.decoder = encoder, decoder
        self.use_slicing = False
        self.register_to_config(z_dim=channels, latents_mean=[0.0] * channels, latents_std=[1.0] * channels)

    @apply_forward_hook
    def encode(self, x: torch.Tensor, return_dict: bool = True) -> Any:
        latents = self._run(self.encoder, x)
        return AutoencoderTinyOutput(latents=latents) if return_dict else (latents,)

    @apply_forward_hook
    def decode(self, z: torch.Tensor, return_dict: bool = True) -> Any:
        images = self._run(self.decoder, z)
        return DecoderOutput(sample=images) if return_dict else (images,)

    def _run(self, part: nn.Module, x: torch.Tensor) -> torch.Tensor:
        rows = x[:, :, 0].split(1) if self.use_slicing else [x[:, :, 0]]
        return torch.cat([part(row) for row in rows]).unsqueeze(2)


class AutoencoderTinyQwenImage21(_ImageVae):
    """TAEQI2.1: 16 x 16 pixels a cell, images with an alpha channel."""

    def __init__(self) -> None:
        def blocks(width: int, number: int = 3) -> tuple[nn.Module, ...]:
            return tuple(AutoencoderTinyBlock(width, width, "relu") for _ in range(number))

        def smaller(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
            return (_conv(inputs, outputs, stride=2, bias=False), *blocks(outputs))

        def larger(inputs: int, outputs: int) -> tuple[nn.Module, ...]:
            return (*blocks(inputs), nn.Upsample(scale_factor=2), _conv(inputs, outputs, bias=False))

        super().__init__(
            _Encoder(
                nn.PixelUnshuffle(2),
                _conv(16, 64),
                nn.ReLU(),
                *blocks(64, 1),
                *smaller(64, 64),
                *smaller(64, 128),
                *smaller(128, 256),
                _conv(256, 64),
            ),
            _Decoder(
                _conv(64, 256),
                nn.ReLU(),
                *larger(256, 128),
                *larger(128, 64),
                *larger(64, 64),
                *blocks(64, 1),
                _conv(64, 16),
                nn.PixelShuffle(2),
            ),
            channels=64,
        )


Frames = list[torch.Tensor]
"""Of a video, in time: (batch, channels, height, width) each."""


class _OfFrames(nn.Module):
    """A layer that sees more than one frame at a time."""

    def forward(self, frames: Frames) -> Frames:
        raise NotImplementedError


class _FrameBlock(_OfFrames):
    """A residual block of each frame and the one before; before the first are zeros."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            _conv(2 * width, width), nn.ReLU(), _conv(width, width), nn.ReLU(), _conv(width, width)
        )

    def forward(self, frames: Frames) -> Frames:
        earlier = [torch.zeros_like(frames[0]), *frames[:-1]]
        pairs = zip(frames, earlier, strict=True)
        return [torch.relu(self.conv(torch.cat(pair, 1)) + pair[0]) for pair in pairs]


class _OtherFrames(_OfFrames):
    """Makes `made` frames of `taken` frames, which are beside each other in the channels."""

    def __init__(self, width: int, taken: int = 1, made: int = 1) -> None:
        super().__init__()
        self.taken, self.made = taken, made
        self.conv = nn.Conv2d(taken * width, made * width, 1, bias=False)

    def forward(self, frames: Frames) -> Frames:
        starts = range(0, len(frames), self.taken)
        groups = [torch.cat(frames[k : k + self.taken], 1) for k in starts] if self.taken > 1 else frames
        return [frame for group in groups for frame in self.conv(group).chunk(self.made, 1)]


def _last_frame(layers: nn.Sequential, frames: Frames) -> torch.Tensor:
    """Return the last of the frames that layers make of frames."""
    looks_back = max(place for place, layer in enumerate(layers) if isinstance(layer, _FrameBlock))
    for place, layer in enumerate(layers):
        frames = layer(frames) if isinstance(layer, _OfFrames) else [layer(frame) for frame in frames]
        if place >= looks_back:
            frames = frames[-1:]  # nothing depends on the others any more
    return frames[0]


class _VideoEncoder(_Encoder):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        # An image is a video of four frames that are alike. The first two layers see each alone.
        return _last_frame(self.layers[2:], [self.layers[:2](x)] * 4)


class _VideoDecoder(_Decoder):
    def run(self, x: torch.Tensor) -> torch.Tensor:
        return _last_frame(self.layers, [x])  # the first three of four frames are not the image's


class AutoencoderTinyQwenImage(_ImageVae):
    """TAEW2.1, a tiny VAE of Wan 2.1's videos, whose latents Qwen-Image's are: for a single image."""

    def __init__(self) -> None:
        def smaller(taken: int) -> tuple[nn.Module, ...]:
            blocks = (_FrameBlock(64) for _ in range(3))
            return (_OtherFrames(64, taken=taken), _conv(64, 64, stride=2, bias=False), *blocks)

        def larger(inputs: int, outputs: int, made: int) -> tuple[nn.Module, ...]:
            blocks = (_FrameBlock(inputs) for _ in range(3))
            up = nn.Upsample(scale_factor=2)
            return (*blocks, up, _OtherFrames(inputs, made=made), _conv(inputs, outputs, bias=False))

        super().__init__(
            _VideoEncoder(_conv(3, 64), nn.ReLU(), *smaller(2), *smaller(2), *smaller(1), _conv(64, 16)),
            _VideoDecoder(
                nn.Identity(),
                _conv(16, 256),
                nn.ReLU(),
                *larger(256, 128, 1),
                *larger(128, 64, 2),
                *larger(64, 64, 2),
                nn.ReLU(),
                _conv(64, 3),
            ),
            channels=16,
        )
