"""FLUX's blocks as one residual, which step caches keep and add again instead of computing the blocks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.step_caching.cached_denoiser import StepForwards

if TYPE_CHECKING:
    import torch

WHOLE_TOKENS = "_vivace_whole_tokens"
"""Attribute of a denoiser whose tokens vivace has split among processes: a function that makes the whole tensor of a
process's own part of the image's tokens (batch, tokens, channels). All processes call it at the same point."""


def not_flux(denoiser: Any) -> str | None:
    """Why a denoiser's blocks are not known as one residual, or None."""
    if type(denoiser).__name__ != "FluxTransformer2DModel":
        return f"{type(denoiser).__name__} is no FLUX transformer: only of those it is known where its blocks end"
    return None


@dataclass
class _Passing:
    """Tensors within one forward. Empty between forwards, so that a graph carries no state."""

    entering: torch.Tensor | None = None
    leaving: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    modulated: torch.Tensor | None = None

    def clear(self) -> None:
        self.entering = self.leaving = self.residual = self.modulated = None


def residual_forwards(transformer: Any) -> StepForwards:
    """Return the transformer's forwards that compute, or reuse, the residual of all blocks.

    `look` returns the first block's input, modulated by the timestep. To reuse and to look, the transformer's own
    forward runs over one other block, which adds the residual or modulates. Neither of these blocks has tensors of its
    own, so that what moves the transformer moves theirs.
    """
    import torch

    passing = _Passing()
    norm1 = transformer.transformer_blocks[0].norm1

    class AddResidual(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, encoder_hidden_states: Any, **_: Any) -> Any:
            return encoder_hidden_states, hidden_states + passing.residual

    class Modulate(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, encoder_hidden_states: Any, temb: Any, **_: Any) -> Any:
            passing.modulated = norm1(hidden_states, emb=temb)[0]
            return encoder_hidden_states, hidden_states

    def entered(_: Any, __: Any, output: Any) -> None:
        passing.entering = output

    def left(_: Any, args: tuple[Any, ...]) -> None:
        passing.leaving = args[0]

    # Not on the blocks: where one compiled code serves all blocks, it does not tell their hooks apart.
    transformer.x_embedder.register_forward_hook(entered)
    transformer.norm_out.register_forward_pre_hook(left)
    whole, plain = transformer.forward, type(transformer).forward
    of_all_tokens = getattr(transformer, WHOLE_TOKENS, None)
    reusing, looking = _with_block(transformer, AddResidual()), _with_block(transformer, Modulate())

    def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        output = whole(*args, **kwargs)[0]
        residual = passing.leaving - passing.entering  # type: ignore[operator]
        passing.clear()
        # Where several GPUs share the tokens, the main process alone adds and compares residuals, whole ones.
        return output, (residual if of_all_tokens is None else of_all_tokens(residual),)

    def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (passing.residual,) = kept
        output = plain(reusing, *args, **_without_extras(kwargs))[0]
        passing.clear()
        return output

    def look(*args: Any, **kwargs: Any) -> Any:
        plain(looking, *args, **_without_extras(kwargs))
        modulated = passing.modulated
        passing.clear()
        return modulated

    return StepForwards(compute, reuse, look)


def _without_extras(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments without what a ControlNet adds between the blocks, which is in the residual."""
    kwargs = kwargs | {"controlnet_block_samples": None, "controlnet_single_block_samples": None}
    if kwargs.get("joint_attention_kwargs"):
        kwargs["joint_attention_kwargs"] = dict(kwargs["joint_attention_kwargs"])  # the forward pops from it
    return kwargs


def _with_block(transformer: Any, block: Any) -> Any:
    """The transformer with one other block; it shares all else."""
    import torch

    view = copy.copy(transformer)
    view._modules = dict(transformer._modules)
    view.transformer_blocks = torch.nn.ModuleList([block])
    view.single_transformer_blocks = torch.nn.ModuleList()
    return view


@contextmanager
def watching_residuals(transformer: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the residual of all blocks, one for each call of the transformer."""
    entering: list[Any] = []
    residuals: list[Any] = []

    def entered(_: Any, __: Any, output: Any) -> None:
        entering.append(output.detach())

    def left(_: Any, args: tuple[Any, ...]) -> None:
        residuals.append(args[0].detach() - entering.pop())

    hooks = [
        transformer.x_embedder.register_forward_hook(entered),
        transformer.norm_out.register_forward_pre_hook(left),
    ]
    try:
        yield residuals
    finally:
        for hook in hooks:
            hook.remove()
