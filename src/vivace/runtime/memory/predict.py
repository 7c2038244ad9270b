"""Predict the GPU memory of a model with a recipe before anything is loaded: the recipe is applied to a pipeline on the
meta device, and its call runs while `footprint` counts the bytes that would be allocated."""

from __future__ import annotations

import functools
import gc
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from vivace.architectures import CATALOGUE, family_of
from vivace.architectures.entry import few_steps_of
from vivace.errors import Unsupported, VivaceError, WorkloadError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.ceilings import Work
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import STRENGTHS, Task
from vivace.foundation.untrusted.files import reading, reason
from vivace.machinery.technique import (
    DENOISERS,
    Machine,
    ModelFacts,
    Placement,
    Request,
    Target,
    component_of,
)
from vivace.measure.accelerator import plain_tensors
from vivace.models.find import SYNTHETIC
from vivace.models.quiet import quiet
from vivace.models.sources import example_images
from vivace.models.tasks import check_batch, for_task, own_task, pipeline_of, task_of
from vivace.recipes.recipe import Recipe
from vivace.runtime.calls import encode, follow_denoiser
from vivace.runtime.memory.footprint import Footprint
from vivace.runtime.memory.operation_counts import Operations, skips_work, watch, work_of
from vivace.runtime.memory.weightless import Weightless, find_weightless, run_without_values
from vivace.runtime.noise import draw_noise_in_fp32
from vivace.runtime.pipelines import stored_effects, with_stored
from vivace.runtime.session import Session

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

BEYOND_ALLOCATOR = 600_000_000
"""Bytes of the CUDA context with the kernels of PyTorch, cuBLAS and cuDNN. An assumption, not a measurement.

PyTorch's allocator does not count it.
"""
ANY_GPU = Machine(device="cuda", device_name="a GPU", capability=None, compiler=None)
_COPIES = 8
"""Temporary memory of quantising a layer, in multiples of its weight in half precision. An assumption."""
_LARGEST_LAYER = 0.03
"""Bytes of a denoiser's largest layer in half precision, as a share of all."""
_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8"}


class ComponentBytes(Spec):
    """One network of the pipeline, with the recipe applied."""

    name: str
    class_name: str
    num_parameters: int
    dtype: str
    num_bytes: int


