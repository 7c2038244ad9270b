"""A transformer's blocks as one residual, which step caches keep and add again instead of computing the blocks.

Where the blocks are is known of each family in `vivace.architectures`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vivace.architectures import FAMILIES, Blocks, family_of
from vivace.machinery.step_caching.engine import (
    CachedDenoiser,
    IsHit,
    Predictor,
    StepCounter,
    StepForwards,
    last_tokens,
)

if TYPE_CHECKING:
    import torch

WHOLE_TOKENS = "_vivace_whole_tokens"
"""Attribute of a denoiser whose tokens vivace has split among processes: a function that makes the whole tensor of a
process's own part of the image's tokens (batch, tokens, channels). All processes call it at the same point."""


def unknown_blocks(denoiser: Any) -> str | None:
    """Return why a denoiser's blocks cannot be treated as one residual, or None."""
    family = family_of(denoiser)
    if family is not None and family.blocks is not None:
        return None
    names = ", ".join(family.name for family in FAMILIES if family.blocks is not None)
    return f"{type(denoiser).__name__} has no chain of blocks that is known as one residual; known are those of {names}"


def blocks_of(denoiser: Any) -> Blocks:
    family = family_of(denoiser)
    assert family is not None
    assert family.blocks is not None
    return family.blocks


@dataclass
class _BlockResidualPass:
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

    passing = _BlockResidualPass()
    blocks = blocks_of(transformer)
    first = getattr(transformer, blocks.chains[0])[0]

    class AddResidual(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            image = blocks.image_of((args, kwargs))
            return blocks.returned(_added(image, passing.residual), blocks.text_of((args, kwargs)))

    class Modulate(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            image = blocks.image_of((args, kwargs))
            modulated = blocks.modulated(first, image, (args, kwargs))
            passing.modulated = last_tokens(modulated, passing.entering)
            return blocks.returned(image, blocks.text_of((args, kwargs)))

    def entered(tokens: Any) -> None:
        passing.entering = tokens

    def left(tokens: Any) -> None:
        passing.leaving = tokens

    blocks.entering(transformer, entered)
    blocks.leaving(transformer, left)
    whole, plain = transformer.forward, type(transformer).forward
    of_all_tokens = getattr(transformer, WHOLE_TOKENS, None)
    reusing, looking = (
        _with_block(transformer, blocks, stand_in_for(first, AddResidual())),
        _with_block(transformer, blocks, stand_in_for(first, Modulate())),
    )

    def compute(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        output = whole(*args, **kwargs)[0]
        residual = passing.leaving - passing.entering  # type: ignore[operator]
        passing.clear()
        # Where several GPUs share the tokens, the main process alone adds and compares residuals, whole ones.
        return output, (residual if of_all_tokens is None else of_all_tokens(residual),)

    def reuse(kept: tuple[Any, ...], *args: Any, **kwargs: Any) -> Any:
        (passing.residual,) = kept
        output = plain(reusing, *args, **_without_extras(blocks, kwargs))[0]
        passing.clear()
        return output

    def look(*args: Any, **kwargs: Any) -> Any:
        plain(looking, *args, **_without_extras(blocks, kwargs))
        modulated = passing.modulated
        passing.clear()
        return modulated

    return StepForwards(compute, reuse, look)


def cache_residual(denoiser: Any, is_hit: IsHit, predictor: Predictor | None = None) -> StepCounter:
    """Let a transformer reuse the residual of all its blocks; return the counter of its steps."""
    return CachedDenoiser(denoiser, residual_forwards(denoiser), is_hit, predictor=predictor).counter


def _without_extras(blocks: Blocks, kwargs: dict[str, Any]) -> dict[str, Any]:
    return own_arguments(kwargs | {name: None for name in blocks.added_between if name in kwargs})


def own_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for another call of the forward, which takes items out of some of them."""
    kwargs = dict(kwargs)
    for name in ("joint_attention_kwargs", "attention_kwargs"):
        if kwargs.get(name):
            kwargs[name] = dict(kwargs[name])
    return kwargs


def _added(tokens: torch.Tensor, residual: Any) -> torch.Tensor:
    """Add a residual to its tokens: all, or the image's, which come last."""
    import torch

    start = tokens.shape[1] - residual.shape[1]
    if not start:
        return tokens + residual
    return torch.cat([tokens[:, :start], tokens[:, start:] + residual], dim=1)


def stand_in_for(block: Any, stand: Any) -> Any:
    """Return a stand-in for a block, with the attention processor that Qwen-Image 2.1 asks its blocks for."""
    processor = getattr(getattr(block, "attn", None), "processor", None)
    if processor is not None:
        stand.attn = SimpleNamespace(processor=processor)
    return stand


def _with_block(transformer: Any, blocks: Blocks, block: Any) -> Any:
    import torch

    class Pass(torch.nn.Module):  # type: ignore[misc]
        """A block that returns its tokens, where the transformer counts its blocks."""

        def __init__(self, joined: bool) -> None:
            super().__init__()
            self._joined = joined

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            image = blocks.image_of((args, kwargs))
            return blocks.returned(image, None if self._joined else blocks.text_of((args, kwargs)))

    view = copy.copy(transformer)
    view._modules = dict(transformer._modules)
    for chain in blocks.chains:
        members = [block] if chain == blocks.chains[0] else []
        others = len(getattr(transformer, chain)) - len(members) if blocks.are_counted else 0
        members += [Pass(chain in blocks.joined) for _ in range(others)]
        setattr(view, chain, torch.nn.ModuleList(members))
    return view


@contextmanager
def telling_calls_apart(transformer: Any) -> Iterator[Callable[[], str]]:
    """Yield what returns the kind of the current call: guidance may make two calls a step, in named contexts."""
    named = getattr(transformer, "cache_context", None)
    current = [_CONDITIONAL]
    if named is None:
        yield lambda: current[-1]
        return

    @contextmanager
    def cache_context(name: str, **others: Any) -> Iterator[None]:
        current.append(name)
        try:
            with named(name, **others):
                yield
        finally:
            current.pop()

    transformer.cache_context = cache_context
    try:
        yield lambda: current[-1]
    finally:
        del transformer.cache_context


_CONDITIONAL = "cond"


@contextmanager
def watching_residuals(transformer: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the residual of all blocks, one for each conditional call of the transformer."""
    blocks = blocks_of(transformer)
    entering: list[Any] = []
    residuals: list[Any] = []

    with telling_calls_apart(transformer) as kind:

        def left(tokens: Any) -> None:
            residual = tokens.detach() - entering.pop()
            if kind() == _CONDITIONAL:
                residuals.append(residual)

        handles = [
            blocks.entering(transformer, lambda tokens: entering.append(tokens.detach())),
            blocks.leaving(transformer, left),
        ]
        try:
            yield residuals
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def watching_modulated(transformer: Any) -> Iterator[list[torch.Tensor]]:
    blocks = blocks_of(transformer)
    first = getattr(transformer, blocks.chains[0])[0]
    modulated: list[Any] = []

    entering: list[Any] = []

    def enters(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        image = blocks.image_of((args, kwargs))
        whole = blocks.modulated(first, image, (args, kwargs)).detach()
        modulated.append(last_tokens(whole, entering.pop()))

    handles = [
        blocks.entering(transformer, entering.append),
        first.register_forward_pre_hook(enters, with_kwargs=True),
    ]
    try:
        yield modulated
    finally:
        for handle in handles:
            handle.remove()
