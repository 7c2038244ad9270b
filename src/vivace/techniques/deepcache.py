"""Reuse the deep features of a UNet in some steps; only its outermost layers are computed.

Why: consecutive steps change the deep, semantic features of a UNet little. What a layer near the output gets from
    below is kept from the last full step; a hit computes only the layers outside of it. With branch 0 that is the
    first convolution, the last layer and the last convolution: 8 % of SD 1.5's operations (512 px), 1.5 % of SDXL's
    (1024 px). With branch 2 it is 38 % and 6.9 %.
Costs: the image drifts with every hit. One feature map is kept (SDXL at 1024 px with guidance: 21 MB in fp16). The
    rival is always fewer plain steps: bench both.
Needs: a UNet of the usual blocks (SD 1.x, SD 2.x, SDXL); transformers have no skip connections.
Source: Ma, Fang, Wang, DeepCache: Accelerating Diffusion Models for Free, CVPR 2024, arXiv 2312.00858.

Every `interval`th step is a full one; `hits` sets instead the share of the steps after the first that are hits, evenly
spaced. `branch` is the skip connection at which the kept feature enters, counted from the outside: 0 is the cheapest
hit and the coarsest. The first step of each call is full as well, and one where the batch changes (guidance that is cut
off). The schedule is fixed, so random weights take it as trained ones do.

Whether a step is full is decided in front of the UNet's forward. `compile` therefore makes two graphs without a break,
one of the whole UNet and one of its outermost layers, and `cuda_graph` captures both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from vivace.machinery.step_caching.engine import CachedDenoiser, IsHit, StepForwards
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.step_caching.when import since_computed
from vivace.machinery.technique import Target, Trait, knob

_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D")


class Deepcache(StepCache):
    name: ClassVar[str] = "deepcache"
    summary: ClassVar[str] = "reuse a UNet's deep features between steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval",)
    replaced_in_words: ClassVar[str] = "an interval"
    traits: ClassVar[frozenset[Trait]] = frozenset()  # the feature is kept between blocks

    interval: int = knob(3, ge=2, le=100, tune=[2, 3, 5], about="every so many steps one is computed whole")
    branch: int = knob(
        0,
        ge=0,
        le=100,
        tune=[0, 1, 2],
        about="skip connection at which the kept feature enters; 0: outermost",
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        unet = target.module("denoiser")
        if "_orig_mod" in getattr(unet, "_modules", {}):
            return (
                "torch.compile has wrapped this UNet, whose blocks cannot be taken apart inside of that; give the "
                "pipeline the UNet itself (pipe.unet = pipe.unet._orig_mod), and add compile to the recipe"
            )
        blocks = [*getattr(unet, "down_blocks", ()), *getattr(unet, "up_blocks", ())]
        if not blocks:
            return f"{type(unet).__name__} is no UNet: it has no skip connections past deep features"
        if others := sorted({type(block).__name__ for block in blocks} - set(_BLOCKS)):
            return f"how to leave out part of {', '.join(others)} is not known; blocks known: {', '.join(_BLOCKS)}"
        num = _num_skips(unet)
        if self.branch >= num:
            return (
                f"this UNet has {num} skip connections; give a branch from 0 to {num - 1}, got {self.branch}"
            )
        return None

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        unet = target.module("denoiser")
        deep = _Deep()
        whole, outer, outer_forward = unet.forward, _outermost(unet, self.branch, deep), type(unet).forward

        def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            return whole(*args, **kwargs)[0], (deep.take(),)

        def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("mid_block_additional_residual") is not None:
                kwargs["mid_block_additional_residual"] = 0  # it is in the kept feature
            # A copy: FreeU writes into what it gets.
            deep.feature = kept[0].clone()
            return outer_forward(outer, *args, **kwargs)[0]

        cached = CachedDenoiser(
            unet,
            StepForwards(compute, reuse),
            is_hit,
            # Adapters add to features in places that a hit skips.
            can_reuse=lambda kwargs: kwargs.get("down_intrablock_additional_residuals") is None,
        )
        return Attached(
            cached.counter,
            {"denoiser.layers_computed_in_a_hit": f"{_num_resnets(outer)} of {_num_resnets(unet)}"},
        )

    def decision(self, target: Target) -> StepDecision:
        return StepDecision(since_computed(self.interval))


@dataclass
class _Deep:
    """The deep feature within one forward. Empty between forwards, so that a graph carries no state."""

    feature: Any = None

    def take(self) -> Any:
        feature, self.feature = self.feature, None
        return feature


def _num_skips(unet: Any) -> int:
    """Return the number of skip connections: one per layer of the up blocks, with that of the first convolution."""
    return sum(len(block.resnets) for block in unet.up_blocks)


def _num_resnets(unet: Any) -> int:
    middle = getattr(unet.mid_block, "resnets", ())
    return sum(len(block.resnets) for block in (*unet.down_blocks, *unet.up_blocks)) + len(middle)


def _outermost(unet: Any, branch: int, deep: _Deep) -> Any:
    """Return a UNet of the same layers (not copies) up to a skip connection, with the deep feature below it.

    Its `forward` is the UNet's own. When the whole UNet is computed, it puts the feature into `deep`.
    """
    import torch

    class Below(torch.nn.Module):  # type: ignore[misc]
        """Replaces the middle block."""

        def forward(self, *_: Any, **__: Any) -> Any:
            return deep.take()

    outer = _view(unet)
    outer.down_blocks = torch.nn.ModuleList(_down_to(unet.down_blocks, branch))
    outer.mid_block = Below()
    up_blocks = list(unet.up_blocks)
    left = branch
    for index in reversed(range(len(up_blocks))):
        block = up_blocks[index]
        if left < len(block.resnets):
            break
        left -= len(block.resnets)
    first = len(block.resnets) - 1 - left
    outer.up_blocks = torch.nn.ModuleList([_part(block, slice(first, None)), *up_blocks[index + 1 :]])
    _tap(block, first, deep)
    return outer


def _down_to(blocks: Any, num: int) -> list[Any]:
    """Return the down blocks up to their first `num` outputs: one per layer, and one per downsampling."""
    down = []
    for block in blocks:
        num_here = len(block.resnets) + bool(block.downsamplers)
        if num >= num_here:
            down.append(block)
        elif num:
            down.append(_part(block, slice(num), downsamplers=None))
        num = max(0, num - num_here)
    return down


def _part(block: Any, layers: slice, **changed: Any) -> Any:
    """Return a block with some of the same layers."""
    part = _view(block)
    for name in ("resnets", "attentions"):
        if hasattr(block, name):
            setattr(part, name, getattr(block, name)[layers])
    for name, value in changed.items():
        setattr(part, name, value)
    return part


def _view(module: Any) -> Any:
    """Return a shallow copy, to replace some parts without changing the module; it shares all tensors."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _tap(block: Any, layer: int, deep: _Deep) -> None:
    """Copy the input from below of an up block's layer into `deep` when the block is called.

    The layer may write into what it gets, as FreeU does.
    """
    if layer == 0:

        def enters(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            deep.feature = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).clone()

        block.register_forward_pre_hook(enters, with_kwargs=True)
        return

    def leaves(_: Any, __: Any, output: Any) -> None:
        deep.feature = (output[0] if isinstance(output, tuple) else output).clone()

    below = block.attentions if hasattr(block, "attentions") else block.resnets
    below[layer - 1].register_forward_hook(leaves)
