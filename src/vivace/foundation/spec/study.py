"""A study, the input of a benchmark: models, recipes, workload, timing settings and quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import BaseModel, Field, field_validator

from vivace.errors import UsageError, WorkloadError, nearest
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.task_names import DEVICES
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.workload import MAX_SIDE, Task, TextMode

if TYPE_CHECKING:
    from vivace.foundation.spec.keywords import StudyKeywords

Batch = int | Literal["max"]


class WorkloadRequest(Spec):
    """A workload as requested. Fields that are None take the model's own values.

    Attributes:
        prompts: one image for each prompt and seed.
        batches: images per call; each batch is a separate comparison. "max" is the largest batch that fits the GPU with
            the baseline in a fresh process. Times are per image.
        task: what is generated from: "text", "image", "inpaint", "control" or "edit" (see `Workload`); None: decided by
            the images, "text" without any.
        images, masks, controls: files of the images to start from: one for all prompts, or one for each. Without
            files, a task takes images that ship with vivace.
    """

    prompts: tuple[str, ...] | None = None
    prompt_set: str | None = Field(
        default=None,
        description="Built-in set of thirteen prompts at three seeds, instead of --prompts: tinyworld for the embedded "
        "models, edit for models that edit, real for others.",
    )
    seed: int = Field(default=0, ge=0, description="First seed.")
    num_seeds: int | None = Field(
        default=None, le=100_000, description="Seeds per prompt; default: 1, or 3 with --prompt-set."
    )
    height: int | None = Field(
        default=None, gt=0, le=MAX_SIDE, description="Pixels; default: the model's own."
    )
    width: int | None = Field(
        default=None, gt=0, le=MAX_SIDE, description="Pixels; default: the model's own."
    )
    num_inference_steps: int | None = Field(
        default=None, ge=1, le=1000, description="Denoising steps; default: the model's own."
    )
    guidance_scale: float | None = Field(
        default=None, ge=0, le=100, description="Guidance scale; default: the model's own."
    )
    batches: tuple[Batch, ...] = Field(
        default=(1,),
        min_length=1,
        description="Images per call, or max for as many as fit the GPU; each value gets its own table.",
    )
    text: TextMode = Field(
        default="prompts",
        description="prompts: new prompts in each call; repeated: the same in every call, for prompt_cache; "
        "embeddings: encode the prompts before the timed call.",
    )
    task: Task | None = None
    images: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    strength: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="How much --image may change, from 0 (not at all) to 1 (completely): the share of the steps that "
        "are run. Default: 0.8, inpainting 0.9.",
    )
    controlnet: str | None = Field(
        default=None,
        description="Folder of a ControlNet in diffusers' format; default: random weights, to measure time and memory "
        "only.",
    )

    @field_validator("prompts", "images", "masks", "controls", mode="before")
    @classmethod
    def _no_single_text(cls, prompts: Any) -> Any:
        return (prompts,) if isinstance(prompts, str) else prompts


class QualityRequest(Spec):
    """Whether and how images are compared with the baseline's, after all timing.

    `scorer` None means no scores.
    """

    enabled: bool = Field(
        default=True, description="After all timing, compare the images with the baseline's."
    )
    scorer: str | None = Field(
        default="auto",
        description="CLIP model that judges quality: embedded, a folder, org/name on the hub, or none; auto: embedded "
        "for embedded models; else openai/clip-vit-large-patch14 if it is on this machine.",
    )
    witness: str | None = Field(
        default=None,
        description="Second model that judges quality: a BLIP for image-text matching, a folder or org/name on the "
        "hub.",
    )
    lpips: bool = Field(
        default=False, description="Also compute LPIPS; needs AlexNet's weights on this machine."
    )
    noise_floor: bool = Field(
        default=True,
        description="Draw some of the baseline's images again with a change that should not matter.",
    )


class Study(Spec):
    """Recipes to compare on models. Each model and batch is one comparison; the first recipe is its baseline.

    Attributes:
        models: what `vivace.load` takes. No quality is computed for `synthetic:NAME`, whose weights are random.
        recipes: e.g. ("baseline", "tiny_vae+steps(20)"); a repeated recipe is compared with itself.
    """

    models: tuple[str, ...] = Field(min_length=1)
    recipes: tuple[str, ...]
    workload: WorkloadRequest = WorkloadRequest()
    timing: Timing = Timing()
    quality: QualityRequest = QualityRequest()
    device: str = Field(
        default="auto",
        description="Where to run; auto: a GPU if there is one. cuda: NVIDIA or AMD, xpu: Intel, mps: Apple.",
    )

    @field_validator("device")
    @classmethod
    def _is_a_device(cls, device: str) -> str:
        if device not in DEVICES:
            raise ValueError(f"must be one of {', '.join(DEVICES)}")
        return device

    rivals: bool = Field(
        default=True,
        description="For each step cache, also measure the same recipe with fewer steps instead.",
    )

    @classmethod
    def of(
        cls, models: str | Sequence[str], recipes: Sequence[str], **keywords: Unpack[StudyKeywords]
    ) -> Study:
        """Return a study from flat keywords.

        Args:
            models: one or several.
            keywords: fields of Study, WorkloadRequest and QualityRequest. `quality` may be a bool; `batch` is a single
                batch.

        Raises:
            UsageError, WorkloadError: a name or value that a study cannot have.
        """
        fields: dict[str, Any] = dict(keywords)
        quality = fields.pop("quality", True)
        if isinstance(quality, bool):
            quality = QualityRequest(enabled=quality, **_pop_fields(QualityRequest, fields))
        if "batch" in fields:
            fields["batches"] = (fields.pop("batch"),)
        workload = fields.pop("workload", None)
        if workload is None:
            workload = _validated_workload(WorkloadRequest, _pop_fields(WorkloadRequest, fields))
        if unknown := [name for name in fields if name not in cls.model_fields]:
            names = [*cls.model_fields, *WorkloadRequest.model_fields, *QualityRequest.model_fields, "batch"]
            raise UsageError(f"a study has no '{unknown[0]}'{nearest(unknown[0], names)}")
        models = (models,) if isinstance(models, str) else tuple(models)
        with InputErrors():
            return cls(models=models, recipes=tuple(recipes), workload=workload, quality=quality, **fields)


def _pop_fields(part: type[BaseModel], fields: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the keywords that are fields of `part`."""
    return {name: fields.pop(name) for name in list(fields) if name in part.model_fields}


def _validated_workload(part: type[WorkloadRequest], fields: dict[str, Any]) -> WorkloadRequest:
    with InputErrors(WorkloadError):
        return part(**fields)
