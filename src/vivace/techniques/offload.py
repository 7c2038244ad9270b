"""Weights are kept in host memory and onloaded to the GPU while they are needed.

Why: the components of a pipeline work one after the other, and most of the weights are idle at any time. `model` keeps
    one component on the GPU at a time (FLUX: the transformer without its T5), `sequential` and `group` one layer at a
    time, so that little more than activations has to fit.
Costs: copies over PCIe. `model` copies each component once a call; `group` and `sequential` copy all of a component's
    weights each time it is called: FLUX's transformer is 24 GB in bf16, in every step. `model` and `group` copy nothing
    back: the offloaded weights stay in pinned memory, from which the GPU copies directly. `group` with `stream`
    prefetches the next layers while one computes, which takes 268 MB and a layer more; with `keep` some of the
    denoiser's layers stay on the GPU while it works, and are copied once a call. `sequential` copies from pageable
    memory, and rebuilds every weight.
Needs: a GPU, and host memory for the whole model; it is loaded there and need never fit the GPU. A captured step reads
    weights at fixed addresses, so CUDA graphs do not go with it; nor do compiled or quantised components with
    `sequential`, or fused ones with `group` or `sequential`. With `group` a component may be compiled by its repeated
    blocks, each of which is onloaded as one.
Source: accelerate, `cpu_offload_with_hook` and `cpu_offload`; diffusers, `enable_group_offload`; Rajbhandari et al.,
    ZeRO-Infinity, arXiv 2104.07857.

`model` and `group` are implemented in `vivace.machinery.offloading`, in place of diffusers' own
`enable_model_cpu_offload` and `enable_group_offload`. Where the host grants no more pinned memory, the remainder is
kept in pageable memory, from which copies are slower; the record says how much is pinned, and why not all is. What is
written into weights within a call is lost at its end. With `group` the VAE is onloaded whole, when it decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from vivace.errors import NoEffect, Unpredictable
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.machinery.offloading.layer_offloader import PREFETCH_BYTES, LayerOffloader, simulate_offloading
from vivace.machinery.offloading.offloaded_module import is_moved_by_hooks, opaque_weight_class
from vivace.machinery.technique import (
    COMPONENTS,
    TEXT_ENCODERS,
    Arithmetic,
    Component,
    Effect,
    Rule,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    component_of,
    is_cast_in_call,
    knob,
)
from vivace.machinery.technique.script import Script, literal, written_call
from vivace.measure.accelerator import empty_cache

if TYPE_CHECKING:
    import torch

GB = 1e9
_STEP = 0.5 * GB  # in which `vivace plan` proposes what to keep

_BY_LAYER: tuple[Component, ...] = ("denoiser", *TEXT_ENCODERS)
"""The VAE is onloaded as a whole in every mode but sequential."""

_REBUILT_BY_ACCELERATE = {"Parameter", "Int8Params", "Params4bit"}
"""Classes of weights that accelerate can rebuild from their bytes, as it does each time they are onloaded. Of others it
loses what the bytes mean (GGUF's quantisation type, torchao's scales)."""


class Offload(Technique):
    name: ClassVar[str] = "offload"
    summary: ClassVar[str] = "weights are kept in host memory"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.OFFLOAD,
        owns="placement of the weights",
        same_picture=True,
        saves_memory=("offload(model)", "offload(group)"),
        arithmetic=Arithmetic(weights="as before, in host memory"),
        loads_from_host=True,
        belongs_to_pipeline=True,
    )

    mode: Literal["model", "sequential", "group"] = knob(
        tune=["model", "group"], about="model: component by component; sequential and group: layer by layer"
    )
    stream: bool = knob(
        False, tune=[False, True], about="group only: prefetch the next layers while one computes"
    )

    keep: float = knob(
        0,
        ge=0,
        le=1000,
        tune=[0, 8],
        about="group only: GB (10^9 bytes) of the denoiser's weights that stay on the GPU while it works",
    )

    @model_validator(mode="after")
    def _belongs_to_group(self) -> Self:
        for name, value in (("stream", self.stream), ("keep", self.keep)):
            if value and self.mode != "group":
                raise ValueError(f"{name} belongs to group, not to {self.mode}")
        return self

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            provides=self._provides,
            excludes=self._excludes,
        )

    def using_memory(self, num_bytes: float) -> Offload | None:
        """Return a faster variant that uses this much free GPU memory; None if it cannot use it."""
        more = math.floor((num_bytes - (PREFETCH_BYTES if self.stream else 0)) / _STEP)
        if self.mode != "group" or self.keep or more < 1:
            return None
        return self.model_copy(update={"keep": more * _STEP / GB})

    @property
    def _provides(self) -> frozenset[Trait]:
        by_layer = set() if self.mode == "model" else {Trait.OFFLOADED_BY_LAYER}
        return frozenset({Trait.OFFLOADED, *by_layer})

    @property
    def _excludes(self) -> tuple[Rule, ...]:
        rules = [
            Rule(Trait.CAPTURED, "CUDA graphs read weights at fixed addresses, and offloading moves them"),
            Rule(Trait.MOVED, "the text encoders would be moved twice; offloading frees them as well"),
        ]
        if self.mode != "model":
            reason = (
                f"{self.mode} onloads a layer when it is called, and fused blocks read the weights of several at "
                "once; take offload(model)"
            )
            rules.append(Rule(Trait.FUSED, reason))
        if self.mode == "group":
            reason = (
                "group swaps the weights of single layers; take offload(model), or compile(blocks=repeated)"
            )
            rules.append(Rule(Trait.COMPILED_WHOLE, reason, components=_BY_LAYER))
        if self.mode == "sequential":
            reason = "sequential swaps the weights of single layers; offload(model) takes compiled components"
            rules.append(Rule(Trait.COMPILED, reason))
            rules.append(Rule(Trait.REPACKED, "sequential moves plain weights only; take offload(group)"))
        return tuple(rules)

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.is_gpu:
            return "on a CPU the weights are in host memory already, and there is no GPU to keep free"
        if target.machine.backend == "mps":
            return "Apple's GPUs share the CPU's memory, so there is nowhere to offload to"
        if self.stream and target.machine.backend == "xpu":
            return "prefetching on a stream was written for CUDA and ROCm; leave stream=True out"
        if target.pipe is None:
            return None
        if self.mode == "model" and getattr(target.pipe, "model_cpu_offload_seq", None) is None:
            return f"{type(target.pipe).__name__} does not say in which order its components work; group can do without"
        for component, module in _components(target.pipe).items():
            reason = self._unsupported_component(component, module)
            if reason is not None:
                return reason
        return None

    def _unsupported_component(self, component: str, module: torch.nn.Module) -> str | None:
        opaque = opaque_weight_class(module) if self.mode != "sequential" else None
        if opaque is not None:
            return f"the {component}'s weights are {opaque}, which cannot be taken apart and rebuilt"
        if self.mode == "sequential" and any(
            type(weight).__name__ not in _REBUILT_BY_ACCELERATE for weight in module.parameters()
        ):
            return f"the {component} is quantised, and sequential moves plain weights only; group can do that"
        return None

    def apply(self, target: Target) -> Effect:
        pipe = target.pipe
        components = _components(pipe)
        changed = _counted(components)
        total = changed["offloaded_bytes"]
        offloader = _enable(pipe, self, target.machine.device)
        if isinstance(offloader, LayerOffloader) and self.keep:
            changed["kept_bytes"] = offloader.kept_bytes
        if offloader is not None:
            changed["page_locked_bytes"] = offloader.memory.num_bytes
            if offloader.memory.refused is not None:
                changed["rest_not_page_locked"] = offloader.memory.refused

        def on_gpu() -> int:
            return sum(_bytes(module, target.machine.device) for module in components.values())

        def evidence() -> dict[str, int | float | str]:
            facts: dict[str, int | float | str] = {"weights_on_gpu_after_run_bytes": on_gpu()}
            if offloader is not None:
                facts["weights_copied_per_call_bytes"] = offloader.copied_bytes
            if isinstance(offloader, LayerOffloader):
                if self.stream:
                    facts["layers_fetched_ahead_per_call"] = offloader.num_prefetched
            elif offloader is not None:
                facts["weights_copied_per_call_s"] = offloader.copied_s
            return facts

        def refuted(_: dict[str, Any]) -> str | None:
            if total and on_gpu() == total:
                return "all weights were on the GPU after the run"
            return None

        @contextmanager
        def offloaded_at_the_end() -> Iterator[None]:
            """Offload after a call that failed as well."""
            try:
                yield
            finally:
                if offloader is not None:
                    offloader.end_call()

        return Effect(changed=changed, around=offloaded_at_the_end, evidence=evidence, refuted=refuted)

    def predict(self, target: Target) -> Effect:
        """Apply to a pipeline on the meta device, to predict its memory.

        Raises:
            Unpredictable: with `stream`.
        """
        if self.stream:
            raise Unpredictable(
                "offload: which layers are prefetched is decided while it runs, so its memory cannot be predicted; "
                f"predict offload(group), and add {PREFETCH_BYTES / 1e6:.0f} MB and the largest layer's weights"
            )
        components = _components(target.pipe)
        changed = _counted(components)
        simulate_offloading(target.pipe, components, self.mode, self.keep * GB)
        return Effect(changed=changed)

    def script(self, target: Target) -> Script:
        if self.mode == "model":
            return Script(lines=_MODEL, places_weights=True)
        if self.mode == "sequential":
            return Script(lines=("pipe.enable_sequential_cpu_offload()",), places_weights=True)
        lines_before = (*_GROUP, *(_KEPT if self.keep else ()))
        lines = (*lines_before, *_group_lines("pipe", stream=self.stream))
        if self.stream and is_cast_in_call(target.pipe):
            lines = (
                *lines_before,
                *_group_lines("pipe", stream=True, exclude_modules='"vae"'),
                "# The pipeline casts its VAE in each call, and a stream would restore its weights from before.",
                *_group_lines("pipe.vae", stream=False),
            )
        return Script(imports=("torch",), lines=lines, places_weights=True)


def _group_lines(path: str, *, stream: bool, **more: str) -> tuple[str, ...]:
    enable = written_call(
        f"{path}.enable_group_offload",
        'torch.device("cuda")',
        'torch.device("cpu")',
        offload_type='"leaf_level"',
        use_stream=literal(stream),
        **more,
    )
    return tuple(enable.splitlines())


_GROUP = (
    "# vivace offloads layers itself, copies nothing back, and generates the same image:",
    "# vivace.load(model, recipe).",
)

_KEPT = ("# diffusers keeps no layers on the GPU; vivace keeps some, which copies less.",)

_MODEL = (
    "# diffusers copies each component back to host memory. vivace generates the same image without",
    "# that: vivace.load(model, recipe).",
    "pipe.enable_model_cpu_offload()",
)


def _components(pipe: Any) -> dict[str, torch.nn.Module]:
    components = {component: component_of(pipe, component) for component in COMPONENTS}
    return {component: module for component, module in components.items() if module is not None}


def _counted(components: dict[str, torch.nn.Module]) -> dict[str, int | float | str]:
    """Count what is offloaded.

    Raises:
        NoEffect: something moves the weights already.
    """
    if any(is_moved_by_hooks(module) for module in components.values()):
        raise NoEffect("something moves the pipeline's weights already", already_so=True)
    total = sum(_bytes(module) for module in components.values())
    return {"offloaded_components": len(components), "offloaded_bytes": total}


def _enable(pipe: Any, technique: Offload, device: Any) -> ComponentOffloader | None:
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    offloader = None
    pin = device.type in ("cuda", "xpu")
    if technique.mode == "model":
        offloader = ComponentOffloader(pipe, device, pin=pin)
    elif technique.mode == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        offloader = LayerOffloader(pipe, device, pin=pin, prefetch=technique.stream, keep=technique.keep * GB)
    empty_cache(device.type)
    return offloader


def _bytes(module: torch.nn.Module, device: str | None = None) -> int:
    """Return the bytes of a module's parameters, optionally only those on one type of device."""
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in module.parameters()
        if device is None or parameter.device.type == device
    )
