"""From a request to the workload of a model: its own values by default, checked."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vivace.errors import UsageError, WorkloadError, nearest
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.study import BatchSize, Study, WorkloadRequest
from vivace.foundation.spec.workload import MAX_PIXEL_STEPS, STRENGTHS, Task, Workload, steps_for, steps_run
from vivace.models.controlnet import find_controlnet
from vivace.models.find import LocatedModel, find_model, obtain
from vivace.models.prompts import NUM_DEFAULT, NUM_SEEDS, PROMPT_SETS
from vivace.models.sources import Files, SourceImages, check_files, image_arguments, source_images_of
from vivace.models.sources import PixelLimits as SizeLimits
from vivace.models.tasks import check_batch, check_installed, edits_too, own_task, pipeline_of, rounds_up
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import Call, generators_of, prompts_of
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session


def workload_of(located: LocatedModel, request: WorkloadRequest, batch: BatchSize = 1) -> Workload:
    """Return the workload for one model; unset fields take the model's own values."""
    return workload_and_images(located, request, batch)[0]


def workload_and_images(
    located: LocatedModel, request: WorkloadRequest, batch: BatchSize
) -> tuple[Workload, SourceImages | None]:
    """Return the workload for one model, and the images that it starts from."""
    prompts: Sequence[str] | None = request.prompts
    if request.prompt_set is not None:
        prompts = _prompts_from_set(request.prompt_set, prompts)
    if prompts is None:
        prompts = PROMPT_SETS[located.prompt_set][:NUM_DEFAULT]
    if not prompts:
        raise WorkloadError("the list of prompts is empty; give at least one prompt")
    num_seeds = request.num_seeds
    if num_seeds is None:
        num_seeds = 1 if request.prompt_set is None else NUM_SEEDS
    if num_seeds < 1:
        raise WorkloadError(f"--seeds {num_seeds}: give at least one seed per prompt")
    settings = request.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"})
    if located.entry is not None and located.entry.ignores_guidance and request.guidance_scale is not None:
        raise WorkloadError(_why_ignored(located))
    numbers = located.defaults | {name: value for name, value in settings.items() if value is not None}
    files = Files(request.images, request.masks, request.controls)
    task = _task_of(located, request.task, files, request.strength)
    pipeline_of(located.pipeline, task, located.model.name)
    check_batch(located.pipeline, batch, located.model.name, task)
    if not located.model.is_synthetic:
        check_installed(located.pipeline, located.model.name)
    if request.controlnet is not None and task != "control":
        raise WorkloadError(
            f"--controlnet: the task '{task}' takes none; give --control FILE, or leave it out"
        )
    images = None
    if task != "text":
        images = source_images_of(
            task, files, len(prompts), (request.height, request.width), _limits(located)
        )
        numbers |= {"height": images.height, "width": images.width}
    with InputErrors(WorkloadError):
        workload = Workload.model_validate(
            {
                "prompts": prompts,
                "seeds": tuple(range(request.seed, request.seed + num_seeds)),
                "batch": 1 if batch == "max" else batch,
                "text": request.text,
                "task": task,
                "controlnet": find_controlnet(request.controlnet) if task == "control" else None,
                "strength": request.strength or STRENGTHS.get(task),
                "sources": () if images is None else images.sources,
                **numbers,
            }
        )
    check_size(located, workload)
    check_strength(located, workload)
    return workload, images


def _task_of(located: LocatedModel, task: Task | None, files: Files, strength: float | None) -> Task:
    own = own_task(located.pipeline)
    if files.images and not files.masks and edits_too(located.pipeline):
        own = "edit"
    return check_files(task or (own if own != "text" else None), files, strength)


def check_strength(located: LocatedModel, workload: Workload) -> None:
    """Refuse a strength at which no step is run."""
    strength, steps = workload.strength, workload.num_inference_steps
    if strength is None or steps_run(steps, strength, rounds_up=rounds_up(located.pipeline)) > 0:
        return
    raise WorkloadError(
        f"--strength {strength:g} of {steps} steps runs none of them, so the image would not change; give at least "
        f"--strength {1 / steps:.2g}, or --num-inference-steps {steps_for(1, strength)}"
    )