class Prediction(Spec):
    """Predicted bytes on a GPU, as PyTorch's allocator counts them.

    Attributes:
        model_bytes, peak_bytes: as in a record's `Memory`.
        stages: peak bytes in each stage of a call, the model included. "between" is the pipeline's work outside of its
            components.
        loading_bytes: peak bytes while the model is loaded and the recipe applied. Most techniques convert weights that
            are on the GPU; quantize and offload copy them from host memory layer by layer.
        other_gpu_bytes: upper bound for each of them: the denoiser and a whole forward.
        beyond_allocator_bytes: what the process takes on the GPU outside of the allocator.
        work_is_bound: whether it computes less than that: a step cache's hits are counted as computed.
    """

    model: str
    recipe: str
    height: int
    width: int
    batch: int
    text: Literal["prompts", "embeddings"]
    task: Task = "text"
    components: tuple[ComponentBytes, ...]
    model_bytes: int
    peak_bytes: int
    peak_stage: str
    stages: dict[str, int]
    loading_bytes: int
    other_gpus: int = 0
    other_gpu_bytes: int = 0
    beyond_allocator_bytes: int = BEYOND_ALLOCATOR
    num_inference_steps: int = 0
    work: Work = Work()
    work_is_bound: bool = False

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the GPU, without `beyond_allocator_bytes`."""
        return max(self.peak_bytes, self.loading_bytes)


def predict(
    model: Weightless,
    recipe: Recipe,
    *,
    height: int | None = None,
    width: int | None = None,
    batch: int = 1,
    text: Literal["prompts", "embeddings"] = "prompts",
    task: Task | None = None,
    call: dict[str, Any] | None = None,
    machine: Machine = ANY_GPU,
) -> Prediction:
    """Return the predicted memory of one call.

    Args:
        height, width: pixels; None for the model's own.
        batch: images per call.
        text: "embeddings" keeps the text encoders loaded but leaves them out of the call.
        task: what the call starts from; None for what the model is published for.
        call: other defaults of the call, e.g. {"guidance_scale": 1.0}; the recipe's take precedence.
        machine: the GPU, as techniques see it.
    """
    unexplained = model.located is None or model.located.model.source == "embedded"
    about = nullcontext() if unexplained else reading(model.name, problem="cannot be planned")
    if model.gguf_bytes is not None and recipe.techniques:
        raise Unsupported(
            f"{model.name}: `vivace plan` counts a GGUF file as it is, without a recipe; plan {model.gguf_of} with "
            "quantize(q8_0, backend=gguf), or q5_0 or q4_0 for files of 5 or 4 bits, and the rest of the recipe"
        )
    size = {name: side for name, side in (("height", height), ("width", width)) if side is not None}
    with quiet(), about:
        predicted = _predict(model, recipe, (call or {}) | size, batch, text, task, machine)
    return predicted if model.gguf_bytes is None else with_gguf(predicted, model.gguf_bytes)


def with_gguf(plain: Prediction, num_bytes: int) -> Prediction:
    """Return a prediction whose denoiser stays as a GGUF file stores it; each layer is dequantised in its call."""
    denoiser = next(part for part in plain.components if part.name in DENOISERS)
    less = denoiser.num_bytes - num_bytes
    layer = round(_LARGEST_LAYER * denoiser.num_bytes)
    stages = {name: peak - less + layer * (name == "denoiser") for name, peak in plain.stages.items()}
    stored = denoiser.model_copy(update={"num_bytes": num_bytes, "dtype": "GGUF"})
    stage = max(stages, key=lambda name: stages[name], default=plain.peak_stage)
    return plain.model_copy(
        update={
            "components": tuple(stored if part is denoiser else part for part in plain.components),
            "model_bytes": plain.model_bytes - less,
            "peak_bytes": max([plain.model_bytes - less, *stages.values()]),
            "peak_stage": stage,
            "stages": stages,
            "loading_bytes": plain.loading_bytes - less,
        }
    )


def _predict(
    model: Weightless,
    recipe: Recipe,
    call: dict[str, Any],
    batch: int,
    text: Literal["prompts", "embeddings"],
    task: Task | None,
    machine: Machine,
) -> Prediction:
    stored = {} if model.located is None else stored_effects(model.located)
    recipe = recipe if model.located is None else with_stored(model.located, recipe)
    pipe = built_for(model, task, machine.device)
    chosen = task or task_of(type(pipe).__name__)
    check_batch(type(pipe).__name__, batch, model.name, chosen)
    if chosen in STRENGTHS:
        call = {"strength": STRENGTHS[chosen]} | call
    defaults = model.defaults | call
    _check_size(model.name, pipe, defaults)
    footprint = Footprint()
    # Nothing here may keep the networks alive: those that a recipe replaces are freed.
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
        distillations=few_steps_of(CATALOGUE.get(model.name.removeprefix(SYNTHETIC))),
        has_weights=False,
        stored=stored,
    )
    target = Target(Placement(machine), pipe, facts, Request(batch=batch))
    gc.freeze()  # so that the collection below looks only at what the recipe made, not at every imported module
    try:
        with footprint.following():
            session = Session(pipe, recipe, target)
        gc.collect()  # replaced modules may be in reference cycles
    finally:
        gc.unfreeze()
    follow_denoiser(pipe, "meta")
    draw_noise_in_fp32(pipe)
    loading = max(loaded, footprint.peak[0], footprint.held)
    model_bytes = footprint.held
    if recipe.loads_from_host and not model.name.startswith(SYNTHETIC):
        # At any time the GPU holds the converted layers, one layer as it was, and the temporary memory of its
        # conversion: some copies in fp32. (`dtype` converts in host memory, which does not count.)
        temporary = min(loading - loaded, _COPIES * largest)
        loading = model_bytes + largest + temporary
    components = tuple(_component(footprint, *item) for item in _networks(pipe).items())
    run_without_values(pipe, int(defaults["height"]), int(defaults["width"]))
    _track_stages(pipe, footprint)
    footprint.operations = Operations()
    watch(pipe, footprint.operations)
    _run_call(session, footprint, ["a red circle"] * batch, text, chosen, defaults)
    peak, stage = footprint.peak
    other_gpus = max((technique.facts.num_gpus for technique in recipe), default=1) - 1
    copied = footprint.bytes_of(_tensors(component_of(pipe, "denoiser"))) if other_gpus else 0
    forward = footprint.peaks.get("denoiser", model_bytes) - model_bytes if other_gpus else 0
    return Prediction(
        model=model.name,
        recipe=recipe.text,
        height=int(defaults["height"]),
        width=int(defaults["width"]),
        batch=batch,
        text=text,
        task=chosen,
        components=components,
        model_bytes=model_bytes,
        peak_bytes=max(peak, model_bytes),
        peak_stage=stage,
        stages=dict(footprint.peaks),
        loading_bytes=loading,
        other_gpus=other_gpus,
        other_gpu_bytes=copied + forward,
        num_inference_steps=int(session.defaults["num_inference_steps"]),
        work=work_of(pipe, footprint.operations, recipe.techniques),
        work_is_bound=skips_work(recipe.techniques),
    )


def predict_trial(trial: Trial, machine: Machine = ANY_GPU) -> Prediction:
    """Return the prediction to compare with a trial's measured `Memory` on a GPU. It loads nothing and touches no
    device, but imports torch and takes seconds, so call it in another process than the one that times."""
    workload = trial.workload
    return predict(
        find_weightless(trial.model.name),
        Recipe.from_spec(trial.recipe),
        height=workload.height,
        width=workload.width,
        batch=workload.batch,
        text="embeddings" if workload.text == "embeddings" else "prompts",
        task=workload.task,
        call={name: value for name, value in workload.call.items() if name not in ("height", "width")},
        machine=machine,
    )


def built_for(model: Weightless, task: Task | None, device: str) -> Any:
    """Return the model's pipeline for a task, without weights, in the dtype of its baseline on a device."""
    import torch

    pipe = model.build()
    if device == "cpu":
        for part in pipe.components.values():
            if isinstance(part, torch.nn.Module):
                torch.nn.Module.to(part, torch.float32)
    published = type(pipe).__name__
    kind = pipeline_of(published, task or own_task(published), model.name)
    return pipe if kind == published else for_task(pipe, kind)


