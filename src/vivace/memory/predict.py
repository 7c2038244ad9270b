"""What a model takes under a recipe, in bytes on a GPU, before anything is loaded.

The recipe is applied to the pipeline without weights (`vivace.memory.weightless`) as it is to the real one, and the
pipeline's own call runs through its stages; `vivace.memory.footprint` follows what would be held meanwhile.
"""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from vivace.contract import Machine, ModelFacts, Placement, Target, component_of
from vivace.errors import Unsupported, VivaceError, WorkloadError
from vivace.measure.memory import plain_tensors
from vivace.memory.footprint import Footprint
from vivace.memory.weightless import Weightless, find_weightless
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.models.lora import distillations
from vivace.models.quiet import quiet
from vivace.recipes.recipe import Recipe
from vivace.runtime.embeddings import encode
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.session import Session
from vivace.spec.base import Spec
from vivace.spec.trial import Trial

BEYOND_ALLOCATOR = 600_000_000
"""The CUDA context with the kernels of PyTorch, cuBLAS and cuDNN: an assumption, not a measurement. No allocator's
figure contains it."""
ANY_GPU = Machine(device="cuda", device_name="a GPU", capability=None, compiler=None)
_STEPS = 2
"""Every step takes the same memory; the second one has what the first left behind."""
_COPIES = 8
"""Bytes that quantising a layer may take meanwhile, in sizes of its weight in half precision: an assumption."""
_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}


class ComponentBytes(Spec):
    """One network of the pipeline after the recipe. `dtype` lists the kinds of tensors, most bytes first."""

    name: str
    class_name: str
    num_parameters: int
    dtype: str
    num_bytes: int


class Prediction(Spec):
    """Bytes that PyTorch's allocator counts on a GPU: `model_bytes` and `peak_bytes` as in a record's `Memory`.

    stages: the most bytes held in each stage of a call, the model included. "between" is what the pipeline does
        outside of its components.
    loading_bytes: the most held while the model is loaded and the recipe applied. Techniques convert what is on the GPU
        already, but for those that take weights from the host's memory (quantize, offload) layer by layer.
    other_gpus: GPUs besides this one that share a picture (parallel).
    other_gpu_bytes: at most held on each of them: the denoiser, and what a whole forward takes.
    beyond_allocator_bytes: what the process takes besides, of which no allocator knows.
    """

    model: str
    recipe: str
    height: int
    width: int
    batch: int
    text: Literal["prompts", "embeddings"]
    components: tuple[ComponentBytes, ...]
    model_bytes: int
    peak_bytes: int
    peak_stage: str
    stages: dict[str, int]
    loading_bytes: int
    other_gpus: int = 0
    other_gpu_bytes: int = 0
    beyond_allocator_bytes: int = BEYOND_ALLOCATOR

    @property
    def needed_bytes(self) -> int:
        """What must be free on the card, the context aside."""
        return max(self.peak_bytes, self.loading_bytes)


def predict(
    model: Weightless,
    recipe: Recipe,
    *,
    height: int | None = None,
    width: int | None = None,
    batch: int = 1,
    text: Literal["prompts", "embeddings"] = "prompts",
    call: dict[str, Any] | None = None,
    machine: Machine = ANY_GPU,
) -> Prediction:
    """The memory of one call.

    Args:
        height, width: pixels; None: the model's own.
        batch: pictures of one call.
        text: "embeddings" leaves the text encoders loaded, and out of the call.
        call: other defaults of the call, e.g. {"guidance_scale": 1.0}; the recipe's own win.
        machine: what techniques are told of the GPU.

    Raises:
        WorkloadError: a size that the pipeline cannot draw.
        Unsupported: a technique says so, or the pipeline's call looks at values, which are not there.
        NoEffect: as when the recipe is applied to the real model.
    """
    with quiet():
        return _predict(model, recipe, height, width, batch, text, call or {}, machine)


def _predict(
    model: Weightless,
    recipe: Recipe,
    height: int | None,
    width: int | None,
    batch: int,
    text: Literal["prompts", "embeddings"],
    call: dict[str, Any],
    machine: Machine,
) -> Prediction:
    pipe = model.build()
    given = {"height": height, "width": width}
    defaults = model.defaults | call | {k: v for k, v in given.items() if v is not None}
    _check_size(model.name, pipe, defaults)
    footprint = Footprint()
    footprint.hold(tensor for module in _networks(pipe).values() for tensor in _tensors(module))
    footprint.stage = "loading"
    largest = max(
        (p.numel() * p.element_size() for m in _networks(pipe).values() for p in m.parameters()), default=0
    )
    loaded = footprint.held
    footprint.start_peak()
    facts = ModelFacts(
        defaults=defaults,
        load_tiny_vae=model.build_tiny_vae,
        distillations=distillations(CATALOGUE.get(model.name)),
        has_weights=False,
    )
    target = Target(Placement(machine), pipe, facts)
    with footprint.following():
        session = Session(pipe, recipe, target)
    gc.collect()  # modules that were exchanged may lie in cycles
    draw_noise_in_fp32(pipe)
    loading = max(loaded, footprint.peak[0], footprint.held)
    model_bytes = footprint.held
    if recipe.loads_from_host and not model.name.startswith(SYNTHETIC):
        # One layer at a time is there as it was, beside what was made of those before it and what its own conversion
        # takes: some copies of it in fp32. (What dtype converts in the host's memory is none of that.)
        meanwhile = min(loading - loaded, _COPIES * largest)
        loading = model_bytes + largest + meanwhile
    components = tuple(_component(footprint, *item) for item in _networks(pipe).items())
    _without_values(pipe)
    _name_stages(pipe, footprint)
    _call(session, footprint, ["a red circle"] * batch, text)
    peak, stage = footprint.peak
    other_gpus = max((technique.num_gpus for technique in recipe), default=1) - 1
    copied = footprint.bytes_of(_tensors(component_of(pipe, "denoiser"))) if other_gpus else 0
    forward = footprint.peaks.get("denoiser", model_bytes) - model_bytes if other_gpus else 0
    return Prediction(
        model=model.name,
        recipe=recipe.text,
        height=int(defaults["height"]),
        width=int(defaults["width"]),
        batch=batch,
        text=text,
        components=components,
        model_bytes=model_bytes,
        peak_bytes=max(peak, model_bytes),
        peak_stage=stage,
        stages=dict(footprint.peaks),
        loading_bytes=loading,
        other_gpus=other_gpus,
        other_gpu_bytes=copied + forward,
    )


