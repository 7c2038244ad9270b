"""The denoiser's step captured once as a CUDA graph, and replayed as a whole; text encoders and the VAE as well.

Why: an eager step launches its kernels one by one, each through Python and the driver. Where the GPU waits for
    them (small models, few tokens, batch 1), a replay, which is one launch, lets it run without gaps. It needs no
    compiler and seconds instead of minutes; `compile` (mode default) may run inside the graph. Once steps are replayed,
    text encoders and the VAE's decoder are what the GPU waits for: aim it at them, too. Schedulers that look a timestep
    up wait for the GPU in each step, or in the first, since timesteps are on it: they are given the number from the
    host instead. And before the first step diffusers searches all layers for offloading hooks, several times: it is
    told where they are.
Costs: each graph keeps a step's activations, in a pool that all graphs share. The first step of each shape takes three
    steps' work. Inputs are copied in and outputs copied out. The denoisers of Qwen-Image and a fused Krea 2 take
    prompts at their own length: each new length captures anew, and prompts of more than `max_graphs` lengths in turn do
    so with every image. On an H200 that made 8 steps of Qwen-Image longer, 3.4 s instead of 2.9
    (docs/models-measured.md). Fused with attention in fp8, Qwen-Image's pads texts to multiples of 64 tokens, which
    share a graph. Their text encoders are captured for a few lengths only, of 32, 64, 128, 256, 384, ...
    tokens. Qwen-Image 2.1's denoiser is captured where it is fused, and without its first step.
Needs: a CUDA device, and a denoiser that decides nothing on the CPU: a step cache that reads back whether to skip a
    step cannot be captured, nor can layers that copy from the host (most of GGUF's). Weights must stay at their
    addresses, so offloading them does not go with it.
Source: PyTorch, "Accelerating PyTorch with CUDA Graphs"; CUDA C++ Programming Guide, CUDA Graphs.

A replay reads and writes the same memory each time. Inputs are therefore copied into the graph's buffers, and callers
get copies of its outputs: schedulers keep earlier ones. Tensors of another shape, dtype or layout, another structure of
arguments, or another value of any argument that is not a tensor make another graph; the most recently used graphs are
kept, `max_graphs` for each size that a technique announces (`compile(sizes=[...])`), and for each of six lengths of
prompts. Guidance that ends halfway (`cfg_cutoff`) takes two of each size. With `parallel` each GPU captures its own
graph, which includes its collectives.
A language model that encodes prompts at their own length gets further tokens behind them, which nothing reads: no token
sees a later one. Its states are those of the call without a graph, with the same bits where matrix products of another
number of rows add in the same order, otherwise within a rounding of bf16. Where images are given with the prompt, or
text is written, the call is not captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.architectures import family_of, pipeline_named
from vivace.errors import Unpredictable
from vivace.machinery.quantization.optional_schemes import why_not_capturable
from vivace.machinery.samplers import Method, override
from vivace.machinery.technique import (
    COMPONENTS,
    TEXT_ENCODERS,
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
from vivace.machinery.technique.anatomy import working_part
from vivace.machinery.technique.traits import is_compiled

if TYPE_CHECKING:
    import torch

_LOOK_UP_TIMESTEPS = ("DDIMScheduler", "DDPMScheduler", "LCMScheduler", "PNDMScheduler", "TCDScheduler")
"""Schedulers that index a table on the CPU by the timestep, and so read it back from the GPU in each step."""

_SEARCH_FIRST_TIMESTEP = (
    "DPMSolverMultistepScheduler",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
)
"""Schedulers that count steps, but search all timesteps for the first one, for which the host waits for the GPU."""


class CudaGraph(Technique):
    name: ClassVar[str] = "cuda_graph"
    summary: ClassVar[str] = "a component's forward captured once, and replayed in one launch"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.CAPTURE,
        owns="graph capture",
        same_picture=True,
        targetable=COMPONENTS,
        default_targets=("denoiser",),
        provides=frozenset({Trait.CAPTURED}),
        excludes=(
            Rule(
                Trait.CAPTURED_BY_COMPILER,
                "in this mode torch.compile captures CUDA graphs itself; keep one of the two",
            ),
            Rule(
                Trait.DECIDES_ON_HOST,
                "a step cache that reads a value back to the CPU in each step cannot be part of a graph",
            ),
            Rule(
                Trait.COPIES_FROM_HOST,
                "these layers copy constants from the host in each call, which a graph cannot contain; take q8_0, or "
                "add compile",
                unless=Trait.COMPILED_WHOLE,
            ),
            Rule(
                Trait.MOVED,
                "CUDA graphs read weights at fixed addresses; leave the text encoders out, or free_encoders",
                components=TEXT_ENCODERS,
            ),
        ),
    )

    max_graphs: int = knob(
        4,
        ge=1,
        le=64,
        tune=[4],
        about="how many graphs are kept for each announced size, the most recently used",
    )

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.captures_graphs:
            return "graphs are captured on NVIDIA GPUs, and on AMD's as HIP graphs; there is none here"
        if target.pipe is None:
            return None
        vae = target.module("vae") if "vae" in self.targets else None
        if vae is not None and vae.config.get("force_upcast") and str(vae.dtype) == "torch.float16":
            return (
                "the pipeline casts this VAE to fp32 and back in each call, so its weights have no fixed address; add "
                "dtype(bf16)@vae or fused@vae, or leave the VAE out"
            )
        known = pipeline_named(type(target.pipe).__name__)
        for component, module in target.modules(self.targets).items():
            family = family_of(module)
            keeps_sources = known is not None and known.keeps_sources and component == "denoiser"
            if keeps_sources and not hasattr(module.forward, "later_step"):
                return (
                    f"{type(target.pipe).__name__} keeps what the first step makes of source images in an object, "
                    "which a graph would not fill again; add fused, or leave the denoiser out"
                )
            if family is not None and (why := family.not_captured(module)):
                return f"{why}, which a graph cannot contain; leave the {component} out"
            if is_compiled(module):
                continue
            for name, layer in module.named_modules():
                if (reason := why_not_capturable(layer)) is not None:
                    return f"a layer of the {component} cannot be captured ({name}): {reason}"
        return None

    def apply(self, target: Target) -> Effect:
        from vivace.machinery.compilation import prompt_lengths
        from vivace.machinery.compilation.captured import CapturedFunction, cuda_capturer, replace_forward

        announced = {size for technique in target.request.earlier for size in technique.facts.announced_sizes}
        kept = self.max_graphs * max(1, len(announced))
        capturer = cuda_capturer()
        captured: dict[Component, CapturedFunction] = {}
        prompts: dict[Component, prompt_lengths.PromptLengths] = {}
        words = set[int]()
        for component, module in target.modules(self.targets).items():
            called = working_part(component, module)
            pads = any(getattr(part, "pads", False) for part in (called.forward, *module.modules()))
            words.update(prompt_lengths.WORDS_OF_ROWS if pads else ())
            most = kept * (prompt_lengths.NUM_LENGTHS if pads else 1)
            if component in TEXT_ENCODERS and prompt_lengths.is_causal_language_model(module):
                of_prompts = prompts[component] = prompt_lengths.PromptLengths(
                    called.forward, module.device, capturer, kept
                )
                captured[component] = of_prompts.graphs
                replace_forward(called, of_prompts.graphs, of_prompts)
                words.update(prompt_lengths.WORDS_OF_ROWS)
            elif _pads_captions(module) and not is_compiled(module):
                of_captions = prompt_lengths.PaddedCaptions(module, module.device, capturer, kept)
                captured[component] = of_captions.graphs
                replace_forward(called, of_captions)
                words.update(prompt_lengths.WORDS_OF_CAPTIONS)
            elif hasattr(called.forward, "padded") and not is_compiled(module):
                of_texts = prompt_lengths.PaddedTexts(called.forward, module.device, capturer, kept)
                captured[component] = of_texts.graphs
                replace_forward(called, of_texts)
            elif hasattr(called.forward, "later_step") and not is_compiled(module):
                # Its first step reads back from the GPU, or keeps much of what it computes, and is not captured.
                later_steps = CapturedFunction(called.forward.later_step, module.device, capturer, most)
                captured[component] = called.forward.later_step = later_steps
            else:
                captured[component] = CapturedFunction(called.forward, module.device, capturer, most)
                replace_forward(called, captured[component])
        changed: dict[str, int | float | str] = {
            f"{component}.cuda_graphs": f"up to {graphs.max_graphs}" for component, graphs in captured.items()
        }
        on_host = _TimestepsOnHost()
        devices = _DeviceAnswers()

        def finish() -> None:
            devices.settle(target.pipe)
            # The scheduler may have been replaced after this technique was applied.
            scheduler = getattr(target.pipe, "scheduler", None)
            if "denoiser" in captured and _reads_timesteps(scheduler):
                on_host.wrap(scheduler)

        def refuted(_: dict[str, Any]) -> str | None:
            for component, graphs in captured.items():
                if graphs.num_captured > 1 and graphs.num_replays == graphs.num_captured:
                    return (
                        f"none of {graphs.num_captured} graphs of the {component} was used twice: every call had other "
                        "arguments"
                    )
                if component == "vae" and not graphs.num_replays:
                    return "the VAE decoded nothing"
                if component == "denoiser" and not graphs.num_replays:
                    return "the denoiser had no step that is captured"
                if component in prompts and prompts[component].num_beside and not graphs.num_replays:
                    return (
                        f"the {component} was given images with every prompt, and such calls are not captured"
                    )
            return None

        def evidence() -> dict[str, int | float | str]:
            facts: dict[str, int | float | str] = {
                "cuda_graphs_recorded": sum(graphs.num_captured for graphs in captured.values()),
                "cuda_graph_replays": sum(graphs.num_replays for graphs in captured.values()),
            }
            more = {"timesteps_from_host": on_host.num_steps}
            for component, lengths in prompts.items():
                more[f"{component}.prompts_padded"] = lengths.num_padded
                more[f"{component}.calls_not_captured"] = lengths.num_beside
            return facts | {name: number for name, number in more.items() if number}

        return Effect(
            changed=changed,
            around=devices.answering,
            evidence=evidence,
            refuted=refuted,
            finish=finish,
            prompt_words=tuple(sorted(words)),
        )

    def predict(self, target: Target) -> Effect:
        """Refuse to predict memory.

        Raises:
            Unpredictable: always.
        """
        raise Unpredictable(
            "cuda_graph: the size of a CUDA graph's memory pool cannot be predicted; predict the recipe "
            "without it, and keep a step's activations in reserve"
        )


def _pads_captions(module: Any) -> bool:
    """Return whether a denoiser makes texts longer itself, in a way that graphs can be shared by."""
    family = family_of(module)
    return family is not None and family.pads_captions


class _DeviceAnswers:
    """Answers diffusers' question on which device components compute, for which it otherwise searches their layers.

    A call of a pipeline asks up to ten times, and each time every layer of one component or of all is asked for the
    hooks of group offloading: SDXL has 2,717. Meanwhile the GPU has nothing to do (docs/performance/unets.md). Captured
    components are not offloaded, so their weights are where they compute.
    """

    def __init__(self) -> None:
        self._devices: dict[torch.nn.Module, torch.device] = {}

    def settle(self, pipe: Any) -> None:
        """Record where components are; nothing if one of them is offloaded.

        The other processes of `parallel` have a pipeline without components, which nobody calls.
        """
        import torch
        from diffusers.hooks.group_offloading import _is_group_offload_enabled

        modules = [
            part for part in getattr(pipe, "components", {}).values() if isinstance(part, torch.nn.Module)
        ]
        if not any(hasattr(module, "_hf_hook") or _is_group_offload_enabled(module) for module in modules):
            devices = {module: _first_device(module) for module in modules}
            self._devices = {module: device for module, device in devices.items() if device is not None}

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Answer diffusers' searches during a call, except for components that have been moved or offloaded since."""
        from diffusers.hooks import group_offloading

        search = group_offloading._get_group_onload_device
        stayed = {
            module: device
            for module, device in self._devices.items()
            if _first_device(module) == device and not hasattr(module, "_hf_hook")
        }

        def device_of(module: Any) -> torch.device:
            return stayed[module] if module in stayed else search(module)

        group_offloading._get_group_onload_device = device_of
        try:
            yield
        finally:
            group_offloading._get_group_onload_device = search


