"""The target of a technique: a pipeline, its place, the facts about its model, and the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from vivace.architectures.entry import FewSteps
from vivace.machinery.technique.anatomy import Component, attribute_of, component_of

if TYPE_CHECKING:
    from vivace.machinery.technique.technique import Technique

CallContext = Callable[[], AbstractContextManager[object]]
Facts = dict[str, int | float | str]


@dataclass
class Effect:
    """The effect of applying a technique.

    Attributes:
        changed: counts and names for the Record, e.g. {"denoiser.quantized_layers": 52}.
        notes: remarks for the user, shown with the results and kept in the Record.
        call: defaults of the call that the technique sets, e.g. {"num_inference_steps": 20}.
        step_end: called after each denoising step as diffusers' `callback_on_step_end`; returns its kwargs.
        step_end_inputs: tensors that `step_end` reads and changes.
        contexts: entered around the forward of one component's working part.
        around: entered around the whole call, for settings of the process, which must not outlive it.
        evidence: called after a run; returns observations for the Record.
        forget: called before a call whose prompts count as new, to drop prompts of earlier calls.
        refuted: given the evidence of a run, why the technique had no effect after all, or None.
        finish: called once all techniques have been applied, to wrap all that they changed.
        close: called when the session is closed, also if a later technique was refused.
        prompt_words: a number of words for each length of prompts that graphs are kept of, to be drawn beforehand.
    """

    changed: Facts = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    step_end: Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]] | None = None
    step_end_inputs: tuple[str, ...] = ()
    contexts: dict[Component, CallContext] = field(default_factory=dict)
    around: CallContext | None = None
    evidence: Callable[[], Mapping[str, int | float | str | list[str]]] | None = None
    forget: Callable[[], None] | None = None
    refuted: Callable[[dict[str, Any]], str | None] | None = None
    finish: Callable[[], None] | None = None
    close: Callable[[], None] | None = None
    prompt_words: tuple[int, ...] = ()


Backend = Literal["cpu", "cuda", "rocm", "xpu", "mps"]
"""The backend of PyTorch: a CPU, NVIDIA's CUDA, AMD's ROCm, Intel's XPU, Apple's MPS."""
MAKERS: dict[Backend, str] = {"cuda": "NVIDIA", "rocm": "AMD", "xpu": "Intel", "mps": "Apple"}


@dataclass(frozen=True)
class Machine:
    """The hardware and the installation, for techniques, without importing torch.

    Attributes:
        device: torch's type of device: "cpu", "cuda" (AMD's GPUs too, under ROCm), "xpu" or "mps".
        capability: CUDA's compute capability; None if unknown, and on all but NVIDIA's GPUs.
        compiler: path of the C++ compiler, None if there is none.
        has_all_packages: pretend that every optional package is installed, to ask what the hardware alone allows.
        num_gpus: GPUs visible to this process, None if unknown.
    """

    device: str
    device_name: str
    capability: tuple[int, int] | None
    compiler: str | None
    has_all_packages: bool = False
    num_gpus: int | None = None
    is_rocm: bool = False

    @property
    def backend(self) -> Backend:
        match self.device:
            case "cuda":
                return "rocm" if self.is_rocm else "cuda"
            case "xpu" | "mps":
                return self.device
        return "cpu"

    @property
    def maker(self) -> str:
        """The maker of the GPU; "" on a CPU."""
        return MAKERS.get(self.backend, "")

    @property
    def is_gpu(self) -> bool:
        return self.backend != "cpu"

    @property
    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU. An AMD GPU's device is called "cuda", too."""
        return self.backend == "cuda"

    @property
    def captures_graphs(self) -> bool:
        """Whether PyTorch can capture graphs: CUDA's, or HIP's through the same functions."""
        return self.backend in ("cuda", "rocm")

    def has_package(self, name: str) -> bool:
        """Whether a package can be imported. It is not imported; the parent of "parent.child" is."""
        import importlib.util

        if self.has_all_packages:
            return True
        try:
            return importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:  # of the parent
            return False


@dataclass(frozen=True)
class Placement:
    """Where the pipeline runs, whether its weights are still in host memory, to be copied to the device, and where a
    technique leaves those that it converts (`home`): "cpu" if a later one moves them when needed. None: where they
    are."""

    machine: Machine
    on_host: bool = False
    home: str | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the model.

    Attributes:
        name: NAME@REVISION of its weights, "" if unknown.
        defaults: of the pipeline's call (steps, guidance, size), as far as known.
        load_tiny_vae: loads the tiny VAE of this model; None if there is none.
        tiny_vae_arguments: what loads it in a script: `AutoencoderTiny.from_pretrained`'s, or `hf_hub_download`'s.
        tiny_vae_class: the class of `vivace.machinery.tiny_vaes` that it has; "" for diffusers' AutoencoderTiny.
        distillations: the known LoRAs for few steps, the usual one of each kind first.
        has_random_weights: untrained, so techniques have no content to adapt to.
        has_weights: False for a pipeline on the meta device, which has shapes alone (see `Technique.predict`).
        stored: what techniques did to the weights before these were saved, by the techniques' text.
        hits: the share of steps after the first in which a step cache is to hit, to count the work of a recipe on the
            meta device; None: it never hits there.
    """

    name: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    load_tiny_vae: Callable[[], Any] | None = None
    tiny_vae_arguments: tuple[str, ...] = ()
    tiny_vae_class: str = ""
    distillations: tuple[FewSteps, ...] = ()
    has_random_weights: bool = False
    has_weights: bool = True
    stored: Mapping[str, Effect] = field(default_factory=dict)
    hits: float | None = None


@dataclass(frozen=True)
class Request:
    """The images that the pipeline is going to draw.

    Attributes:
        prompts: what will be drawn, or similar prompts, for techniques that adapt to them.
        batch: images per call; None if unknown.
        earlier, later: the recipe's techniques before and after this one.
        inputs: images to start from, for techniques that make calls to adapt to.
    """

    prompts: tuple[str, ...] = ()
    batch: int | None = None
    earlier: tuple[Technique, ...] = ()
    later: tuple[Technique, ...] = ()
    inputs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """The target of a technique. `pipe` is None where only the machine is checked (`vivace techniques`)."""

    where: Placement
    pipe: Any = None
    model: ModelFacts = field(default_factory=ModelFacts)
    request: Request = field(default_factory=Request)

    @classmethod
    def of_machine(cls, machine: Machine) -> Target:
        """Return a target without a pipeline, to query what this machine supports."""
        return cls(Placement(machine))

    @property
    def machine(self) -> Machine:
        return self.where.machine

    @property
    def identity(self) -> str:
        """The identity of the present weights: the model and the techniques applied so far; "" if unknown."""
        if not self.model.name:
            return ""
        return "+".join((self.model.name, *(technique.text for technique in self.request.earlier)))

    def module(self, component: Component) -> Any:
        return component_of(self.pipe, component)

    def modules(self, components: tuple[Component, ...]) -> dict[Component, Any]:
        modules = {c: self.module(c) for c in components}
        return {c: m for c, m in modules.items() if m is not None}

    def path(self, component: Component) -> str:
        """Return a script's name for the component: "pipe.unet"."""
        return f"pipe.{attribute_of(self.pipe, component)}"

    def working_path(self, component: Component) -> str:
        """Return a script's name for the part that the pipeline calls (see `working_part`)."""
        return self.path(component) + (".decoder" if component == "vae" else "")

    def with_defaults(self, defaults: Mapping[str, Any]) -> Target:
        return replace(self, model=replace(self.model, defaults=dict(defaults)))
