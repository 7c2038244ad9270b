"""The contract of a technique: one optimisation in one final class in one file.

A technique declares its stage (where in the order it belongs), the slot that it owns (two techniques that own
the same slot of the same component conflict), whether the picture stays the same, and its knobs as fields.
It says in words why it is unsupported, and `apply` says what really changed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field

from vivace.contract.script import Script
from vivace.spec.recipe import TechniqueCall

Component = Literal["denoiser", "text_encoder", "text_encoder_2", "vae"]
COMPONENTS: tuple[Component, ...] = get_args(Component)


class Stage(IntEnum):
    """The order in which techniques are applied, whatever the order of the recipe's text.

    The pipeline's parts are exchanged before they are converted, converted before they are compiled; what
    only concerns the call comes last.
    """

    SWAP = 10
    """A part is exchanged: a tiny VAE."""
    PRUNE = 15
    """Blocks are taken out, before anything is done to those that stay."""
    PRECISION = 20
    """dtype, before quantisation looks at the weights."""
    FUSE = 25
    """Layers are merged into one; before quantisation, since quantised weights cannot be."""
    QUANTIZE = 30
    """Weights are replaced by quantised ones."""
    LAYOUT = 40
    """Memory formats; after quantisation, which may create new weights."""
    SHARE = 42
    """The denoiser as it is now is given to other GPUs; what is done to it later, is done to each of its copies."""
    SPLIT = 43
    """A part's work is cut into smaller pieces: tiles, slices."""
    THIN = 44
    """Less work within a step: fewer tokens."""
    CACHE = 45
    """Hooks that skip work between steps; before compiling, so that the graph is traced with them."""
    COMPILE = 50
    RECORD = 55
    """The (perhaps compiled) forward is recorded, to be replayed."""
    KERNEL = 60
    """Kernel choice by contexts around the (perhaps compiled) forward."""
    SCHEDULE = 70
    """What concerns the call: scheduler, steps, guidance, its prompts."""
    OFFLOAD = 90
    """Where weights wait; last, since whatever looks at weights wants them where they work."""


@dataclass(frozen=True)
class Machine:
    """What a technique may ask about the hardware and the installation without importing torch.

    `capability` is CUDA's compute capability, None where unknown; `compiler` is the C++ compiler's path.
    `has_all_packages` takes optional packages for installed: to ask what the hardware alone would allow. `num_gpus` are
    those that this process sees, None where unknown.
    """

    device: str
    device_name: str
    capability: tuple[int, int] | None
    compiler: str | None
    has_all_packages: bool = False
    num_gpus: int | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def has_package(self, name: str) -> bool:
        """Whether a package can be imported; it is not imported for that, a parent of "parent.child" is."""
        import importlib.util

        if self.has_all_packages:
            return True
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the parent
            return False


CallContext = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Distillation:
    """A LoRA that makes a model draw in few steps, and how it is meant to be used.

    steps: the numbers of steps that it was made for, the usual one first.
    scheduler, scheduler_config: a class of diffusers, and in what it differs from the pipeline's own configuration.
    scale: how much of it is added.
    where: the file in words, for the Record; arguments: what `pipe.load_lora_weights` takes to load it in a script.
    merge: fetches it if need be and adds it to a pipeline's denoiser; how many layers were changed.
    """

    kind: str
    steps: tuple[int, ...]
    guidance_scale: float
    scheduler: str
    scheduler_config: Mapping[str, Any]
    scale: float
    where: str
    arguments: tuple[str, ...]
    merge: Callable[[Any], int]


@dataclass
class Target:
    """What a technique is applied to: the pipeline, its catalogue defaults, and the device.

    `pipe` is None when only the machine is judged (`vivace techniques`). `defaults` are the call's defaults
    (steps, guidance, size) as far as known. `load_tiny_vae` gives the tiny VAE of this model, or None;
    `tiny_vae_arguments` are what `AutoencoderTiny.from_pretrained` takes to load the same in a script.
    `distillations` are the LoRAs for few steps that are known for this model, the usual one of each kind first.
    `has_random_weights` says that nothing was learnt: what adapts to the content has nothing to adapt to.
    `waits` says that the pipeline is in the host's memory still, to be brought to the device; `home` is then where
    weights are left: on the "cpu" if a later technique moves them when they are needed.
    `has_data` is False where the pipeline has shapes alone (its tensors lie on the meta device), to predict what memory
    it takes: whatever looks at values or compiles is then left out, and what it would hold is held.
    `prompts` are what will be drawn, or the like of it, for what adapts to that; `identity` tells the model's weights
    and the techniques that were applied before from all others ("": unknown), `model` the weights alone, and `keep` is
    a folder for what may be found again by the identity (None: nothing is kept).
    `later` are the recipe's techniques that come after this one.
    """

    machine: Machine
    pipe: Any = None
    defaults: dict[str, Any] = field(default_factory=dict)
    load_tiny_vae: Callable[[], Any] | None = None
    tiny_vae_arguments: tuple[str, ...] = ()
    distillations: tuple[Distillation, ...] = ()
    has_random_weights: bool = False
    has_data: bool = True
    waits: bool = False
    home: str | None = None
    components: tuple[Component, ...] = ()
    prompts: tuple[str, ...] = ()
    identity: str = ""
    model: str = ""
    keep: Path | None = None
    later: tuple[TechniqueCall, ...] = ()

    def module(self, component: Component) -> Any:
        """The component's module, or None if this pipeline has none."""
        return component_of(self.pipe, component)

    def modules(self) -> dict[Component, Any]:
        """The targeted components that this pipeline has."""
        found = {c: self.module(c) for c in self.components}
        return {c: m for c, m in found.items() if m is not None}

    def path(self, component: Component) -> str:
        """How a script names the component: "pipe.unet"."""
        return f"pipe.{_attribute_of(self.pipe, component)}"

    def working_path(self, component: Component) -> str:
        """How a script names what of it works: see `working_part`."""
        return self.path(component) + (".decoder" if component == "vae" else "")