def images_for(pipe: DiffusionPipeline, task: Task, defaults: dict[str, Any], batch: int) -> dict[str, Any]:
    """Return images for a call of the pipeline, of the size in its defaults; empty for text-to-image."""
    images = example_images(type(pipe).__name__, defaults, task)
    return images if batch == 1 else {name: [image] * batch for name, image in images.items()}


def _run_call(
    session: Session,
    footprint: Footprint,
    prompts: list[str],
    text: str,
    task: Task,
    defaults: dict[str, Any],
) -> None:
    pipe = session.pipe
    try:
        with warnings.catch_warnings(), footprint.following():
            warnings.simplefilter("ignore", FutureWarning)  # diffusers warns about its own code
            arguments = encode(session, prompts, task) if text == "embeddings" else {"prompt": prompts}
            arguments |= images_for(pipe, task, defaults, len(prompts))
            footprint.stage = "between"
            footprint.start_peak()
            session(**arguments, output_type="pt")
    except VivaceError:
        raise
    except (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError) as error:
        raise Unsupported(
            f"the memory of a call of {type(pipe).__name__} cannot be predicted without running it: {reason(error)}"
        ) from error


def _track_stages(pipe: DiffusionPipeline, footprint: Footprint) -> None:
    """Patch the components, as instances, so that the footprint knows the stage of the call."""

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
        pipe.vae.encode = named(pipe.vae.encode, "vae encoder")
    if hasattr(pipe, "encode_prompt"):
        pipe.encode_prompt = named(pipe.encode_prompt, "text encoders")


def _networks(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    import torch

    return {name: part for name, part in pipe.components.items() if isinstance(part, torch.nn.Module)}


def _tensors(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _component(footprint: Footprint, name: str, module: torch.nn.Module) -> ComponentBytes:
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


def _check_size(name: str, pipe: DiffusionPipeline, defaults: dict[str, Any]) -> None:
    # FluxPipeline packs 2x2 latents into one token.
    denoiser = component_of(pipe, "denoiser")
    family = family_of(denoiser)
    if family is not None:
        packed = family.cells(denoiser) * family.side_in_tokens
    else:
        packed = 2 if hasattr(pipe, "_pack_latents") else 1
    multiple = int(getattr(pipe, "vae_scale_factor", 8)) * packed
    for side in ("height", "width"):
        size = defaults[side]
        if size < multiple or size % multiple:
            nearest = max(multiple, round(size / multiple) * multiple)
            raise WorkloadError(
                f"--{side} {size}: {name} takes multiples of {multiple} pixels; the nearest is {nearest}"
            )
