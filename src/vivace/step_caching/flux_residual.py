"""FLUX's blocks as one residual, which step caches keep and add again instead of computing the blocks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from vivace.step_caching.step_cache import KEPT, MODE, WHOLE_TOKENS


def not_flux(denoiser: Any) -> str | None:
    """Why a denoiser's blocks are not known as one residual, or None."""
    if type(denoiser).__name__ != "FluxTransformer2DModel":
        return f"{type(denoiser).__name__} is no FLUX transformer: only of those it is known where its blocks end"
    return None


@dataclass
class _Inside:
    """Where tensors pass within one forward; empty between forwards, so that a graph carries no state."""

    entering: Any = None
    leaving: Any = None
    residual: Any = None
    modulated: Any = None

    def clear(self) -> None:
        self.entering = self.leaving = self.residual = self.modulated = None


def residual_forward(transformer: Any) -> Callable[..., Any]:
    """The transformer's forward in the three modes of `step_cache.Cached`.

    A hit and a look are the transformer's own forward over other blocks: one that adds the residual, and one that
    modulates. Neither block needs tensors of its own, so that what moves the transformer's moves theirs.
    """
    import torch

    inside = _Inside()
    norm1 = transformer.transformer_blocks[0].norm1

    class Residual(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, encoder_hidden_states: Any, **_: Any) -> Any:
            return encoder_hidden_states, hidden_states + inside.residual

    class Modulated(torch.nn.Module):  # type: ignore[misc]
        def forward(self, hidden_states: Any, encoder_hidden_states: Any, temb: Any, **_: Any) -> Any:
            inside.modulated = norm1(hidden_states, emb=temb)[0]
            return encoder_hidden_states, hidden_states

    def entered(_: Any, __: Any, output: Any) -> None:
        inside.entering = output

    def left(_: Any, args: tuple[Any, ...]) -> None:
        inside.leaving = args[0]

    # Not on the blocks: they may be compiled one code for all, which takes no notice of whose hooks it runs.
    transformer.x_embedder.register_forward_hook(entered)
    transformer.norm_out.register_forward_pre_hook(left)
    whole, plain = transformer.forward, type(transformer).forward
    of_all_tokens = getattr(transformer, WHOLE_TOKENS, None)
    reusing, looking = _of_blocks(transformer, Residual()), _of_blocks(transformer, Modulated())

    def forward(*args: Any, **kwargs: Any) -> Any:
        mode, kept = kwargs.pop(MODE), kwargs.pop(KEPT, ())
        kwargs["return_dict"] = False
        if mode == "compute":
            output = whole(*args, **kwargs)[0]
            residual = inside.leaving - inside.entering
            inside.clear()
            # Of several GPUs the one that draws adds and compares whole residuals, alone.
            return output, (residual if of_all_tokens is None else of_all_tokens(residual),)
        # What a control net adds between the blocks is in the residual.
        kwargs |= {"controlnet_block_samples": None, "controlnet_single_block_samples": None}
        if kwargs.get("joint_attention_kwargs"):
            kwargs["joint_attention_kwargs"] = dict(
                kwargs["joint_attention_kwargs"]
            )  # the forward takes from it
        if mode == "look":
            plain(looking, *args, **kwargs)
            modulated = inside.modulated
            inside.clear()
            return modulated
        inside.residual = kept[0]
        output = plain(reusing, *args, **kwargs)[0]
        inside.clear()
        return output, ()

    return forward


def _of_blocks(transformer: Any, block: Any) -> Any:
    """The transformer with one other block; it shares all else."""
    import torch

    view = copy.copy(transformer)
    view._modules = dict(transformer._modules)
    view.transformer_blocks = torch.nn.ModuleList([block])
    view.single_transformer_blocks = torch.nn.ModuleList()
    return view


@contextmanager
def watching_residuals(transformer: Any) -> Iterator[list[Any]]:
    """The residual of all blocks, one for each call while it is watched."""
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
