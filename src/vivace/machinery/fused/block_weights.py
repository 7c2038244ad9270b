"""The weights of double and single blocks, laid out for the fused forward. The original blocks give theirs up, each in
turn.

A double block keeps text and image apart, a single one has one stream of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from vivace.machinery.fused.forms import Fusing
from vivace.machinery.fused.lora_columns import name_layers
from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE
from vivace.machinery.fused.operations import AttentionScales, Places
from vivace.machinery.fused.products import Product
from vivace.machinery.fused.scales import Bounds, spread

Activation = Literal["gelu", "swiglu"]
Layers = list[list[Any]]
"""For each stream, first the text's, the Linear layers whose outputs lie side by side."""


@dataclass(frozen=True)
class BlockLayers:
    """The layers of a block: of a gated single block `qkv` has the MLP's up behind it, `out` takes attention and MLP
    side by side, and there is no `down`; `norms` of queries and keys, for each stream."""

    qkv: Layers
    out: Layers
    up: Layers | None
    down: Layers | None
    norms: list[tuple[Any, Any]]


def _no_second_attention(_: Any) -> None:
    """What most blocks have. By name, since fused models are pickled for other GPUs' processes."""


@dataclass(frozen=True)
class FusedArchitecture:
    """A transformer of double blocks, then single ones, as the fused forward needs to know it.

    Attributes:
        activation: of the MLPs: "gelu", in its tanh form, or "swiglu", SiLU of the first half times the second.
        double, single: the layers of a block of diffusers'; None: there are no single ones.
        modulations: the Linear layers of a block's own modulations: of a double block the image's, then the text's.
            None: blocks compute none.
        shares_modulations: all double blocks have the same, and all single ones.
        second: the layers of a double block's second attention, over the image alone; None: it has none. Its
            modulations are where those of a single block would be.
        text_last: the image's stream comes first, the text's last, so that a text's padding is behind all tokens; the
            text's modulations come first then.
        order: which of the vectors that `modulations` make is at each place of a double block's (`OF_DOUBLE`), None:
            zeros; and then of its second attention's (`OF_SINGLE`).
    """

    activation: Activation
    double: Callable[[Any], BlockLayers]
    single: Callable[[Any], BlockLayers] | None = None
    modulations: Callable[[Any], list[Any]] | None = None
    shares_modulations: bool = False
    second: Callable[[Any], BlockLayers | None] = _no_second_attention
    text_last: bool = False
    order: Callable[[Any], Sequence[int | None]] | None = None

    def blocks(self, transformer: Any) -> tuple[Any, Any]:
        singles = [] if self.single is None else transformer.single_transformer_blocks
        return transformer.transformer_blocks, singles

    def num_vectors(self, transformer: Any) -> int:
        doubles, singles = self.blocks(transformer)
        num_seconds = sum(self.second(block) is not None for block in doubles)
        return OF_DOUBLE * len(doubles) + OF_SINGLE * (len(singles) + num_seconds)

    def double_start(self, index: int) -> int:
        return 0 if self.shares_modulations else index * OF_DOUBLE

    def single_start(self, index: int, num_doubles: int) -> int:
        """Return which vector of modulations is a single block's first, or a second attention's."""
        if self.shares_modulations:
            return OF_DOUBLE
        return num_doubles * OF_DOUBLE + index * OF_SINGLE


class Norms(nn.Module):
    """The weights of the norms of queries and keys (streams, 2, channels), and for fp8 their scales (2,)."""

    def __init__(self, norms: list[tuple[Any, Any]], bounded: bool) -> None:
        super().__init__()
        weight = torch.stack([torch.stack([q.weight, k.weight]) for q, k in norms]).detach().bfloat16()
        self.register_buffer("weight", weight.contiguous())
        largest = weight.float().abs().amax(dim=(0, 2))
        scales = (weight.shape[-1] ** 0.5 * largest / 448).contiguous() if bounded else None
        self.register_buffer("scales", scales)

    def attention_scales(self, of_values: torch.Tensor | None, is_bf16: bool) -> AttentionScales | None:
        """Return what attention's inputs are rounded with; None in bf16, as in a call with a mask."""
        if self.scales is None or is_bf16:
            return None
        assert of_values is not None
        return AttentionScales(self.scales, of_values)


class BlockWeights(nn.Module):
    """The products and norms of one block, or of a second attention: see `BlockLayers`."""

    def __init__(self, layers: BlockLayers, activation: Activation, quantize: bool, bounded: bool) -> None:
        super().__init__()
        self.activation = activation
        self.qkv = Product(layers.qkv, quantize)
        self.out = Product(layers.out, quantize)
        self.up = None if layers.up is None else Product(layers.up, quantize)
        self.down = None if layers.down is None else Product(layers.down, quantize)
        self.norms = Norms(layers.norms, bounded)

    @property
    def ends_text(self) -> bool:
        """Whether the text is attended to for the last time, and goes no further."""
        return len(self.out.weight) < len(self.qkv.weight)

    def limits(self) -> torch.Tensor:
        """Return bounds of values and hidden channels (see `Bounds`): (1 or 2, 2, 2) of a double block, (2,) of
        others."""
        channels = self.qkv.weight.shape[2]
        products = [_limits(self.qkv, slice(2 * channels, 3 * channels))]
        if self.activation == "gelu" and self.up is not None:
            products.append(_limits(self.up).expand_as(products[0]))
        return torch.stack(products) if self.down is not None else torch.stack(products).amax(dim=(0, 1))


