"""What all step caches share: when a fixed schedule hits, what was computed and reused, where a call begins.

And for those that are vivace's own, `Cached`: a denoiser whose forward is two functions of tensors without a state, one
that computes everything and hands out what could be reused, one that takes it. What is chosen is decided in front of
the forward, in the module's own hooks. So torch.compile makes one graph of each, with no break in it; a CUDA graph can
be recorded of each; and offloading, which wraps the forward as well, moves weights for both.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from pydantic import model_validator

from vivace.contract import CallContext, Component, Effect, Stage, Technique, knob

_MARK = "_vivace_step_cache"
WHOLE_TOKENS = "_vivace_whole_tokens"
"""Attribute of a denoiser whose tokens are split our own way: a function that makes of a process's own part of a
tensor (batch, tokens, channels), of the image's tokens, the whole. All processes call it at the same place."""
MODE, KEPT = "step_cache_mode", "step_cache_kept"
"""Arguments that `Cached` adds to a forward's own: "compute", "reuse" or "look", and what is reused."""


def hits_knob(instead: str) -> Any:
    """The knob `hits` of a cache.

    Args:
        instead: what it replaces, e.g. "a threshold".
    """
    return knob(
        None,
        gt=0,
        lt=1,
        tune=[0.3, 0.5, 0.65],
        about=f"share of hits, on a fixed schedule, instead of {instead}",
    )


class StepCache(Technique):
    """What all step caches declare. Each has `hits` as its last knob.

    Attributes:
        replaced: the knobs that `hits` replaces.
        replaced_in_words: those in words, e.g. "a threshold".
    """

    stage: ClassVar[Stage] = Stage.CACHE
    owns: ClassVar[str] = "step cache"
    same_picture: ClassVar[bool] = False
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)
    replaced: ClassVar[tuple[str, ...]]
    replaced_in_words: ClassVar[str]

    @model_validator(mode="after")
    def _hits_or_what_they_replace(self) -> Self:
        fields = type(self).model_fields
        changed = any(getattr(self, name) != fields[name].default for name in self.replaced)
        if getattr(self, "hits", None) is not None and changed:
            raise ValueError(f"give {self.replaced_in_words} or hits, not both")
        return self


def chosen_by(hits: float | None, otherwise: float | str) -> float | str:
    """What decides which steps are hits, for an Effect."""
    return otherwise if hits is None else f"hits={hits:g}"


def is_scheduled_hit(step: int, share: float) -> bool:
    """Whether a step (0: a call's first, always computed) is one of the `share` that are hits, evenly spread."""
    return step > 0 and math.floor(step * share) > math.floor((step - 1) * share)


@dataclass
class Steps:
    """What a cache did since it was applied. Where guidance takes two calls of the denoiser, each of them counts."""

    computed: int = 0
    reused: int = 0

    def count(self, is_hit: bool) -> None:
        self.reused += is_hit
        self.computed += not is_hit

    def evidence(self) -> dict[str, int | float | str]:
        calls = self.computed + self.reused
        return {"cache_hit_rate": self.reused / calls if calls else 0.0, "cache_calls": calls}

    def refuted(self, _: dict[str, Any]) -> str | None:
        if self.computed and not self.reused:
            return f"the cache never hit in {self.computed} steps"
        return None


def has_step_cache(denoiser: Any) -> bool:
    return bool(getattr(denoiser, "is_cache_enabled", False)) or hasattr(denoiser, _MARK)


ONE_AT_A_TIME = "the denoiser has a step cache already; only one at a time can work"


def nothing_learnt(what: str, instead: str) -> str:
    """Why a threshold is refused with random weights.

    Args:
        what: that it looks at, e.g. "the first block's residual".
        instead: a recipe that does work.
    """
    return (
        f"with random weights a threshold says nothing: how much {what} changes from step to step is learnt; "
        f"give a fixed schedule, {instead}"
    )


def names_its_context(pipe: Any) -> bool:
    """Whether the pipeline itself tells the cache which call is which; of FLUX's pipelines only text-to-image does."""
    return "cache_context" in inspect.getsource(type(pipe).__call__)


def contexts_for(pipe: Any, denoiser: Any) -> dict[Component, CallContext]:
    """For pipelines that name no context of their own: all calls are of one kind."""
    return {} if names_its_context(pipe) else {"denoiser": lambda: denoiser.cache_context("cond")}


def starting_anew(denoiser: Any) -> CallContext:
    """A context around whole calls. Pipelines reset caches at their end, which one that failed never reached."""

    @contextmanager
    def anew() -> Iterator[None]:
        denoiser._reset_stateful_cache()
        yield

    return anew


@dataclass
class Memory:
    """What is known of one kind of a denoiser's calls; guidance in two calls makes two kinds.

    step: of the call that is being decided, from 0.
    kept: tensors that could be reused.
    before: what was kept while a step is computed, for a `keep` that wants it.
    shape: of the input that they were computed for.
    inputs: the call's keyword arguments, while it is decided.
    notes: the deciding function's own.
    """

    step: int = -1
    kept: tuple[Any, ...] = ()
    before: tuple[Any, ...] = ()
    shape: Hashable = None
    inputs: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)