def predict_trial(trial: Trial, machine: Machine = ANY_GPU) -> Prediction:
    """The prediction to hold beside a trial's measured `Memory` on a GPU.

    Loads nothing and touches no device, but imports torch and takes seconds: not for the process that times.

    Raises:
        UnknownModel, Unsupported, NoEffect, WorkloadError: see `predict`.
    """
    workload = trial.workload
    return predict(
        find_weightless(trial.model.name),
        Recipe.from_spec(trial.recipe),
        height=workload.height,
        width=workload.width,
        batch=workload.batch,
        text=workload.text,
        call={
            "num_inference_steps": workload.num_inference_steps,
            "guidance_scale": workload.guidance_scale,
        },
        machine=machine,
    )


def _call(session: Session, footprint: Footprint, prompts: list[str], text: str) -> None:
    pipe = session.pipe
    try:
        with warnings.catch_warnings(), footprint.following():
            warnings.simplefilter("ignore", FutureWarning)  # diffusers' of diffusers
            said: dict[str, Any] = {"prompt": prompts}
            if text == "embeddings":
                said = encode(session, prompts)
            footprint.stage = "between"
            footprint.start_peak()
            session(**said, num_inference_steps=_STEPS, output_type="pt")
    except VivaceError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).strip().splitlines()
        raise Unsupported(
            f"the memory of {type(pipe).__name__}'s call cannot be predicted without running it: "
            f"{reason[0] if reason else error!r}"
        ) from error


def _without_values(pipe: Any) -> None:
    """Keep on the CPU, with its values, what the pipeline reads: the timesteps. Patched on the instances."""
    scheduler = pipe.scheduler
    set_timesteps = scheduler.set_timesteps

    @functools.wraps(set_timesteps)
    def set_on_cpu(*args: Any, **kwargs: Any) -> Any:
        return set_timesteps(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))

    scheduler.set_timesteps = set_on_cpu
    denoiser = component_of(pipe, "denoiser")
    denoiser.register_forward_pre_hook(_move, with_kwargs=True)
    if getattr(pipe, "safety_checker", None) is not None:
        pipe.safety_checker = None  # looks at the finished picture; its weights have been counted


def _move(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
    import torch
    from torch.utils._pytree import tree_map_only

    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    return moved[0], moved[1]


def _name_stages(pipe: Any, footprint: Footprint) -> None:
    """Tell the footprint what the call is doing; patched on the instances."""

    def named(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with footprint.in_stage(stage):
                return function(*args, **kwargs)

        return inside

    denoiser = component_of(pipe, "denoiser")
    denoiser.forward = named(denoiser.forward, "denoiser")
    if component_of(pipe, "vae") is not None:
        pipe.vae.decode = named(pipe.vae.decode, "vae")
    if hasattr(pipe, "encode_prompt"):
        pipe.encode_prompt = named(pipe.encode_prompt, "text encoders")


def _networks(pipe: Any) -> dict[str, Any]:
    import torch

    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _tensors(module: Any) -> list[Any]:
    return [*module.parameters(), *module.buffers()]


def _component(footprint: Footprint, name: str, module: Any) -> ComponentBytes:
    kinds: Counter[str] = Counter()
    for tensor in module.parameters():
        for part in plain_tensors(tensor):
            kind = str(part.dtype).removeprefix("torch.")
            kinds[_NAMES.get(kind, kind)] += part.numel() * part.element_size()
    return ComponentBytes(
        name=name,
        class_name=type(module).__name__,
        num_parameters=sum(parameter.numel() for parameter in module.parameters()),
        dtype=", ".join(kind for kind, _ in kinds.most_common()),
        num_bytes=footprint.bytes_of(_tensors(module)),
    )


def _check_size(name: str, pipe: Any, defaults: dict[str, Any]) -> None:
    # FluxPipeline packs 2x2 cells of the latents into one token.
    packed = 2 if hasattr(pipe, "_pack_latents") else 1
    multiple = int(getattr(pipe, "vae_scale_factor", 8)) * packed
    for side in ("height", "width"):
        size = defaults[side]
        if size < multiple or size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            raise WorkloadError(
                f"--{side} {size}: {name} draws multiples of {multiple} pixels; the nearest is {nearest}"
            )