def _why_ignored(located: LocatedModel) -> str:
    true_cfg = "true_cfg_scale" in located.call
    instead = (
        "its guidance is a second call, set by a recipe: guidance(1, true_cfg=4)"
        if true_cfg
        else "leave it out"
    )
    return f"--guidance-scale: {located.model.name} ignores it; {instead}"


def _prompts_from_set(name: str, prompts: Sequence[str] | None) -> tuple[str, ...]:
    if prompts is not None:
        raise UsageError("--prompts and --prompt-set exclude each other; give one of them")
    if name not in PROMPT_SETS:
        raise UsageError(
            f"no prompt set '{name[:80]}'{nearest(name, PROMPT_SETS)} (there are {', '.join(PROMPT_SETS)})"
        )
    return PROMPT_SETS[name]


def _limits(located: LocatedModel) -> SizeLimits:
    entry, own = located.entry, located.defaults
    return SizeLimits(
        multiple=entry.size_multiple if entry else 32,
        largest=entry.max_size if entry else 8192,
        height=own["height"],
        width=own["width"],
    )


def check_size(located: LocatedModel, workload: Workload) -> None:
    """Refuse sizes that the model cannot generate."""
    multiple = located.entry.size_multiple if located.entry else 8
    largest = located.entry.max_size if located.entry else 8192
    for flag, size in (("--height", workload.height), ("--width", workload.width)):
        nearest_size = min(max(round(size / multiple) * multiple, multiple), largest)
        if size != nearest_size:
            raise WorkloadError(
                f"{flag} {size}: {located.model.name} takes multiples of {multiple} up to {largest} pixels; "
                f"the nearest is {nearest_size}"
            )
    if workload.pixel_steps > MAX_PIXEL_STEPS:
        raise WorkloadError(
            f"{workload.num_images} images of {workload.width}x{workload.height} at "
            f"{workload.num_inference_steps} steps are {workload.pixel_steps:.1e} pixel steps, more than "
            f"{MAX_PIXEL_STEPS:.0e}; give fewer or smaller images"
        )


def default_threads(located: LocatedModel) -> int:
    """Return the number of CPU threads: the catalogue's; one for a small model; or the number of physical cores. It is
    fixed, and not found by timing, because the last bits of an image depend on it. Small models are as fast on one
    thread, and many times as fast where other programs are busy."""
    if located.entry is not None and located.entry.threads is not None:
        return located.entry.threads
    if located.is_small:
        return 1
    import psutil

    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


@dataclass(frozen=True)
class CheckedRequest:
    """A model, a recipe and the images to draw. Nothing is loaded yet."""

    located: LocatedModel
    recipe: Recipe
    workload: Workload
    sources: SourceImages | None = None

    def open(self, device: str) -> Session:
        """Load the model on torch's type of device, and apply the recipe."""
        workload = self.workload
        return open_session(
            self.located,
            self.recipe,
            device,
            workload.call,
            workload.prompts,
            workload.task,
            workload.controlnet,
        )

    def arguments(self, call: Call) -> dict[str, Any]:
        """Return the arguments of a call besides the session's defaults: prompts, generators and source images."""
        images = {} if self.sources is None else self.sources.by_sha
        indices = [index for index, _, _ in call]
        sources = image_arguments(self.located.pipeline, self.workload, indices, images)
        return prompts_of(call) | generators_of(call) | sources


def checked_request(model: str, recipe: str, **fields: Any) -> CheckedRequest:
    """Check a request for images as far as possible before a model is loaded, and return it."""
    request = Study.of(model, [recipe], quality=False, rivals=False, **fields).workload
    batch, *more = request.batches
    if more or batch == "max":
        raise UsageError("images are drawn at one batch size; give a number")
    resolved = resolve(recipe).pinned()
    located = find_model(model)
    workload, images = workload_and_images(located, request, batch)
    return CheckedRequest(obtain(located), resolved, workload, images)
