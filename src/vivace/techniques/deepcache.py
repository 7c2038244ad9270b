"""The deep features of a UNet reused for some steps; only its outermost layers are computed anew.

Why: consecutive steps change the deep, semantic features of a UNet little. What a layer near the output gets from
    below is kept from the last full step; a hit computes the layers outside of it alone. With branch 0 that is the
    first convolution, the last layer and the last convolution: 8 % of SD 1.5's operations (512 px), 1.5 % of SDXL's
    (1024 px). With branch 2 it is 38 % and 6.9 %.
Costs: the picture drifts with every hit. One feature map is kept (SDXL at 1024 px with guidance: 21 MB in fp16). The
    rival is always fewer plain steps: bench both.
Needs: a UNet of the usual blocks (SD 1.x, SD 2.x, SDXL); transformers have no skip connections.
Source: Ma, Fang, Wang, DeepCache: Accelerating Diffusion Models for Free, CVPR 2024, arXiv 2312.00858.

Every `interval`th step is a full one; `hits` says instead which share of the steps after the first are hits, evenly
spread. `branch` is the skip connection at which the kept feature enters, counted from the outside: 0 is the cheapest
hit and the coarsest. Steps are full as well where the batch changes (guidance that is cut off), and in each call's
first. The schedule is fixed, so random weights take it as trained ones do.

It is decided in front of the UNet's forward whether a step is full. `compile` therefore makes two graphs without a
break in either, one of the whole UNet and one of its outermost layers, and `cuda_graph` records both.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from vivace.contract import Effect, Target, knob
from vivace.step_caching.step_cache import (
    KEPT,
    MODE,
    ONE_AT_A_TIME,
    Cached,
    Look,
    Memory,
    StepCache,
    chosen_by,
    has_step_cache,
    hits_knob,
    is_scheduled_hit,
)

_BLOCKS = ("DownBlock2D", "CrossAttnDownBlock2D", "UpBlock2D", "CrossAttnUpBlock2D")


class Deepcache(StepCache):
    name: ClassVar[str] = "deepcache"
    summary: ClassVar[str] = "reuse a UNet's deep features between steps"
    replaced: ClassVar[tuple[str, ...]] = ("interval",)
    replaced_in_words: ClassVar[str] = "an interval"

    interval: int = knob(3, ge=2, le=100, tune=[2, 3, 5], about="every so many steps one is computed whole")
    branch: int = knob(
        0,
        ge=0,
        le=100,
        tune=[0, 1, 2],
        about="skip connection at which the kept feature enters; 0: outermost",
    )
    hits: float | None = hits_knob("an interval")

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        unet = target.module("denoiser")
        blocks = [*getattr(unet, "down_blocks", ()), *getattr(unet, "up_blocks", ())]
        if not blocks:
            return f"{type(unet).__name__} is no UNet: it has no skip connections past deep features"
        if others := sorted({type(block).__name__ for block in blocks} - set(_BLOCKS)):
            return f"how to leave out part of {', '.join(others)} is not known; blocks known: {', '.join(_BLOCKS)}"
        if has_step_cache(unet):
            return ONE_AT_A_TIME
        num = _num_skips(unet)
        if self.branch >= num:
            return (
                f"this UNet has {num} skip connections; give a branch from 0 to {num - 1}, got {self.branch}"
            )
        return None

    def apply(self, target: Target) -> Effect:
        unet = target.module("denoiser")
        deep = _Deep()
        whole, outer, outer_forward = unet.forward, _outermost(unet, self.branch, deep), type(unet).forward

        def forward(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            mode, kept = kwargs.pop(MODE), kwargs.pop(KEPT, ())
            kwargs["return_dict"] = False
            if mode == "compute":
                return whole(*args, **kwargs)[0], (deep.take(),)
            if kwargs.get("mid_block_additional_residual") is not None:
                kwargs["mid_block_additional_residual"] = 0  # the kept feature has it in it
            deep.feature = kept[0]
            return outer_forward(outer, *args, **kwargs)[0], ()

        def decide(memory: Memory, _: Look) -> bool:
            if self.hits is not None:
                return is_scheduled_hit(memory.step, self.hits)
            # Counted from the last full step, which need not be one of the schedule's own.
            since: int = 0 if not memory.kept else memory.notes["since"] + 1
            since %= self.interval
            memory.notes["since"] = since
            return since != 0

        cached = Cached(
            unet,
            forward,
            decide,
            # Adapters add to features at places which a hit leaves out.
            can_reuse=lambda kwargs: kwargs.get("down_intrablock_additional_residuals") is None,
            always_compute=not target.model.has_weights,
        )
        return cached.effect(
            {
                "denoiser.deepcache": chosen_by(self.hits, f"interval={self.interval}"),
                "denoiser.layers_computed_in_a_hit": f"{_num_resnets(outer)} of {_num_resnets(unet)}",
            }
        )


@dataclass
class _Deep:
    """Where the deep feature passes within one forward; empty between forwards, so that a graph carries no state."""

    feature: Any = None

    def take(self) -> Any:
        feature, self.feature = self.feature, None
        return feature


def _num_skips(unet: Any) -> int:
    """Skip connections: one a layer of the up blocks, the first convolution's among them."""
    return sum(len(block.resnets) for block in unet.up_blocks)


