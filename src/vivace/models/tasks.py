"""The pipelines of diffusers for the tasks of a model's weights.

Read without torch and diffusers; a test compares the table with the installed diffusers. The plain weights of a model
do image-to-image and inpainting: their pipelines differ in how they begin, and in what they do between two steps.
Weights that were trained to edit have a pipeline of their own.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, WorkloadError
from vivace.foundation.spec.workload import TASKS, Task
from vivace.models.controlnet import RANDOM, controlnet_for

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

PIPELINES: dict[str, dict[Task, str]] = {
    "StableDiffusionPipeline": {
        "image": "StableDiffusionImg2ImgPipeline",
        "inpaint": "StableDiffusionInpaintPipeline",
        "control": "StableDiffusionControlNetPipeline",
    },
    "StableDiffusionXLPipeline": {
        "image": "StableDiffusionXLImg2ImgPipeline",
        "inpaint": "StableDiffusionXLInpaintPipeline",
        "control": "StableDiffusionXLControlNetPipeline",
    },
    "StableDiffusion3Pipeline": {
        "image": "StableDiffusion3Img2ImgPipeline",
        "inpaint": "StableDiffusion3InpaintPipeline",
    },
    "FluxPipeline": {
        "image": "FluxImg2ImgPipeline",
        "inpaint": "FluxInpaintPipeline",
        "control": "FluxControlNetPipeline",
    },
    "QwenImagePipeline": {"image": "QwenImageImg2ImgPipeline", "inpaint": "QwenImageInpaintPipeline"},
    "ZImagePipeline": {"image": "ZImageImg2ImgPipeline", "inpaint": "ZImageInpaintPipeline"},
    "FluxKontextPipeline": {"edit": "FluxKontextPipeline"},
    "QwenImageEditPipeline": {"edit": "QwenImageEditPipeline"},
    "QwenImageEditPlusPipeline": {"edit": "QwenImageEditPlusPipeline"},
}
"""Pipelines of a model's other tasks, by the pipeline that it is published for."""
EDITS = tuple(name for name, of in PIPELINES.items() if "edit" in of)
"""Pipelines whose weights are trained to edit an image; they have no text-to-image of their own here."""
_ONE_A_CALL = ("QwenImageEditPlusPipeline",)
_NEED_TORCHVISION = ("QwenImageEditPipeline", "QwenImageEditPlusPipeline", "QwenImage21Pipeline")
"""Their processor also loads one for videos, which needs torchvision. With random weights they have another."""
_CUTS_OFF = ("StableDiffusionPipeline", "StableDiffusionXLPipeline")


@dataclass(frozen=True)
class InputNames:
    """Names of the images in a task's pipeline; "" for an image that it does not take."""

    image: str = ""
    mask: str = ""
    control: str = ""


def own_task(pipeline: str) -> Task:
    """Return the published task of a model: "edit" for weights that are trained to edit, else "text"."""
    return "edit" if pipeline in EDITS else "text"


def pipeline_of(pipeline: str, task: Task, model: str) -> str:
    """Return the class that does a task with the weights of a model that is published for `pipeline`.

    Args:
        model: its name, for the message.

    Raises:
        Unsupported: there is none.
    """
    own = PIPELINES.get(pipeline, {})
    if task == "text" and pipeline not in EDITS:
        return pipeline
    if task in own:
        return own[task]
    possible = [each for each in TASKS if each in own or (each == "text" and pipeline not in EDITS)]
    reason = (
        "its weights are not trained to edit images"
        if task == "edit"
        else f"diffusers has no pipeline for the task '{task}' with its weights"
    )
    raise Unsupported(
        f"{model} is a {pipeline}: {reason}; the tasks that vivace knows of it: {', '.join(possible)}"
    )


def check_batch(pipeline: str, batch: int | str, model: str) -> None:
    """Refuse a batch that a pipeline does not take.

    Args:
        batch: images per call, or "max".
        model: its name, for the message.

    Raises:
        WorkloadError: it edits one image a call.
    """
    if pipeline in _ONE_A_CALL and batch != 1:
        raise WorkloadError(
            f"--batch {batch}: {model} is a {pipeline}, which takes one prompt a call; leave --batch out"
        )


def check_installed(pipeline: str, model: str) -> None:
    """Refuse a pipeline with weights of its own that lacks a library, before anything is downloaded.

    Raises:
        Unsupported: naming the library.
    """
    if pipeline in _NEED_TORCHVISION and importlib.util.find_spec("torchvision") is None:
        raise Unsupported(
            f"{model}: the processor that shows images to its text encoder needs torchvision, which is not "
            "installed; run `pip install torchvision`"
        )


def rounds_up(pipeline: str) -> bool:
    """Return whether a share of a step counts as one: `strength` of the steps is rounded up, or down."""
    return pipeline not in _CUTS_OFF


def task_of(kind: str) -> Task:
    """Return the task of a pipeline class with a model's weights."""
    return next((task for own in PIPELINES.values() for task, name in own.items() if name == kind), "text")


def names_of(pipeline: str, task: Task) -> InputNames:
    """Return the names of the images in the call of a task's pipeline.

    Args:
        pipeline: that class, or the one that the model is published for.
    """
    if task == "control":
        return InputNames(control="control_image" if "Flux" in pipeline else "image")
    return InputNames(image="image", mask="mask_image" if task == "inpaint" else "")


def for_task(pipe: DiffusionPipeline, kind: str, controlnet: str | None = None) -> Any:
    """Return a pipeline of another class with the same components, which the old one shares and must not use again.

    Args:
        kind: the name of a pipeline class of diffusers.
        controlnet: for a pipeline that takes one, as `find_controlnet` returns it; None for random weights.
    """
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
