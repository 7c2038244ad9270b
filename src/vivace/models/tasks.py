"""The pipelines of diffusers for the tasks of a model's weights, as its family says; read without torch and
diffusers."""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.architectures import pipeline_doing, pipeline_named
from vivace.architectures.calls import call_defaults
from vivace.errors import Unsupported, WorkloadError
from vivace.foundation.spec.workload import TASKS, Task
from vivace.models.controlnet import RANDOM, controlnet_for

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


@dataclass(frozen=True)
class InputNames:
    """Names of the images in a task's pipeline; "" for an image that it does not take."""

    image: str = ""
    mask: str = ""
    control: str = ""


def own_task(pipeline: str) -> Task:
    """Return the published task of a model: "edit" for weights that are trained to edit alone, else "text"."""
    known = pipeline_named(pipeline)
    return "edit" if known is not None and known.edits else "text"


def edits_too(pipeline: str) -> bool:
    """Return whether a pipeline that draws from prompts edits where its call has source images."""
    known = pipeline_named(pipeline)
    return known is not None and known.images_are_optional


def pipeline_of(pipeline: str, task: Task, model: str) -> str:
    """Return the class that does a task with the weights of a model that is published for `pipeline`."""
    known = pipeline_named(pipeline)
    classes = dict(known.tasks) if known is not None else {}
    if known is None or not known.edits:
        classes["text"] = pipeline
    if task in classes:
        return classes[task]
    possible = [each for each in TASKS if each in classes]
    reason = (
        "its weights are not trained to edit images"
        if task == "edit"
        else f"diffusers has no pipeline for the task '{task}' with its weights"
    )
    raise Unsupported(
        f"{model} is a {pipeline}: {reason}; the tasks that vivace knows of it: {', '.join(possible)}"
    )


def check_batch(pipeline: str, batch: int | str, model: str, task: Task) -> None:
    """Refuse a batch that a pipeline does not take: several images are all sources of each prompt, where it takes
    images besides."""
    known = pipeline_named(pipeline)
    is_alone = known is not None and (known.one_a_call or (task == "edit" and known.images_are_optional))
    if is_alone and batch != 1:
        with_images = " with source images" if task == "edit" else ""
        raise WorkloadError(
            f"--batch {batch}: {model} is a {pipeline}, which takes one prompt a call{with_images}; leave --batch out"
        )


def check_installed(pipeline: str, model: str) -> None:
    """Refuse a pipeline with weights of its own that lacks a library, before anything is downloaded."""
    known = pipeline_named(pipeline)
    for package in () if known is None else known.packages:
        if importlib.util.find_spec(package) is None:
            raise Unsupported(
                f"{model}: the processor that shows images to its text encoder needs {package}, which is not "
                f"installed; run `pip install {package}`"
            )


def rounds_up(pipeline: str) -> bool:
    """Return whether a share of a step counts as one: `strength` of the steps is rounded up, or down."""
    known = pipeline_named(pipeline)
    return known is None or not known.rounds_steps_down


def task_of(kind: str) -> Task:
    """Return the task of a pipeline class with a model's weights."""
    known = pipeline_doing(kind)
    if known is None or known.images_are_optional:
        return "text"
    return next((task for task, name in known.tasks.items() if name == kind), "text")


def names_of(pipeline: str, task: Task) -> InputNames:
    """Return the names of the images in the call of a task's pipeline."""
    if task == "control":
        known = pipeline_doing(pipeline)
        takes = (
            call_defaults(known.tasks["control"]) if known is not None and "control" in known.tasks else None
        )
        return InputNames(control="control_image" if "control_image" in (takes or ()) else "image")
    return InputNames(image="image", mask="mask_image" if task == "inpaint" else "")


def for_task(pipe: DiffusionPipeline, kind: str, controlnet: str | None = None) -> Any:
    """Return a pipeline of another class with the same components, which the old one shares and must not use again."""
    import diffusers

    if type(pipe).__name__ == kind:
        return pipe
    chosen: Any = getattr(diffusers, kind)
    accepted = inspect.signature(chosen.__init__).parameters
    arguments: dict[str, Any] = {name: part for name, part in pipe.components.items() if name in accepted}
    arguments |= {name: value for name, value in _settings(pipe).items() if name in accepted}
    if "controlnet" in accepted:
        arguments["controlnet"] = controlnet_for(pipe, controlnet or RANDOM)
    made = chosen(**arguments)
    if getattr(made, "watermark", None) is not None:
        made.watermark = None  # as `load_pipeline` does
    made.set_progress_bar_config(disable=True)
    return made


def _settings(pipe: DiffusionPipeline) -> Mapping[str, Any]:
    """Return the arguments of a pipeline's constructor that are not components, e.g. requires_safety_checker."""
    parts = set(pipe.components)
    settings = {
        name: value
        for name, value in pipe.config.items()
        if name not in parts and not name.startswith("_") and not isinstance(value, list | tuple)
    }
    return {"requires_safety_checker": False} | settings | {"add_watermarker": False}
