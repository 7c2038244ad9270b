"""The fused kernels in plain PyTorch: for devices without Triton, and for tests.

Tensors are rows of tokens (rows, channels): those of the text first, then those of the image, each batch row after the
other. All arithmetic is in fp32, or in fp64 for fp64 inputs, and is rounded once, when a result is stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

E4M3_MAX = 448.0
TINY = 1e-12
"""The smallest largest value that a scale is made from, so that rows of zeros stay zeros."""


@dataclass(frozen=True)
class TokenLayout:
    """How rows are laid out: `batch` times `text` rows of the text, then `batch` times `image` rows of the image."""

    batch: int
    text: int
    image: int

    @property
    def num_text_rows(self) -> int:
        return self.batch * self.text

    @property
    def num_rows(self) -> int:
        return self.batch * (self.text + self.image)

    @property
    def length(self) -> int:
        """Tokens that attend to each other."""
        return self.text + self.image

    @property
    def joined(self) -> TokenLayout:
        """The same tokens as one stream: rows of text and image alternate with the batch."""
        return TokenLayout(self.batch, 0, self.length)

    @property
    def image_alone(self) -> TokenLayout:
        return TokenLayout(self.batch, 0, self.image)


@dataclass(frozen=True)
class Modulation:
    """Where vectors of D channels start in a row of modulations, for the text's rows and for the image's."""

    text: int
    image: int


@dataclass(frozen=True)
class Branch:
    """A term of the residual stream: gate * (row_scales * values + bias).

    Attributes:
        values: (rows, channels).
        gate: where its vectors start.
        bias: (1 or 2, channels): of all rows, or of the text's and the image's; None: nothing.
        row_scales: (rows,), fp32; None: one.
    """

    values: torch.Tensor
    gate: Modulation
    bias: torch.Tensor | None = None
    row_scales: torch.Tensor | None = None

    def change(self) -> torch.Tensor:
        """Return row_scales * values, in fp32 or fp64 if there are scales."""
        return self.values if self.row_scales is None else _wide(self.values) * self.row_scales[:, None]

    def of(self, rows: slice) -> Branch:
        """Return the term of some rows."""
        scales = None if self.row_scales is None else self.row_scales[rows]
        return replace(self, values=self.values[rows], row_scales=scales)


@dataclass(frozen=True)
class PaddedImages:
    """Images as rows of pixels, with zeros after each line and a line of zeros after each image.

    Attributes:
        rows: (batch * (height + 1) * (width + 1), channels).
        scale: (1,), fp32, what e4m3 values are to be multiplied by; None: one.
    """

    rows: torch.Tensor
    batch: int
    height: int
    width: int
    scale: torch.Tensor | None = None

    @property
    def num_pixels(self) -> int:
        return self.batch * self.height * self.width

    @property
    def num_needed_rows(self) -> int:
        """Rows up to the last pixel that is not padding."""
        return len(self.rows) - (self.width + 1) - 1

    def unpadded(self) -> torch.Tensor:
        """Return the pixels, (batch, height, width, channels): a view."""
        shape = (self.batch, self.height + 1, self.width + 1, -1)
        return self.rows.view(shape)[:, : self.height, : self.width]


def padded(pixels: torch.Tensor, height: int, width: int, scale: torch.Tensor | None = None) -> PaddedImages:
    """Lay out (batch, height * width, channels) as padded images, of the same dtype."""
    batch, _, channels = pixels.shape
    lines = pixels.view(batch, height, width, channels)
    rows = lines.new_zeros((batch, height + 1, width + 1, channels))
    rows[:, :height, :width] = lines
    return PaddedImages(rows.flatten(0, 2), batch, height, width, scale)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values (rows, channels) and scales (rows, 1) in fp32; their product is about `x`."""
    wide = _wide(x)
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp(min=TINY) / E4M3_MAX
    return to_e4m3(wide / scale), scale.float()


