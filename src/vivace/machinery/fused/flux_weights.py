"""The weights of a FLUX transformer, laid out for the fused forward. The original blocks give theirs up one by one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vivace.machinery.fused.modulations import OF_DOUBLE, OF_SINGLE, Modulations
from vivace.machinery.fused.operations import Places
from vivace.machinery.fused.products import Product
from vivace.machinery.fused.rope import frequencies
from vivace.machinery.fused.scales import Bounds


class Norms(nn.Module):  # type: ignore[misc]
    """The weights of the norms of queries and keys (streams, 2, channels), and for fp8 their scales (2,).

    A normalised query of n channels has the norm sqrt(n), so no element exceeds sqrt(n) max|weight|.
    """

    def __init__(self, norms: list[tuple[Any, Any]], bounded: bool) -> None:
        super().__init__()
        weight = torch.stack([torch.stack([q.weight, k.weight]) for q, k in norms]).detach().bfloat16()
        self.register_buffer("weight", weight.contiguous())
        largest = weight.float().abs().amax(dim=(0, 2))
        scales = (weight.shape[-1] ** 0.5 * largest / 448).contiguous() if bounded else None
        self.register_buffer("scales", scales)


class Double(nn.Module):  # type: ignore[misc]
    def __init__(self, block: Any, quantize: bool, bounded: bool) -> None:
        super().__init__()
        attn = block.attn
        self.qkv = Product([_projections(attn, "text"), _projections(attn, "image")], quantize)
        self.out = Product([[attn.to_add_out], [attn.to_out[0]]], quantize)
        self.up = Product([[block.ff_context.net[0].proj], [block.ff.net[0].proj]], quantize)
        self.down = Product([[block.ff_context.net[2]], [block.ff.net[2]]], quantize)
        norms = [(attn.norm_added_q, attn.norm_added_k), (attn.norm_q, attn.norm_k)]
        self.norms = Norms(norms, bounded)

    def limits(self) -> torch.Tensor:
        """Of the values and of the MLP's hidden channels, for text and image: (2, 2, 2). See `Bounds`."""
        return torch.stack([_limits(self.qkv, 2 * self.qkv.weight.shape[2]), _limits(self.up)])


class Single(nn.Module):  # type: ignore[misc]
    def __init__(self, block: Any, quantize: bool, bounded: bool) -> None:
        super().__init__()
        attn = block.attn
        self.qkv = Product([_projections(attn, "image")], quantize)
        self.up = Product([[block.proj_mlp]], quantize)
        self.out = Product([[block.proj_out]], quantize)
        self.norms = Norms([(attn.norm_q, attn.norm_k)], bounded)

    def limits(self) -> torch.Tensor:
        """Of the values and the MLP's hidden channels together: (2,). See `Bounds`."""
        values = _limits(self.qkv, 2 * self.qkv.weight.shape[2])[0]
        return torch.maximum(values, _limits(self.up)[0])


class FusedFlux(nn.Module):  # type: ignore[misc]
    """All blocks.

    Attributes:
        modulations: of double blocks, then of single ones.
        doubles, singles: products and norms of each block.
        bounds: for fp8, what activations cannot exceed.
        frequency, axis: of the rotary embedding.
    """

    def __init__(self, transformer: Any, quantize: bool, bounded: tuple[bool, ...], places: Places) -> None:
        super().__init__()
        config = transformer.config
        channels = config.num_attention_heads * config.attention_head_dim
        doubles, singles = transformer.transformer_blocks, transformer.single_transformer_blocks
        num_outputs = (OF_DOUBLE * len(doubles) + OF_SINGLE * len(singles)) * channels
        num_inputs = 2 + config.pooled_projection_dim
        self.modulations = Modulations(num_outputs, channels, quantize, num_inputs, places)
        self.doubles, self.singles = nn.ModuleList(), nn.ModuleList()
        at, which = 0, iter(bounded)
        of_doubles, of_singles = [], []  # limits, which are of products alone
        for block in _taken(doubles):
            block.to(places.work)
            at = self.modulations.fill(at, block.norm1.linear)
            at = self.modulations.fill(at, block.norm1_context.linear)
            double = Double(block, quantize, next(which))
            if quantize:
                of_doubles.append(double.limits())
            self.doubles.append(double.to(places.home))
        for block in _taken(singles):
            block.to(places.work)
            at = self.modulations.fill(at, block.norm.linear)
            single = Single(block, quantize, next(which))
            if quantize:
                of_singles.append(single.limits())
            self.singles.append(single.to(places.home))
        self.bounds = None
        if quantize:
            empty = torch.empty((0, 2), device=places.work)
            limits = (torch.stack(tensors) if tensors else empty for tensors in (of_doubles, of_singles))
            self.bounds = Bounds(*limits).to(places.home)
        frequency, axis = frequencies(config.axes_dims_rope, transformer.pos_embed.theta, places.home)
        self.register_buffer("frequency", frequency, persistent=False)
        self.register_buffer("axis", axis, persistent=False)


def _limits(product: Any, start: int = 0) -> torch.Tensor:
    """For each stream the largest norm of a row of an e4m3 weight, and the largest bias, from output `start` on."""
    limits = []
    for weight, scale, bias in zip(product.weight, product.scale, product.bias, strict=True):
        norms = (weight[start:].float() * scale).norm(dim=1)
        limits.append(torch.stack([norms.amax(), bias[start:].float().abs().amax()]))
    return torch.stack(limits)


def fused_flux(transformer: Any, quantize: bool, bounded: tuple[bool, ...], places: Places) -> FusedFlux:
    """Take the weights over from a transformer's blocks, which are removed from it.

    Args:
        quantize: store weights in e4m3, with one scale for each; else in bf16.
        bounded: for each block, whether attention's inputs are to be bounded, for fp8.
        places: each block is moved to where it computes, and its new weights to where they are kept.
    """
    fused = FusedFlux(transformer, quantize, bounded, places)
    fused.eval().requires_grad_(False)
    return fused


def _taken(blocks: Any) -> Any:
    """Yield the blocks in order, and drop each one from the list, so that its memory is free once it was used."""
    while len(blocks):
        block = blocks[0]
        del blocks[0]
        yield block
        del block


def _projections(attn: Any, stream: str) -> list[Any]:
    """The Linear layers of queries, keys and values, which may have been fused before."""
    fused, separate = {
        "image": ("to_qkv", ("to_q", "to_k", "to_v")),
        "text": ("to_added_qkv", ("add_q_proj", "add_k_proj", "add_v_proj")),
    }[stream]
    if getattr(attn, fused, None) is not None:
        return [getattr(attn, fused)]
    return [getattr(attn, name) for name in separate]