class FusedBlocks(nn.Module):
    """All blocks of a transformer, whose weights are taken over and removed from it.

    Args:
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.
        taking: is called with each block before its layers are taken.

    Attributes:
        takes_layers: diffusers' layers are not its own modules, but slots of its products.
        seconds: second attentions, in order; second_at: which of them is a double block's.
        unit: a scale of one, (4,), of which cuBLASLt takes the first; for fp8.
        frequency, axis: of the rotary embedding; None: there is none.
    """

    takes_layers = True

    def __init__(
        self,
        transformer: Any,
        architecture: FusedArchitecture,
        how: Fusing,
        taking: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__()
        quantize, bounded, places = how.quantize, how.bounded, how.places
        name_layers(transformer)
        self.architecture = architecture
        self.doubles, self.singles, self.seconds = (nn.ModuleList() for _ in range(3))
        self.second_at = dict[int, int]()
        limits: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []

        def take_over(layers: BlockLayers, is_bounded: bool, made: nn.ModuleList) -> None:
            weights = BlockWeights(layers, architecture.activation, quantize, is_bounded)
            if quantize:
                limits[made is not self.doubles].append(weights.limits())
            made.append(weights.to(places.home))

        doubles, singles = architecture.blocks(transformer)
        num_doubles = len(doubles)
        for index, (block, is_bounded) in enumerate(
            zip(_removed(doubles), bounded[:num_doubles], strict=True)
        ):
            block.to(places.work)
            taking(block)
            take_over(architecture.double(block), is_bounded, self.doubles)
            if (second := architecture.second(block)) is not None:
                self.second_at[index] = len(self.seconds)
                take_over(second, is_bounded, self.seconds)
        for block, is_bounded in zip(_removed(singles), bounded[num_doubles:], strict=True):
            assert architecture.single is not None
            block.to(places.work)
            taking(block)
            take_over(architecture.single(block), is_bounded, self.singles)
        self.bounds = self._bounds(limits, places) if quantize else None
        unit = spread(torch.ones(1, device=places.home))[0] if quantize else None
        self.register_buffer("unit", unit, persistent=False)
        frequency, axis = None, None
        if axes := transformer.config.get("axes_dims_rope"):
            frequency, axis = frequencies(axes, transformer.pos_embed.theta, places.home)
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("axis", axis, persistent=False)

    def rope(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return tables(ids, self.frequency, self.axis)

    def _bounds(self, limits: tuple[list[torch.Tensor], list[torch.Tensor]], places: Places) -> Bounds:
        num_products = 2 if self.architecture.activation == "gelu" else 1
        shapes = (0, num_products, 2, 2), (0, 2)
        doubles, singles = (
            torch.stack(tensors) if tensors else torch.empty(shape, device=places.work)
            for tensors, shape in zip(limits, shapes, strict=True)
        )
        num_doubles = len(self.doubles)
        starts = (
            [self.architecture.double_start(index) for index in range(num_doubles)],
            [self.architecture.single_start(index, num_doubles) for index in range(len(singles))],
        )
        bounds: Bounds = Bounds(doubles, singles, starts).to(places.home)
        return bounds


def _limits(product: Product, outputs: slice = slice(None)) -> torch.Tensor:
    """Return for each stream the largest norm of a row of an e4m3 weight, and the largest bias, of some outputs."""
    assert product.scale is not None
    limits = []
    for stream, (weight, scale) in enumerate(zip(product.weight, product.scale, strict=True)):
        norms = (weight[outputs].float() * scale).norm(dim=1)
        bias = (
            norms.new_zeros(())
            if product.bias is None
            else product.bias[stream, outputs].float().abs().amax()
        )
        limits.append(torch.stack([norms.amax(), bias]))
    return torch.stack(limits)


def _removed(blocks: Any) -> Any:
    """Yield the blocks in order, and drop each from the list, so that its memory is free after its use."""
    while len(blocks):
        block = blocks[0]
        del blocks[0]
        yield block
        del block


def projections(attn: Any, stream: Literal["image", "text"]) -> list[Any]:
    """Return the Linear layers of queries, keys and values, whether they are already fused or not."""
    fused, separate = {
        "image": ("to_qkv", ("to_q", "to_k", "to_v")),
        "text": ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    }[stream]
    if getattr(attn, fused, None) is not None:
        return [getattr(attn, fused)]
    return [getattr(attn, name) for name in separate]


def paired(layer: Any, num_heads: int) -> Any:
    """Return a layer or norm with the pairs that its rotary embedding turns side by side: products stay the same."""
    count = len(layer.weight) // num_heads
    pairs = torch.arange(count, device=layer.weight.device).view(2, -1).t().flatten()
    order = (torch.arange(num_heads, device=pairs.device)[:, None] * count + pairs).flatten()
    bias = getattr(layer, "bias", None)
    return SimpleNamespace(
        weight=layer.weight[order],
        bias=None if bias is None else bias[order],
        vivace_name=getattr(layer, "vivace_name", ""),
        vivace_order=order,
    )


def frequencies(axes: Sequence[int], theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the frequency of each pair of channels, in fp64, and the axis whose position it turns by."""
    angles, of_axis = [], []
    for axis, channels in enumerate(axes):
        exponents = torch.arange(0, channels, 2, dtype=torch.float64) / channels
        angles.append(theta**-exponents)
        of_axis.append(torch.full((channels // 2,), axis))
    return torch.cat(angles).to(device), torch.cat(of_axis).to(device)


def tables(
    ids: torch.Tensor, frequency: torch.Tensor, axis: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines (tokens, pairs) in fp32 for positions (tokens, axes); fp64 before, as in diffusers."""
    angles = ids.double().index_select(1, axis) * frequency
    return angles.cos().float(), angles.sin().float()


def of_image(ids: torch.Tensor) -> torch.Tensor:
    """Return positions (tokens, axes) of one image, of those of a batch, which are the same."""
    return ids[0] if ids.ndim == 3 else ids