def quantize_whole(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return e4m3 values and one scale (1,) in fp32; their product is about `x`."""
    wide = _wide(x)
    scale = scale_of(wide.abs().amax().reshape(1))
    return to_e4m3(wide / scale), scale.float()


def to_e4m3(x: torch.Tensor) -> torch.Tensor:
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def add_gated(
    x: torch.Tensor,
    y: torch.Tensor,
    bias: torch.Tensor | None,
    modulations: torch.Tensor,
    gate: Modulation,
    tokens: TokenLayout,
) -> torch.Tensor:
    """Return x + gate * (y + bias). For shapes see `vivace.machinery.kernels.norm_modulate.residual_norm`."""
    wide = _wide(x)
    change = _wide(y)
    if bias is not None:
        change = change + by_stream(_wide(bias), tokens)
    return (wide + _spread(modulations, gate, x.shape[-1], tokens) * change).to(x.dtype)


def norm_modulate(
    x: torch.Tensor,
    modulations: torch.Tensor,
    shift: Modulation,
    scale: Modulation,
    tokens: TokenLayout,
    eps: float = 1e-6,
    centred: bool = True,
) -> torch.Tensor:
    """Return LayerNorm(x) * (1 + scale) + shift in fp32 or fp64; RMSNorm, if it is not centred."""
    wide = _wide(x)
    if centred:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    normal = rms_normal(wide, eps)
    channels = x.shape[-1]
    return normal * (1 + _spread(modulations, scale, channels, tokens)) + _spread(
        modulations, shift, channels, tokens
    )


def scale_of(bound: torch.Tensor) -> torch.Tensor:
    """Return the scale of e4m3 values that do not exceed a bound."""
    return bound.clamp(min=TINY) / E4M3_MAX


def qk_norm_rope(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    weights: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tokens: TokenLayout,
    num_heads: int,
    eps: float = 1e-6,
    num_key_heads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values (batch, tokens, heads, channels) in fp32 or fp64, the text's tokens first.

    For the arguments see `vivace.machinery.kernels.qk_norm_rope.qk_norm_rope`.
    """
    channels = weights.shape[-1]
    heads = [num_heads, *[num_key_heads or num_heads] * 2]
    width = sum(heads) * channels
    wide = _wide(qkv[:, :width])
    if bias is not None:
        wide = wide + by_stream(_wide(bias[:, :width]), tokens)
    parts = wide.unflatten(-1, (-1, channels)).split(heads, dim=1)
    rotated = []
    for index in range(2):
        part = parts[index]
        part = part * torch.rsqrt(part.square().mean(dim=-1, keepdim=True) + eps)
        part = part * by_stream(_wide(weights[:, index]), tokens)[:, None]
        joined = to_joint(part, tokens)
        even, odd = joined.unflatten(-1, (-1, 2)).unbind(-1)
        c, s = (angles.to(joined.dtype).view(-1, *angles.shape[-2:])[:, :, None] for angles in (cos, sin))
        half = channels // 2
        turned = even * c[..., :half] - odd * s[..., :half], odd * c[..., -half:] + even * s[..., -half:]
        rotated.append(torch.stack(turned, dim=-1).flatten(-2))
    return rotated[0], rotated[1], to_joint(parts[2], tokens)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """Return GELU in its tanh form, in fp32 or fp64."""
    return torch.nn.functional.gelu(_wide(x), approximate="tanh")


def geglu(up: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return h GELU(g) in fp32 or fp64, where `up`, (rows, 2 channels), and its bias are h and g; GELU is exact."""
    wide = _wide(up) if bias is None else _wide(up) + _wide(bias)
    hidden, gate = wide.chunk(2, dim=-1)
    return hidden * torch.nn.functional.gelu(gate)


def rms_normal(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return rows divided by the root of their mean square, in fp32 or fp64."""
    wide = _wide(x)
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)


def for_each_row(vectors: torch.Tensor, start: int, channels: int, rows: int) -> torch.Tensor:
    """Return the vector from `start` on of each image (images, all vectors) for each of its rows (rows, channels)."""
    return _wide(vectors[:, start : start + channels]).repeat_interleave(rows // len(vectors), dim=0)


def swiglu(up: torch.Tensor) -> torch.Tensor:
    """Return SiLU(g) h in fp32 or fp64, where `up`, (rows, 2 channels), is g and h."""
    gate, hidden = _wide(up).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * hidden


def power_of_two_above(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest powers of two that are not below positive numbers."""
    mantissa, exponent = torch.frexp(x)  # mantissas from 0.5 to 1
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).to(exponent.dtype))


def group_norm(
    x: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    added: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Return GroupNorm(x + added), or SiLU of it, in fp32 or fp64. See `vivace.machinery.kernels.group_norm`."""
    wide = _wide(x) if added is None else _wide(x) + _wide(added)[:, None]
    normal = torch.nn.functional.group_norm(
        wide.transpose(1, 2), num_groups, weight.to(wide.dtype), bias.to(wide.dtype), eps
    ).transpose(1, 2)
    return torch.nn.functional.silu(normal) if silu else normal


def side_and_scale(planes: int) -> tuple[int, int]:
    """Return how many neighbours on a side a convolution's weights (9, or 16 if it enlarges) are for, and how it
    enlarges."""
    return {9: (3, 1), 16: (2, 2)}[planes]


def convolve(
    x: PaddedImages,
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return scales * conv(x, weight) + bias + residual, rows of pixels in fp32 or fp64.

    For shapes see `vivace.machinery.kernels.convolution.convolve`.
    """
    images = _wide(x.unpadded()).permute(0, 3, 1, 2)
    kernels = _wide(weight).permute(1, 2, 0)
    if side_and_scale(len(weight)) == (3, 1):
        made = torch.nn.functional.conv2d(images, kernels.unflatten(2, (3, 3)), padding=1)
    else:
        made = images.new_empty(x.batch, weight.shape[1], 2 * x.height, 2 * x.width)
        for place, kernel in enumerate(kernels.unflatten(2, (4, 2, 2)).unbind(2)):
            down, right = divmod(place, 2)
            around = torch.nn.functional.pad(images, (1 - right, right, 1 - down, down))
            made[:, :, down::2, right::2] = torch.nn.functional.conv2d(around, kernel)
    made = made.permute(0, 2, 3, 1).flatten(0, 2) * scales
    for more in (bias, residual):
        if more is not None:
            made = made + _wide(more)
    return made


def enlarging(weight: torch.Tensor) -> torch.Tensor:
    """Return the weights (16, outputs, inputs) with which a convolution enlarges its image twofold, in fp32 or fp64.

    Four neighbours for each of four places: of an output pixel in an even line, two lines of weights meet the pixel
    itself and one the pixel above; in an odd line one meets the pixel below.

    Args:
        weight: (outputs, inputs, 3, 3), of the enlarged image.
    """
    wide = _wide(weight)
    for dim, place in ((2, 2), (4, 3)):
        first, middle, last = wide.unbind(dim)
        even, odd = torch.stack([first, middle + last], dim), torch.stack([first + middle, last], dim)
        wide = torch.stack([even, odd], place)
    # (outputs, inputs, even or odd line, even or odd column, line of two, column of two)
    return wide.flatten(2).permute(2, 0, 1)


def rotate(x: torch.Tensor, size: int) -> torch.Tensor:
    """Multiply each block of `size` channels, a power of four, by the regular Hadamard matrix; twice is nothing.

    That of four is a Householder reflection, half of the sum minus the value, whose order is reversed; the larger are
    its Kronecker powers (arXiv 2512.03673).
    """
    blocks = _wide(x).reshape(-1, size)
    step = 1
    while step < size:
        fours = blocks.reshape(-1, 4, step)
        blocks, step = fours.sum(1, keepdim=True) / 2 - fours, 4 * step
    return blocks.reshape(-1, size).flip(1).reshape(x.shape)


def to_joint(rows: torch.Tensor, tokens: TokenLayout) -> torch.Tensor:
    """Return rows of tokens as (batch, tokens, ...), the text's tokens first."""
    text, image = rows[: tokens.num_text_rows], rows[tokens.num_text_rows :]
    return torch.cat(
        [text.unflatten(0, (tokens.batch, tokens.text)), image.unflatten(0, (tokens.batch, tokens.image))], 1
    )


def from_joint(joint: torch.Tensor, tokens: TokenLayout) -> torch.Tensor:
    """Invert `to_joint`; return a view where rows are in this order already."""
    if tokens.batch == 1 or not tokens.text:
        return joint.flatten(0, 1)
    return torch.cat([joint[:, : tokens.text].flatten(0, 1), joint[:, tokens.text :].flatten(0, 1)])


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def by_stream(values: torch.Tensor, tokens: TokenLayout) -> torch.Tensor:
    """Return values (streams, ...) for each row; with one stream, the same for all."""
    if values.shape[0] == 1:
        return values.expand(tokens.num_rows, *values.shape[1:])
    counts = torch.tensor(
        [tokens.num_text_rows, tokens.num_rows - tokens.num_text_rows], device=values.device
    )
    return values.repeat_interleave(counts, dim=0, output_size=tokens.num_rows)


def _spread(modulations: torch.Tensor, at: Modulation, channels: int, tokens: TokenLayout) -> torch.Tensor:
    wide = _wide(modulations)
    text = wide[:, at.text : at.text + channels].repeat_interleave(tokens.text, dim=0)
    image = wide[:, at.image : at.image + channels].repeat_interleave(tokens.image, dim=0)
    return torch.cat([text, image])


def two_blocks(channels: int) -> tuple[int, int]:
    """Return two powers of two that hold a row, since Triton's blocks are such; the second is 0 if one is exact.

    Rows of a UNet are five times a power of two wide, and FLUX's three times: one block would be a third empty.
    """
    first = 1 << (channels.bit_length() - 1)
    rest = channels - first
    return first, 1 << (rest - 1).bit_length() if rest else 0
