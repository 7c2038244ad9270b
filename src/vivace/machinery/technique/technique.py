"""The contract of a technique: one optimisation in one final class in one file.

A technique declares its facts (`TechniqueFacts`), and its knobs as fields. `unsupported` returns why it cannot work
here, `apply` what really changed.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.fields import FieldInfo

from vivace.foundation.spec.recipe_syntax import KnobValue, TechniqueCall, print_call
from vivace.foundation.spec.sizes import Size
from vivace.machinery.technique.anatomy import Component
from vivace.machinery.technique.script import Script
from vivace.machinery.technique.target import Effect, Facts, Target
from vivace.machinery.technique.traits import Rule, Stage, Trait


@dataclass(frozen=True)
class Arithmetic:
    """A technique's effect on numbers: how the weights of the layers that it takes are stored, and the precision of
    their matmuls, e.g. "in int8"."""

    weights: str = "as before"
    products: str = "as before"

    @property
    def precision(self) -> str | None:
        """The precision of the matmuls in one word: "fp8" of "in fp8, inputs scaled in each call"; None: as before."""
        match = re.match(r"in (fp32|tf32|fp16|bf16|fp8|int8|nvfp4|mxfp8)\b", self.products, re.IGNORECASE)
        return match[1].lower() if match else None


@dataclass(frozen=True)
class TechniqueFacts:
    """What is true of a technique, as data: how it meets other techniques, and what searches and plans expect of it.

    Attributes:
        stage: its place in the order.
        owns: the slot that it owns: two techniques that own the same one of a component conflict.
        same_picture: whether the image stays the same, up to rounding.
        targetable: components that it can be aimed at; empty: it concerns the call as a whole.
        provides: the traits of its targets once it is applied.
        excludes: the traits that it cannot work with.
        is_stored: whether its effect is in weights and configurations, so that a saved model need not repeat it;
            `rebuild` and `resume` restore the rest.
        loads_from_host: whether it copies results to the GPU one layer or component at a time, so that a model that is
            too large for the GPU can be loaded.
        belongs_to_pipeline: whether it changes or reads the pipeline itself, which another task's pipeline lacks.
        needs_prompts: whether it runs some of the prompts when it is applied, to adapt to them.
        needs_repeated_prompts: whether it is faster only for prompts of earlier calls.
        needs_sources: whether it has an effect on edits of source images alone.
        num_gpus: GPUs that each hold the denoiser, including this process's own.
        announced_sizes: sizes of images that it prepares for one by one, the smallest first.
        arithmetic: its effect on weights and matmuls; of most techniques none.
        attention_precision: of attention's matmuls, if it changes that; None: as before.
        made_for: the compute capability for which its own kernels were tuned: times do not transfer to other GPUs.
        saves_memory: recipes of it alone to try when memory is short, the most harmless first; text_encoder_2 stands
            for the model's largest text encoder.
        fallback: recipes of it alone that go with more techniques, tried in its place beside one that saves memory.
        trained_steps, saved_share: steps for which weights that it brings were trained, and the share of its targets'
            time that they save, by which a search expects the gain before it measures it; None if it brings none.
        not_searched: why a search leaves it out unless asked to keep it; None: it is searched.
        not_searched_unjudged: the same for a search that does not compare images with the baseline's.
    """

    stage: Stage
    owns: str
    same_picture: bool
    targetable: tuple[Component, ...] = ()
    default_targets: tuple[Component, ...] = ()
    provides: frozenset[Trait] = frozenset()
    excludes: tuple[Rule, ...] = ()
    is_stored: bool = False
    loads_from_host: bool = False
    belongs_to_pipeline: bool = False
    needs_prompts: bool = False
    needs_repeated_prompts: bool = False
    needs_sources: bool = False
    num_gpus: int = 1
    announced_sizes: tuple[Size, ...] = ()
    arithmetic: Arithmetic = Arithmetic()
    attention_precision: str | None = None
    made_for: tuple[int, int] | None = None
    saves_memory: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    trained_steps: int | None = None
    saved_share: float | None = None
    not_searched: str | None = None
    not_searched_unjudged: str | None = None


class Technique(BaseModel, ABC):
    """Base class of techniques. Named ones are final; their class name in snake_case is the registry name. `targets`
    are in the order of COMPONENTS; empty: the call as a whole."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    summary: ClassVar[str]
    declared: ClassVar[TechniqueFacts]
    """Its facts, whatever its knobs; see `facts`."""

    targets: tuple[Component, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _aimed(cls, data: Any) -> Any:
        stored = cls._stored_default()
        if isinstance(data, dict) and tuple(data.get("targets", stored)) == stored:
            return data | {"targets": cls.declared.default_targets}
        return data

    @classmethod
    def _stored_default(cls) -> tuple[Component, ...]:
        return tuple(target for target in cls.declared.default_targets if target != "text_encoder_3")

    @classmethod
    def knobs(cls) -> dict[str, FieldInfo]:
        """Return the declared knobs, in the order of a recipe's positional arguments."""
        return {name: field for name, field in cls.model_fields.items() if name != "targets"}

    @property
    def values(self) -> dict[str, KnobValue]:
        return {name: getattr(self, name) for name in self.knobs()}

    @property
    def text(self) -> str:
        """Recipe notation: knobs that differ from their default (the first by position), targets likewise."""
        arguments: list[tuple[str | None, KnobValue]] = []
        for position, (name, field) in enumerate(self.knobs().items()):
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                arguments.append((None if position == 0 else name, value))
        targets = self.targets if self.targets != self.declared.default_targets else ()
        return print_call(self.name, arguments, targets)

    @property
    def call(self) -> TechniqueCall:
        """The technique as a Record stores it."""
        is_default = self.targets == self.declared.default_targets
        targets = self._stored_default() if is_default else self.targets
        knobs = {
            name: v
            for name, v in self.values.items()
            if not _is_new(field := self.knobs()[name]) or v != field.default
        }
        return TechniqueCall(name=self.name, knobs=knobs, targets=targets)

    @property
    def facts(self) -> TechniqueFacts:
        """Its facts: as declared, except for those that depend on its knobs."""
        return self.declared

    @property
    def slots(self) -> frozenset[tuple[str, str]]:
        return frozenset((self.facts.owns, target) for target in self.targets or ("the call",))

    @property
    def label(self) -> str:
        """Its label in Records: name and targets, different for each technique of a recipe."""
        return self.name + (f"@{','.join(self.targets)}" if self.targets else "")

    @abstractmethod
    def unsupported(self, target: Target) -> str | None:
        """Return why it cannot work here, or None. `target.pipe` may be None: then judge the machine."""

    @abstractmethod
    def apply(self, target: Target) -> Effect:
        """Apply to `target.pipe`; NoEffect where there was nothing to change."""

    def predict(self, target: Target) -> Effect:
        """Apply to a pipeline on the meta device, as far as shapes go, to predict its memory; else Unpredictable."""
        return self.apply(target)

    def rebuild(self, target: Target, changed: Facts) -> None:
        """Give components on the meta device the modules that `apply`, which returned `changed`, left."""
        return

    def resume(self, target: Target) -> None:
        """Restore hooks and casts on a pipeline with saved weights."""
        return

    def script(self, target: Target) -> Script | None:
        """Return the same in public calls, or None. Asked before `apply`, and only if `unsupported` returns None."""
        return None


def knob(
    default: Any = ...,
    *,
    tune: Sequence[Any] = (),
    new: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    about: str = "",
) -> Any:
    """Declare a technique's field: its default (none: required), range, values worth trying; `new`: records may lack
    it."""
    extra: dict[str, Any] = {"tune": list(tune)} | ({"new": True} if new else {})
    return Field(default, ge=ge, gt=gt, le=le, lt=lt, description=about, json_schema_extra=extra)


def _is_new(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("new"))
