"""The contract of a technique: one optimisation in one final class in one file.

A technique declares its stage (its place in the order), the slot that it owns (two techniques that own the same slot of
the same component conflict), whether the image stays the same, the traits that it gives to components and those that
it cannot work with, and its knobs as fields. `unsupported` returns why it cannot work here, `apply` what really
changed.
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
    """A technique's effect on numbers.

    Attributes:
        weights: how the weights of the layers that it takes are stored.
        products: the precision of their matmuls, e.g. "in int8".
    """

    weights: str = "as before"
    products: str = "as before"

    @property
    def precision(self) -> str | None:
        """The precision of the matmuls in one word: "fp8" of "in fp8, inputs scaled in each call"; None: as before."""
        match = re.match(r"in (fp32|tf32|fp16|bf16|fp8|int8|nvfp4|mxfp8)\b", self.products, re.IGNORECASE)
        return match[1].lower() if match else None


@dataclass(frozen=True)
class MemoryAdvice:
    """How a technique helps `vivace plan` to fit a model into a card's memory.

    Attributes:
        saving: recipes of this technique alone that are worth trying when memory is short, the most harmless first.
            Where one names text_encoder_2, the model's largest text encoder is meant.
        fallback: recipes of this technique alone that are compatible with more techniques; tried in its place when a
            technique that saves memory does not go with it.
    """

    saving: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()


class Technique(BaseModel, ABC):
    """Base class of techniques. Named ones are final; their class name in snake_case is the registry name.

    Attributes:
        targets: the components that it is aimed at, in the order of COMPONENTS; empty: the call as a whole.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[Stage]
    owns: ClassVar[str]
    same_picture: ClassVar[bool]
    targetable: ClassVar[tuple[Component, ...]] = ()
    """Components that the technique can be aimed at; empty: it concerns the call as a whole."""
    default_targets: ClassVar[tuple[Component, ...]] = ()
    memory_advice: ClassVar[MemoryAdvice] = MemoryAdvice()
    needs_repeated_prompts: ClassVar[bool] = False
    """Whether it is faster only for prompts of earlier calls."""

    targets: tuple[Component, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _aimed(cls, data: Any) -> Any:
        stored = cls._stored_default()
        if isinstance(data, dict) and tuple(data.get("targets", stored)) == stored:
            return data | {"targets": cls.default_targets}
        return data

    @classmethod
    def _stored_default(cls) -> tuple[Component, ...]:
        """The default targets as Records store them: without `text_encoder_3`, which came after the first records."""
        return tuple(target for target in cls.default_targets if target != "text_encoder_3")

    @classmethod
    def knobs(cls) -> dict[str, FieldInfo]:
        """Return the declared knobs, in the order of a recipe's positional arguments."""
        return {name: field for name, field in cls.model_fields.items() if name != "targets"}

    @property
    def values(self) -> dict[str, KnobValue]:
        """The value of each knob."""
        return {name: getattr(self, name) for name in self.knobs()}

    @property
    def text(self) -> str:
        """Recipe notation: knobs that differ from their default (the first by position), targets likewise."""
        arguments: list[tuple[str | None, KnobValue]] = []
        for position, (name, field) in enumerate(self.knobs().items()):
            value = getattr(self, name)
            if field.is_required() or value != field.default:
                arguments.append((None if position == 0 else name, value))
        targets = self.targets if self.targets != self.default_targets else ()
        return print_call(self.name, arguments, targets)

    @property
    def call(self) -> TechniqueCall:
        """The technique as a Record stores it."""
        is_default = self.targets == self.default_targets
        targets = self._stored_default() if is_default else self.targets
        knobs = {
            name: v
            for name, v in self.values.items()
            if not _is_new(field := self.knobs()[name]) or v != field.default
        }
        return TechniqueCall(name=self.name, knobs=knobs, targets=targets)

    @property
    def slot(self) -> str:
        """The slot that it owns. A technique that may repeat adds the part that must not: `lora`, the file."""
        return self.owns

    @property
    def slots(self) -> frozenset[tuple[str, str]]:
        """Its slots, one for each of its targets."""
        return frozenset((self.slot, target) for target in self.targets or ("the call",))

    @property
    def label(self) -> str:
        """Its label in Records: name and targets, different for each technique of a recipe."""
        return self.name + (f"@{','.join(self.targets)}" if self.targets else "")

    @property
    def place(self) -> Stage:
        """Its place in the order: its stage, unless a knob chooses another."""
        return self.stage

    def pinned(self) -> Technique:
        """Return the technique with the identity of the files that it reads, so that a changed file is another recipe.

        Raises:
            UnusableModel, Unsupported: a file cannot be read or found.
        """
        return self

    @property
    def provides(self) -> frozenset[Trait]:
        """Return the traits of its targets once it is applied."""
        return frozenset()

    @property
    def excludes(self) -> tuple[Rule, ...]:
        """Return the traits that it cannot work with."""
        return ()

    @property
    def loads_from_host(self) -> bool:
        """Whether it reads weights from host memory and copies the result to the GPU, one layer or component at a time,
        so that a model that is too large for the GPU can be loaded."""
        return False

    @property
    def belongs_to_pipeline(self) -> bool:
        """Whether it changes or reads the pipeline object itself, so that a pipeline of another task with the same
        components lacks its change."""
        return False

    @property
    def needs_prompts(self) -> bool:
        """Whether it runs some of the prompts when it is applied, to adapt to them."""
        return False

    @property
    def announced_sizes(self) -> tuple[Size, ...]:
        """Sizes of images that it prepares for one by one, the smallest first."""
        return ()

    @property
    def trained_steps(self) -> int | None:
        """Denoising steps for which the weights that it brings were trained; None if it brings none.

        A search expects the gain before it measures it, since the image should survive so few steps.
        """
        return None

    @property
    def saved_share(self) -> float | None:
        """Approximate share of its targets' time that replacement weights save; None if it brings none.

        As with `trained_steps`, a search expects the gain before it measures it.
        """
        return None

    @property
    def num_gpus(self) -> int:
        """GPUs that each hold the denoiser, including this process's own."""
        return 1

    def not_searched(self, judges: bool) -> str | None:
        """Return the reason why a search leaves it out unless asked to keep it; None: it is searched.

        Args:
            judges: whether the search compares images with the baseline's.
        """
        return None

    @property
    def arithmetic(self) -> Arithmetic:
        """Return its effect on weights and matmuls; for most techniques none."""
        return Arithmetic()

    @property
    def attention_precision(self) -> str | None:
        """The precision of attention's matmuls, if it changes that; None: as before."""
        return None

    @property
    def made_for(self) -> tuple[int, int] | None:
        """The compute capability for which its own kernels were tuned, so that times there do not transfer to other
        GPUs; None without such kernels."""
        return None

    def using_memory(self, num_bytes: float) -> Technique | None:
        """Return a faster variant of itself that uses this much free GPU memory; None if it cannot use it."""
        return None

    @abstractmethod
    def unsupported(self, target: Target) -> str | None:
        """Return why it cannot work here, or None. `target.pipe` may be None: then judge the machine."""

    @abstractmethod
    def apply(self, target: Target) -> Effect:
        """Apply to `target.pipe`.

        Raises:
            NoEffect: there was nothing to change.
        """

    def predict(self, target: Target) -> Effect:
        """Apply to a pipeline on the meta device, as far as shapes go, to predict its memory.

        Raises:
            NoEffect: as `apply`.
            Unpredictable: its memory cannot be predicted.
        """
        return self.apply(target)

    @property
    def is_stored(self) -> bool:
        """Whether its effect on a model is in weights and configurations, so that a saved model need not repeat it.

        `rebuild` and `resume` restore the rest on a model that is read.
        """
        return False

    def rebuild(self, target: Target, changed: Facts) -> None:
        """Give components without values, on the meta device, the modules that `apply` left.

        Args:
            target: the components as their configurations make them; nothing else is known.
            changed: what `apply` returned then.
        """
        return

    def resume(self, target: Target) -> None:
        """Restore hooks and casts on a pipeline with saved weights."""
        return

    def script(self, target: Target) -> Script | None:
        """Return the same in public calls of diffusers, torch and torchao, or None if there are none.

        Asked before `apply`, and only if `unsupported` returns None.
        """
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
    """Declare a technique's field: its default (none: required), range, and the values worth trying.

    Args:
        new: it came after the first records, so records leave it out where it has its default.
    """
    extra: dict[str, Any] = {"tune": list(tune)} | ({"new": True} if new else {})
    return Field(default, ge=ge, gt=gt, le=le, lt=lt, description=about, json_schema_extra=extra)


def _is_new(field: FieldInfo) -> bool:
    return isinstance(field.json_schema_extra, dict) and bool(field.json_schema_extra.get("new"))