def _num_resnets(unet: Any) -> int:
    middle = getattr(unet.mid_block, "resnets", ())
    return sum(len(block.resnets) for block in (*unet.down_blocks, *unet.up_blocks)) + len(middle)


def _outermost(unet: Any, branch: int, deep: _Deep) -> Any:
    """A UNet of the same layers (not copies) up to a skip connection, with the deep feature in the place of the rest.

    Its `forward` is the UNet's own. The whole UNet is made to leave the feature in `deep` when it is computed.
    """
    import torch

    class Below(torch.nn.Module):  # type: ignore[misc]
        """In the place of the middle block."""

        def forward(self, *_: Any, **__: Any) -> Any:
            return deep.take()

    outer = _view(unet)
    outer.down_blocks = torch.nn.ModuleList(_down_to(unet.down_blocks, branch))
    outer.mid_block = Below()
    up_blocks = list(unet.up_blocks)
    left = branch
    for place in reversed(range(len(up_blocks))):
        block = up_blocks[place]
        if left < len(block.resnets):
            break
        left -= len(block.resnets)
    first = len(block.resnets) - 1 - left
    outer.up_blocks = torch.nn.ModuleList([_part(block, slice(first, None)), *up_blocks[place + 1 :]])
    _tap(block, first, deep)
    return outer


def _down_to(blocks: Any, num: int) -> list[Any]:
    """The down blocks' first `num` outputs: of each layer, and of each downsampling."""
    found = []
    for block in blocks:
        num_here = len(block.resnets) + bool(block.downsamplers)
        if num >= num_here:
            found.append(block)
        elif num:
            found.append(_part(block, slice(num), downsamplers=None))
        num = max(0, num - num_here)
    return found


def _part(block: Any, layers: slice, **changed: Any) -> Any:
    """A block of some of the same layers."""
    part = _view(block)
    for name in ("resnets", "attentions"):
        if hasattr(block, name):
            setattr(part, name, getattr(block, name)[layers])
    for name, value in changed.items():
        setattr(part, name, value)
    return part


def _view(module: Any) -> Any:
    """The module again, to exchange some of its parts without changing it; it shares all tensors."""
    view = copy.copy(module)
    view._modules = dict(module._modules)
    return view


def _tap(block: Any, layer: int, deep: _Deep) -> None:
    """Leave in `deep` what an up block's layer gets from below when the block is called."""
    if layer == 0:

        def enters(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            deep.feature = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

        block.register_forward_pre_hook(enters, with_kwargs=True)
        return

    def leaves(_: Any, __: Any, output: Any) -> None:
        deep.feature = output[0] if isinstance(output, tuple) else output

    below = block.attentions if hasattr(block, "attentions") else block.resnets
    below[layer - 1].register_forward_hook(leaves)
