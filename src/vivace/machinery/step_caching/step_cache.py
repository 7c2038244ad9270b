"""The base of all step caches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from pydantic import model_validator

from vivace.architectures import family_of_pipeline
from vivace.errors import UsageError
from vivace.machinery.step_caching.engine import IsHit, StepCounter, latents_of
from vivace.machinery.step_caching.when import (
    DECIDED,
    HIT,
    Masked,
    evenly_spaced,
    read_mask,
    steps_of,
)
from vivace.machinery.technique import (
    CallContext,
    Component,
    Effect,
    Rule,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    knob,
)
from vivace.machinery.technique.anatomy import call_parameters
from vivace.machinery.technique.pipeline_code import (
    guides_by_the_usual_scale,
    names_its_calls,
    number_of_denoiser_calls,
)


@dataclass(frozen=True)
class StepDecision:
    """The decision whether a step is a hit, its facts for the Record, and why a run was not as decided after all."""

    is_hit: IsHit
    changed: Mapping[str, int | float | str] = field(default_factory=dict)
    refuted: Callable[[], str | None] = lambda: None


@dataclass(frozen=True)
class Attached:
    """What a cache attached; `evidence` and `refuted` are its own, beside the counter's."""

    counter: StepCounter
    changed: Mapping[str, int | float | str] = field(default_factory=dict)
    contexts: Mapping[Component, CallContext] = field(default_factory=dict)
    evidence: Callable[[], Mapping[str, int | float | str]] = dict
    refuted: Callable[[], str | None] = lambda: None


