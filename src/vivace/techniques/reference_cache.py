"""Keep keys and values of source images from the first step of an edit; later steps compute text and image alone.

Why: models that edit get a source image as further tokens, as many as the image has that they draw: half of the work,
    with three sources three quarters, and more of attention. What becomes of those tokens changes little from step to
    step, since the source does not. Fused on an H200, an edit of FLUX.2 [dev] takes 14.2 s instead of 25.0, and of
    [klein] 4B 0.325 s instead of 0.44 (results/new-prompts.jsonl).
Costs: the source's tokens attend to the noisy image, so the image changes. Two tensors of each attention are kept
    (FLUX.1 Kontext, a source of 1024 px: 2.9 GB per image in bf16; captured, a graph holds as much again).
Needs: a pipeline that gives its denoiser source images as tokens: FLUX.1 Kontext, FLUX.2, Qwen-Image-Edit. Qwen-Image
    2.1 and FLUX.2 [klein] 9B KV do the same by themselves, since they were trained so.
Source: FLUX.2 [klein] 9B KV (diffusers' Flux2KleinKVPipeline), without its masks and the sources' fixed timestep.

With `refresh` sources are computed again every so many steps; `hits` and `mask` choose those steps otherwise. A call
without a source image is as it was.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.architectures import FAMILIES, family_of, pipeline_named
from vivace.machinery.step_caching.engine import (
    MODE,
    CachedDenoiser,
    CacheState,
    IsHit,
    Look,
    StepForwards,
    latents_of,
)
from vivace.machinery.step_caching.step_cache import Attached, StepCache, StepDecision
from vivace.machinery.technique import CallContext, Component, Rule, Target, TechniqueFacts, Trait, knob

if TYPE_CHECKING:
    import torch

_NUMBER = "num_source_tokens"


class ReferenceCache(StepCache):
    name: ClassVar[str] = "reference_cache"
    summary: ClassVar[str] = "keys and values of source images computed in an edit's first step alone"
    declared: ClassVar[TechniqueFacts] = replace(
        StepCache.declared,
        needs_sources=True,
        excludes=(
            *StepCache.declared.excludes,
            Rule(Trait.SHARDED, "each GPU has its own part of the tokens, the source images' among them"),
        ),
    )
    replaced: ClassVar[tuple[str, ...]] = ("refresh",)
    replaced_in_words: ClassVar[str] = "refresh"
    traits: ClassVar[frozenset[Trait]] = frozenset()

    refresh: int = knob(
        0,
        ge=0,
        le=1000,
        tune=[0, 4],
        about="every so many steps source images are computed again; 0: in the first step alone",
    )

    def unsupported_denoiser(self, target: Target) -> str | None:
        denoiser, pipeline = target.module("denoiser"), type(target.pipe).__name__
        family, known = family_of(denoiser), pipeline_named(pipeline)
        if family is None or family.sources is None or known is None or not known.appends_sources:
            names = (each.name for family in FAMILIES for each in family.pipelines if each.appends_sources)
            return (
                f"{pipeline} gives its denoiser no source images whose keys and values could be kept; known to do so "
                f"are {', '.join(names)}"
            )
        return None

    def decision(self, target: Target) -> StepDecision:
        def is_hit(state: CacheState, _: Look) -> bool:
            return state.step % self.refresh != 0 if self.refresh else state.step > 0

        return StepDecision(is_hit)

    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        denoiser = target.module("denoiser")
        family = family_of(denoiser)
        assert family is not None
        sources = family.sources
        assert sources is not None
        sources.prepare(denoiser)
        contexts: dict[Component, CallContext] = {}
        keys = getattr(denoiser.forward, "source_keys", None)  # of fused blocks
        if keys is None:
            keys = DispatchedKeys(denoiser)
            contexts["denoiser"] = keys.replace_dispatch
        tokens = _SourceTokens(target.pipe)
        denoiser.register_forward_pre_hook(tokens.count, with_kwargs=True)
        whole = denoiser.forward

        def compute(*args: Any, num_source_tokens: int, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
            keys.begin(num_source_tokens)
            output = whole(*args, **kwargs)[0]
            return output, keys.end()

        def reuse(kept: tuple[Any, ...], *args: Any, num_source_tokens: int, **kwargs: Any) -> Any:
            keys.begin(0, kept)
            output = whole(*args, **sources.without(kwargs, num_source_tokens))[0]
            keys.end()
            return output

        denoiser.register_forward_hook(_mark_kept)
        cached = CachedDenoiser(
            denoiser, StepForwards(compute, reuse), is_hit, can_reuse=lambda kwargs: kwargs[_NUMBER] > 0
        )
        denoiser._reset_stateful_cache = tokens.reset_with(cached.reset)
        denoiser.forward = _with_first_step_apart(denoiser.forward, whole)
        return Attached(
            cached.counter,
            contexts=contexts,
            evidence=lambda: {"denoiser.source_tokens": tokens.largest},
            refuted=tokens.never,
        )


def _mark_kept(_: Any, args: Any, result: tuple[Any, tuple[torch.Tensor, ...]]) -> None:
    """Tell captured graphs that what is kept is not written again."""
    from vivace.machinery.compilation.captured import never_written_again

    for tensor in result[1]:
        never_written_again(tensor)


def _with_first_step_apart(by_mode: Callable[..., Any], whole: Any) -> Callable[..., Any]:
    """Return a forward whose `later_step` computes steps that keep nothing, and what captures those may replace it.

    A graph of the first step would hold all keys and values a second time, for as long as it is there. Where the
    `whole` forward pads texts to a few lengths, that is done here, so that texts of a length share a graph.
    """
    pads = bool(getattr(whole, "pads", False))

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs[MODE] == "compute" and kwargs[_NUMBER] > 0:
            return by_mode(*args, **kwargs)
        call = whole.padded(kwargs) if pads else kwargs
        return forward.later_step(*args, **call)  # type: ignore[attr-defined]

    forward.later_step, forward.pads = by_mode, pads  # type: ignore[attr-defined]
    return forward


class _SourceTokens:
    """Counts the tokens of source images: those of a denoiser's call that are not the noisy image's.

    Attributes:
        num_calls: of the denoiser so far; largest: their largest number in one of them.
    """

    def __init__(self, pipe: Any) -> None:
        self.num_calls = 0
        self.largest = 0
        self._num_noisy = 0
        prepare = pipe.prepare_latents

        @functools.wraps(prepare)
        def prepare_latents(*args: Any, **kwargs: Any) -> Any:
            made = prepare(*args, **kwargs)
            self._num_noisy = made[0].shape[1]
            return made

        pipe.prepare_latents = prepare_latents

    def count(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        number = latents_of(args, kwargs).shape[1] - self._num_noisy if self._num_noisy else 0
        self.num_calls += 1
        self.largest = max(self.largest, number)
        return args, kwargs | {_NUMBER: number}

    def reset_with(self, reset: Callable[[], None]) -> Callable[..., None]:
        def reset_both(recurse: bool = True) -> None:
            self._num_noisy = 0
            reset()

        return reset_both

    def never(self) -> str | None:
        """Return that no call had a source image, or None."""
        if not self.num_calls or self.largest:
            return None
        return "no call had a source image whose keys and values could be kept"


class DispatchedKeys:
    """Takes keys and values of the last tokens in diffusers' attention, or gives it more of them.

    All attention of these transformers is dispatched by one function of their module, which is replaced while the
    denoiser's forward runs. torch.compile guards it and traces into the replacement.
    """

    def __init__(self, denoiser: torch.nn.Module) -> None:
        self._module: Any = sys.modules[type(denoiser).__module__]
        self._number = 0
        self._current: _Attention | None = None
        self._attentions = [
            _Attention(part, self.enter)
            for part in denoiser.modules()
            if hasattr(type(part), "set_processor")
        ]
        self._dispatch = self._wrap_dispatch(self._module.dispatch_attention_fn)

    def begin(self, number: int, kept: tuple[torch.Tensor, ...] = ()) -> None:
        """Begin a forward that takes keys and values of the last tokens, so many, or is given some."""
        self._number = number
        for index, attention in enumerate(self._attentions):
            attention.kept = kept[2 * index : 2 * index + 2]
            attention.taken = ()

    def end(self) -> tuple[torch.Tensor, ...]:
        """Return what was taken, keys and values of each attention, in order."""
        taken = tuple(tensor for attention in self._attentions for tensor in attention.taken)
        self.begin(0)
        self._current = None
        return taken

    def enter(self, attention: _Attention) -> None:
        self._current = attention

    @contextmanager
    def replace_dispatch(self) -> Iterator[None]:
        before = self._module.dispatch_attention_fn
        self._module.dispatch_attention_fn = self._dispatch
        try:
            yield
        finally:
            self._module.dispatch_attention_fn = before

    def _wrap_dispatch(self, whole: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def dispatch(query: Any, key: Any, value: Any, attn_mask: Any = None, **how: Any) -> Any:
            current, number = self._current, self._number
            if current is not None and query.shape[1] == key.shape[1]:  # not an adapter's, to other keys
                if current.kept:
                    own = key.shape[1]
                    key, value = (torch.cat(pair, 1) for pair in zip((key, value), current.kept, strict=True))
                    if attn_mask is not None:
                        more = (0, key.shape[1] - own)
                        attn_mask = torch.nn.functional.pad(attn_mask, more, value=True)
                elif number:
                    current.taken = tuple(part[:, -number:].clone() for part in (key, value))
            return whole(query, key, value, attn_mask=attn_mask, **how)

        return dispatch


class _Attention:
    """Replaces an attention's forward, on the instance, by one that says which attention is computed.

    Attributes:
        kept: keys and values (batch, tokens, heads, channels) that it attends to beside its own; taken: of its own.
    """

    def __init__(self, attention: Any, enter: Callable[[_Attention], None]) -> None:
        self._whole: Callable[..., Any] = attention.forward
        self._enter = enter
        self.kept: tuple[Any, ...] = ()
        self.taken: tuple[Any, ...] = ()
        # A bound method, since torch.compile takes callable objects for different code in each block.
        attention.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._enter(self)
        return self._whole(*args, **kwargs)
