"""A study, the input of a benchmark: models, recipes, workload, timing settings and quality."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack

from pydantic import BaseModel, Field, field_validator

from vivace.errors import UsageError, WorkloadError, nearest
from vivace.spec.base import Spec
from vivace.spec.input_errors import InputErrors
from vivace.spec.timing import Timing
from vivace.spec.workload import Task, TextMode

if TYPE_CHECKING:
    from vivace.spec.keywords import StudyKeywords

Batch = int | Literal["max"]


class WorkloadRequest(Spec):
    """A workload as requested. Fields that are None take the model's own values.

    Attributes:
        prompts: one image for each prompt and seed.
        prompt_set: a set of thirteen prompts instead of `prompts`: "tinyworld" or "real".
        seed: the first seed of each prompt; the others follow: seed + 1, ...
        num_seeds: seeds per prompt; None for one, or three with a prompt set.
        height, width: pixels.
        batches: images per call; each batch is a separate comparison. "max" is the largest batch that fits the GPU with
            the baseline in a fresh process. Times are per image.
        text: "embeddings" leaves the text encoders out of the timed call; "repeated" draws the first call's
            prompts in all timed calls, which matters to `prompt_cache`; "prompts" are new ones in each call.
        task: what is generated from: "text", "image", "inpaint", "control" or "edit" (see `Workload`); None: what the
            images say, "text" without any.
        images, masks, controls: files of the images to start from: one for all prompts, or one for each. Without
            files, a task takes images that ship with vivace.
        strength: how much of an image is noise at the start; None for the task's default.
        controlnet: of the task "control": a folder in diffusers' format; None for random weights.
    """

    prompts: tuple[str, ...] | None = None
    prompt_set: str | None = None
    seed: int = Field(default=0, ge=0)
    num_seeds: int | None = Field(default=None, le=100_000)
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    batches: tuple[Batch, ...] = Field(default=(1,), min_length=1)
    text: TextMode = "prompts"
    task: Task | None = None
    images: tuple[str, ...] = ()
    masks: tuple[str, ...] = ()
    controls: tuple[str, ...] = ()
    strength: float | None = Field(default=None, gt=0, le=1)
    controlnet: str | None = None

    @field_validator("prompts", "images", "masks", "controls", mode="before")
    @classmethod
    def _no_single_text(cls, prompts: Any) -> Any:
        return (prompts,) if isinstance(prompts, str) else prompts


class QualityRequest(Spec):
    """Whether and how images are compared with the baseline's, after all timing.

    Attributes:
        scorer: the CLIP model: "auto" (the model's own scorer, or the default one if it is on this machine), None for
            no scores, or what `vivace.models.scorers.find_scorer` takes.
        witness: a second model that judges whether image and prompt belong together: what
            `vivace.models.scorers.find_witness` takes.
        lpips: also compute LPIPS; its weights must be on this machine (see `vivace.measure.lpips`).
        noise_floor: draw some of the baseline's images again with a change that should not matter.
    """

    enabled: bool = True
    scorer: str | None = "auto"
    witness: str | None = None
    lpips: bool = False
    noise_floor: bool = True


class Study(Spec):
    """Recipes to compare on models. Each model and batch is one comparison; the first recipe is its baseline.

    Attributes:
        models: what `vivace.load` takes. No quality is computed for `synthetic:NAME`, whose weights are random.
        recipes: e.g. ("baseline", "tiny_vae+steps(20)"); a recipe that is given twice is compared with itself.
        device: "auto", "cpu" or "cuda".
        rivals: for each step cache also measure the same recipe with fewer plain steps instead.
    """

    models: tuple[str, ...] = Field(min_length=1)
    recipes: tuple[str, ...]
    workload: WorkloadRequest = WorkloadRequest()
    timing: Timing = Timing()
    quality: QualityRequest = QualityRequest()
    device: str = "auto"
    rivals: bool = True

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


def _validated_workload(part: type[WorkloadRequest], given: dict[str, Any]) -> WorkloadRequest:
    with InputErrors(WorkloadError):
        return part(**given)