class StepCache(Technique):
    """A technique that skips some steps of the denoiser, or parts of them, and reuses what other steps computed.

    A subclass declares its own knobs and says which denoisers it takes (`unsupported_denoiser`), what is cached
    (`attach`) and when a step is a hit (`decision`). The schedule by `hits`, and the prediction of memory, need no
    decision and are made here.

    Attributes:
        replaced: the knobs that `hits` replaces; the Record names the first of them with its value.
        replaced_in_words: those in words, e.g. "a threshold".
        traits: what it gives the denoiser besides CACHED.
        compared: what the cache compares between steps, e.g. "the modulated input"; "" where it looks at no values.
    """

    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.CACHE,
        owns="step cache",
        same_picture=False,
        targetable=("denoiser",),
        default_targets=("denoiser",),
        excludes=(Rule(Trait.CACHED, "only one step cache at a time can work", earlier_only=True),),
        belongs_to_pipeline=True,
    )
    replaced: ClassVar[tuple[str, ...]]
    replaced_in_words: ClassVar[str]
    compared: ClassVar[str] = ""
    traits: ClassVar[frozenset[Trait]] = frozenset({Trait.KEEPS_BLOCK_TENSORS})

    hits: float | None = knob(None, gt=0, lt=1, tune=[0.3, 0.5, 0.65])
    mask: str | None = knob(
        None,
        new=True,
        about="the steps that are computed: a digit for each step, such as 11100100; runs of c and h, which repeat; or "
        "a file of `vivace calibrate schedule`",
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        """Put its own knobs first: a recipe's knobs have positions, and pydantic puts a base's fields first."""
        super().__pydantic_init_subclass__(**kwargs)
        fields = cls.model_fields
        own = [name for name in vars(cls).get("__annotations__", ()) if name in fields]
        for name in dict.fromkeys((*own, "hits", "mask")):
            fields[name] = fields.pop(name)
        instead = f"instead of {cls.replaced_in_words}"
        fields[
            "hits"
        ].description = f"share of the steps after the first that are hits, evenly spaced, {instead}"
        cls.model_rebuild(force=True)

    @model_validator(mode="before")
    @classmethod
    def _mask_in_one_form(cls, data: Any) -> Any:
        mask = data.get("mask") if isinstance(data, dict) else None
        return data if mask is None else data | {"mask": read_mask(str(mask))}

    @model_validator(mode="after")
    def _one_schedule(self) -> Self:
        fields = type(self).model_fields
        predictor = getattr(self, "predictor", "taylor")
        if predictor != "taylor" and self.values["order"] != fields["order"].default:
            raise ValueError(f"order is of the Taylor series; leave it out with predictor={predictor}")
        changed = any(getattr(self, name) != fields[name].default for name in self.replaced)
        if self.hits is not None and changed:
            raise ValueError(f"give {self.replaced_in_words} or hits, not both")
        if self.mask is not None and "mask" not in self.replaced:
            if changed or self.hits is not None:
                raise ValueError(f"give {self.replaced_in_words}, hits or mask, one of them")
            if DECIDED in self.mask:
                raise ValueError(f"{self.name} has no decided steps (d) in a mask; write c and h")
        return self

    @property
    def is_fixed(self) -> bool:
        """Whether nothing is decided by content."""
        return self.hits is not None or (self.mask is not None and DECIDED not in self.mask)

    @property
    def known_hits(self) -> float | None:
        """The share of the steps that are hits, where a fixed schedule says so."""
        if self.mask is None or not self.is_fixed:
            return self.hits
        steps = steps_of(self.mask)
        return steps.count(HIT) / len(steps)

    @abstractmethod
    def unsupported_denoiser(self, target: Target) -> str | None:
        """Return why the cache cannot work on a pipeline's denoiser, or None."""

    @abstractmethod
    def attach(self, target: Target, is_hit: IsHit) -> Attached:
        """Attach the cache to the denoiser; NoEffect where nothing was there to cache."""

    @abstractmethod
    def decision(self, target: Target) -> StepDecision:
        """Return the decision about hits where `hits` is not set."""

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            provides=self.traits | {Trait.CACHED},
        )

    def unsupported(self, target: Target) -> str | None:
        if target.pipe is None:
            return None
        if (reason := self.unsupported_denoiser(target) or _mixes_guidance(target)) is not None:
            return reason
        if self.is_fixed or not target.model.has_weights:
            return None
        return self.unsupported_weights(target)

    def unsupported_weights(self, target: Target) -> str | None:
        """Return why, without `hits`, steps cannot be decided for the model's weights, or None."""
        if not self.compared or not target.model.has_random_weights:
            return None
        return (
            f"with random weights a threshold says nothing: how much {self.compared} changes from step to step depends "
            f"on training; give a fixed schedule, {self.name}(hits=0.5)"
        )

    def apply(self, target: Target) -> Effect:
        if not self.is_fixed:
            return self.attach_with(target, self.decision(target))
        if self.mask is None:
            return self.attach_with(target, StepDecision(evenly_spaced(self.hits or 0)))
        masked = Masked(self.mask, target.pipe)
        return self.attach_with(target, StepDecision(masked, refuted=masked.refuted))

    def predict(self, target: Target) -> Effect:
        """Apply to a pipeline without weights. To predict memory all steps are computed and all that can be is kept; to
        count work, a mask lists its hits itself, and others are as frequent as measured."""
        hits = target.model.hits
        is_hit = evenly_spaced(hits or 0)
        if hits is not None and self.mask is not None and self.is_fixed:
            is_hit = Masked(self.mask)
        return self.attach_with(target, StepDecision(is_hit))

    def attach_with(self, target: Target, decision: StepDecision) -> Effect:
        """Attach the cache with another decision than its own."""
        attached = self.attach(target, decision.is_hit)
        is_known = family_of_pipeline(type(target.pipe).__name__) is not None
        if guides_in_unnamed_calls(target.pipe) and not is_known:
            _refuse_second_calls(target.module("denoiser"), type(target.pipe).__name__)
        elif guides_in_unnamed_calls(target.pipe) or (is_known and _has_unnamed_true_cfg(target.pipe)):
            _name_second_calls(target.module("denoiser"))
        return Effect(
            changed={
                f"denoiser.{self.name}": self._decided_by(),
                **attached.changed,
                **decision.changed,
            },
            contexts=dict(attached.contexts),
            around=_reset_before_call(target.module("denoiser")),
            evidence=lambda: {**attached.counter.evidence(), **attached.evidence()},
            refuted=lambda evidence: (
                decision.refuted() or attached.refuted() or attached.counter.refuted(evidence)
            ),
        )

    def _decided_by(self) -> float | str:
        if self.hits is not None:
            return f"hits={self.hits:g}"
        if self.mask is not None:
            return f"mask={self.mask}"
        name = self.replaced[0]
        value: float = getattr(self, name)
        return value if name == "threshold" else f"{name}={value}"