def _first_device(module: torch.nn.Module) -> torch.device | None:
    return next((weight.device for weight in module.parameters()), None)


def _reads_timesteps(scheduler: Any) -> bool:
    """Whether a scheduler reads timesteps back from the GPU, and makes the same ones on the CPU."""
    name = type(scheduler).__name__
    if name not in _SEARCH_FIRST_TIMESTEP:
        return name in _LOOK_UP_TIMESTEPS
    # Those are logarithms, which the GPU may round otherwise.
    return bool(scheduler.config.get("timestep_type") != "continuous")


class _TimestepsOnHost:
    """Lets a scheduler look timesteps up without waiting for the GPU.

    Timesteps are made on the CPU and copied to the device. The loop's `t`, a view of the copy, tells by its place which
    number of the CPU's it is; `step` and `scale_model_input`, whichever comes first, are given that, and see the CPU's
    timesteps. One from elsewhere is left as it is, and so is everything where something else has set the scheduler's
    timesteps since.

    Attributes:
        num_steps: steps that were given a timestep of the CPU.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._on_host: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None

    def wrap(self, scheduler: Any) -> None:
        def setting(set_timesteps: Method) -> Method:
            signature = inspect.signature(set_timesteps)

            def set_on_host(self_: Any, *args: Any, **kwargs: Any) -> None:
                if self_ is not scheduler:  # a copy, whose timesteps are its own
                    set_timesteps(self_, *args, **kwargs)
                    return
                bound = signature.bind(self_, *args, **kwargs)
                device = bound.arguments.pop("device", None)
                set_timesteps(*bound.args, **bound.kwargs)
                self._on_host = self._copy = scheduler.timesteps
                if device is not None:
                    # Pageable memory is staged at once, so the copy does not wait for the GPU either.
                    scheduler.timesteps = self._copy = scheduler.timesteps.to(device, non_blocking=True)

            return set_on_host

        def stepping(step: Method) -> Method:
            def step_on_host(
                self_: Any, model_output: torch.Tensor, timestep: Any, *args: Any, **kwargs: Any
            ) -> Any:
                with self._with_host_timesteps(self_, timestep) as passed_on:
                    self.num_steps += passed_on is not timestep
                    return step(self_, model_output, passed_on, *args, **kwargs)

            return step_on_host

        def scaling(scale: Method) -> Method:
            def scale_on_host(self_: Any, sample: torch.Tensor, timestep: Any) -> Any:
                with self._with_host_timesteps(self_, timestep) as passed_on:
                    return scale(self_, sample, passed_on)

            return scale_on_host

        override(scheduler, "set_timesteps", setting)
        override(scheduler, "step", stepping)
        if type(scheduler).__name__ in _SEARCH_FIRST_TIMESTEP:
            override(scheduler, "scale_model_input", scaling)

    @contextmanager
    def _with_host_timesteps(self, scheduler: Any, timestep: Any) -> Iterator[Any]:
        """Let a scheduler see the CPU's timesteps, and give the one to call it with."""
        on_host, copy = self._on_host, self._copy
        place = None if copy is None else _place_of(timestep, copy)
        if on_host is None or place is None or scheduler.timesteps is not copy:
            yield timestep
            return
        scheduler.timesteps = on_host
        try:
            yield on_host[place]
        finally:
            scheduler.timesteps = copy


def _place_of(element: Any, tensor: torch.Tensor) -> int | None:
    """Return the index of an element of a tensor if it is a view of it."""
    import torch

    if not isinstance(element, torch.Tensor) or element.numel() != 1:
        return None
    place = element.storage_offset() - tensor.storage_offset()
    is_view = element.untyped_storage()._cdata == tensor.untyped_storage()._cdata
    return place if is_view and 0 <= place < len(tensor) else None