def component_of(pipe: Any, component: Component) -> Any:
    """The pipeline's own module for a component: `denoiser` is its UNet or transformer; None if absent."""
    return getattr(pipe, _attribute_of(pipe, component), None)


def _attribute_of(pipe: Any, component: Component) -> str:
    if component != "denoiser":
        return component
    return "unet" if getattr(pipe, "unet", None) is not None else "transformer"


def working_part(component: Component, module: Any) -> Any:
    """What of a component a text-to-image pipeline calls: the whole, but of a VAE (`decode`, never `forward`) its
    decoder."""
    return module.decoder if component == "vae" else module


@dataclass
class Effect:
    """What an application really did.

    changed: counts and names for the Record, e.g. {"denoiser.quantized_layers": 52}.
    call: defaults of the call that the technique sets, e.g. {"num_inference_steps": 20}.
    step_end: called after each denoising step as diffusers' `callback_on_step_end`, returns its kwargs.
    step_end_inputs: tensors that `step_end` wants to see and change.
    contexts: entered around the forward of one component's working part.
    around: entered around the whole call, and left at its end: for settings of the process, which must not outlive it.
    evidence: called after a run; what was seen to happen, for the Record.
    refuted: given the evidence of a run, why the technique had no effect after all, or None.
    finish: called once all techniques have been applied, for what belongs outside of whatever they did.
    close: called when the session is closed, also where a later technique was refused.
    """

    changed: dict[str, int | float | str] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)
    step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None
    step_end_inputs: tuple[str, ...] = ()
    contexts: dict[Component, CallContext] = field(default_factory=dict)
    around: CallContext | None = None
    evidence: Callable[[], Mapping[str, int | float | str | list[str]]] | None = None
    refuted: Callable[[dict[str, Any]], str | None] | None = None
    finish: Callable[[], None] | None = None
    close: Callable[[], None] | None = None


@dataclass(frozen=True)
class Arithmetic:
    """What a technique does to numbers, to be read after "weights are stored" and "products are computed".

    weights: how those of the layers that it takes are stored; products: what is multiplied, e.g. "in int8".
    """

    weights: str = "as before"
    products: str = "as before"


class Technique(BaseModel, ABC):
    """Base of all techniques. Those with a name are final; their class name in snake_case is the registry name."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: ClassVar[str]
    summary: ClassVar[str]
    stage: ClassVar[Stage]
    owns: ClassVar[str]
    same_picture: ClassVar[bool]
    targetable: ClassVar[tuple[Component, ...]] = ()
    """Components that the technique can be aimed at; empty: it concerns the call as a whole."""
    default_targets: ClassVar[tuple[Component, ...]] = ()
    of_the_process: ClassVar[bool] = False
    """Whether it sets something for the whole process while a call runs, which copies of the denoiser in other
    processes need as well."""
    looks_beyond_rows: ClassVar[bool] = False
    """Whether what it does to one row of the denoiser's batch depends on the others, or keeps state in its copies."""
    shares_tokens: ClassVar[bool] = False
    """Of a step cache, whether it works where each GPU has its own part of a transformer's tokens."""
    when_memory_is_short: ClassVar[tuple[str, ...]] = ()
    """Recipes of this technique alone that are worth trying where memory is short, the most harmless first."""
    makes_way: ClassVar[tuple[str, ...]] = ()
    """Recipes of this technique alone that go with more than others of it do: for the place of one of those where
    something that saves memory does not go with it."""

    @property
    def from_host(self) -> bool:
        """Whether it takes weights where they wait in the host's memory and brings to the GPU what it makes of them, a
        layer or a part at a time; so a model that is too large for the GPU can be loaded."""
        return False

    @property
    def arithmetic(self) -> Arithmetic:
        """What it does to weights and to products; for most techniques nothing."""
        return Arithmetic()

    @property
    def num_gpus(self) -> int:
        """GPUs that each hold the denoiser, this process's own among them."""
        return 1

    @property
    def needs_prompts(self) -> bool:
        """Whether it draws some of the prompts when it is applied, to adapt to them."""
        return False

    def with_room(self, num_bytes: float) -> str | None:
        """The recipe of this technique alone that is faster for so many bytes, free on the GPU while the denoiser
        works; None: it has no use for them."""
        return None

    @abstractmethod
    def unsupported(self, target: Target) -> str | None:
        """Why it cannot work here, in words, or None. `target.pipe` may be None: then judge the machine."""

    @abstractmethod
    def apply(self, target: Target) -> Effect:
        """Apply to `target.pipe`.

        Raises:
            NoEffect: nothing was there to change.
        """

    def script(self, target: Target) -> Script | None:
        """The same in public calls of diffusers, torch and torchao, or None where the technique is vivace's own.

        Asked before `apply`, and only where `unsupported` has nothing to say.
        """
        return None


def knob(
    default: Any = ...,
    *,
    tune: Sequence[Any] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    about: str = "",
) -> Any:
    """A technique's field: its default (none: required), range, and the values worth trying."""
    return Field(
        default, ge=ge, gt=gt, le=le, lt=lt, description=about, json_schema_extra={"tune": list(tune)}
    )