def _mixes_guidance(target: Target) -> str | None:
    name = type(target.pipe).__name__
    if names_its_calls(target.pipe) or family_of_pipeline(name) is not None:
        return None  # see `_name_second_calls`
    others = [*target.request.earlier, *target.request.later]
    is_asked = target.model.defaults.get("true_cfg_scale", 1) > 1 or any(
        technique.values.get("true_cfg") for technique in others
    )
    if is_asked:
        return (
            f"{name} does not say which of true CFG's two calls is which, and a cache would mix them; leave true CFG "
            "out"
        )
    # A distilled model's pipeline is the same, and its call's default guides; a call without guidance can be cached.
    config = getattr(target.pipe, "config", {})  # a process of `parallel` has the denoiser alone
    is_distilled = bool(config.get("is_distilled")) and not target.model.name
    is_guided = target.model.defaults.get("guidance_scale", 2) > 1 and not is_distilled
    if guides_in_unnamed_calls(target.pipe) and is_guided:
        return (
            f"{name} guides with a second call of the denoiser and does not say which call is which, so a cache would "
            "mix them"
        )
    return None


def _refuse_second_calls(denoiser: Any, pipeline: str) -> None:
    """Raise an error in a step that the call's arguments guide after all, since both calls would get one tensor."""
    last: list[Any] = [None]

    def check(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latents = latents_of(args, kwargs)
        if latents is last[0]:
            raise UsageError(
                f"{pipeline} guides with a second call of the denoiser and does not say which call is which, so a step "
                "cache would mix them; give a guidance_scale that is off for this model, or leave the cache out"
            )
        last[0] = latents

    denoiser.register_forward_pre_hook(check, with_kwargs=True)


def _name_second_calls(denoiser: Any) -> None:
    """Tell a step's second call, which gets the same latents, from its first, the conditional one."""
    last: list[Any] = [None]
    named: list[Any] = []

    def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        latents = latents_of(args, kwargs)
        context = denoiser.cache_context("uncond" if latents is last[0] else "cond")
        last[0] = latents
        context.__enter__()
        named.append(context)

    def after(*_: Any) -> None:
        named.pop().__exit__(None, None, None)

    denoiser.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
    denoiser.register_forward_hook(after, always_call=True)


def guides_in_unnamed_calls(pipe: Any) -> bool:
    """Return whether a transformer's pipeline guides by its usual scale in two unnamed calls: Chroma."""
    family = family_of_pipeline(type(pipe).__name__)
    if family is not None and family.doubled is not None:
        return False
    return (
        guides_by_the_usual_scale(pipe) and number_of_denoiser_calls(pipe) > 1 and not names_its_calls(pipe)
    )


def _has_unnamed_true_cfg(pipe: Any) -> bool:
    """Return whether a pipeline guides by `true_cfg_scale` in two unnamed calls: FLUX.1 Kontext's."""
    return "true_cfg_scale" in call_parameters(pipe) and not names_its_calls(pipe)


def _reset_before_call(denoiser: Any) -> CallContext:
    """Surround the pipeline's call. Pipelines reset caches at the end of a call, which a failed one misses."""

    @contextmanager
    def reset() -> Iterator[None]:
        denoiser._reset_stateful_cache()
        yield

    return reset