Look = Callable[[], Any]
"""Calls the forward in mode "look"."""
Decide = Callable[[Memory, Look], bool]
"""Whether to reuse what is kept. Asked in every step, also where nothing is kept; then its answer does not count."""


class Cached:
    """A denoiser that computes or reuses, as `decide` says.

    Args:
        denoiser: its `forward` is replaced, on the instance, by `forward`.
        forward: takes MODE and KEPT beside what the denoiser's own takes. Returns (output, kept), a tensor and a tuple
            of tensors, in mode "compute"; (output, ()) in mode "reuse"; anything in mode "look".
        decide: see `Decide`.
        keep: makes of what the forward handed out what is kept; without it, that itself.
        predict: makes of what is kept what the forward is given to reuse; without it, that itself.
        can_reuse: whether a call with these keyword arguments can reuse anything.
        always_compute: for a pipeline without data, where nothing can be decided; what can be kept is.

    Attributes:
        steps: what was computed and reused.
    """

    def __init__(
        self,
        denoiser: Any,
        forward: Callable[..., Any],
        decide: Decide,
        *,
        keep: Callable[[Memory, tuple[Any, ...]], tuple[Any, ...]] | None = None,
        predict: Callable[[Memory], tuple[Any, ...]] | None = None,
        can_reuse: Callable[[dict[str, Any]], bool] = lambda kwargs: True,
        always_compute: bool = False,
    ) -> None:
        self.steps = Steps()
        self._wrap = _wrap_of(denoiser)
        self._denoiser = denoiser
        self._decide = decide
        self._keep = keep
        self._predict = predict
        self._can_reuse = can_reuse
        self._always_compute = always_compute
        self._memories: dict[str, Memory] = {}
        self._context = "cond"
        denoiser.forward = forward
        denoiser.register_forward_pre_hook(self._before, with_kwargs=True)
        denoiser.register_forward_hook(self._after, with_kwargs=True)
        # As diffusers' own caches are told, by name, of the kinds of calls and of a call's end.
        denoiser.cache_context = self._named
        denoiser._reset_stateful_cache = self.reset
        setattr(denoiser, _MARK, True)

    def effect(self, changed: dict[str, int | float | str]) -> Effect:
        """What a technique returns that is nothing but this."""
        return Effect(
            changed=changed,
            around=starting_anew(self._denoiser),
            evidence=self.steps.evidence,
            refuted=self.steps.refuted,
        )

    def reset(self, recurse: bool = True) -> None:
        self._memories.clear()

    @contextmanager
    def _named(self, name: str, **_: Any) -> Iterator[None]:
        before, self._context = self._context, name
        try:
            yield
        finally:
            self._context = before

    def _before(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        memory = self._memories.setdefault(self._context, Memory())
        memory.step += 1
        shape = _kind_of_input(args, kwargs)
        if shape != memory.shape or not self._can_reuse(kwargs):
            memory.kept = ()  # guidance that ended halves the batch
        memory.shape = shape

        def look() -> Any:
            return module.forward(*args, **kwargs, **{MODE: "look"})

        memory.inputs = kwargs
        is_hit = not self._always_compute and self._decide(memory, look) and bool(memory.kept)
        memory.inputs = {}
        self.steps.count(is_hit)
        if is_hit:
            reused = self._predict(memory) if self._predict is not None else memory.kept
            return args, kwargs | {MODE: "reuse", KEPT: reused}
        # Not held while its successor is computed, unless that is made of both.
        memory.before, memory.kept = (memory.kept if self._keep is not None else ()), ()
        return args, kwargs | {MODE: "compute"}

    def _after(self, module: Any, args: Any, kwargs: dict[str, Any], result: Any) -> Any:
        output, kept = result
        if kwargs[MODE] == "compute":
            memory = self._memories[self._context]
            memory.kept = self._keep(memory, kept) if self._keep is not None else tuple(kept)
            memory.before = ()
        return self._wrap(output) if kwargs.get("return_dict", True) else (output,)


def latents_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The noisy latents among a denoiser's arguments: the first, or by either name."""
    return args[0] if args else kwargs["sample" if "sample" in kwargs else "hidden_states"]


def _kind_of_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
    """Shape, dtype and device of the noisy latents."""
    latents = latents_of(args, kwargs)
    return tuple(latents.shape), latents.dtype, latents.device


def relative_change(new: Any, old: Any) -> float:
    """The L1 norm of the difference over that of the older one."""
    return float((new.float() - old.float()).abs().mean() / old.float().abs().mean())


def timestep_of(pipe: Any, memory: Memory) -> float:
    """The timestep of the step that is being decided, read from the scheduler once a call."""
    if "timesteps" not in memory.notes:
        memory.notes["timesteps"] = pipe.scheduler.timesteps.tolist()[-pipe.num_timesteps :]
    timesteps = memory.notes["timesteps"]
    return float(timesteps[min(memory.step, len(timesteps) - 1)])


def _wrap_of(denoiser: Any) -> Any:
    """Makes of an output what the denoiser returns with `return_dict`."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput
    from diffusers.models.unets.unet_2d_condition import UNet2DConditionOutput

    kind = UNet2DConditionOutput if hasattr(denoiser, "up_blocks") else Transformer2DModelOutput
    return lambda sample: kind(sample=sample)
