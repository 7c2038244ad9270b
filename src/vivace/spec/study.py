"""A study: what is compared, on what workload, and how it is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from vivace.errors import UsageError, WorkloadError, nearest
from vivace.spec.base import Spec
from vivace.spec.timing import Timing

Batch = int | Literal["max"]


class AskedWorkload(Spec):
    """A workload as it is asked for. What is None is the model's own.

    Attributes:
        prompts: one picture each, for each seed.
        prompt_set: instead of prompts, a set of thirteen: "tinyworld" or "real".
        seed, num_seeds: each prompt is drawn at seed, seed + 1, ...; None: one seed, three for a prompt set.
        height, width: pixels.
        batches: pictures drawn in one call, "max" for as many as fit the GPU with the baseline in a fresh process;
            every batch is a comparison of its own. Times are per picture.
        text: "embeddings" leaves the text encoders out of the measured call.
    """

    prompts: tuple[str, ...] | None = None
    prompt_set: str | None = None
    seed: int = Field(default=0, ge=0)
    num_seeds: int | None = None
    height: int | None = None
    width: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    batches: tuple[Batch, ...] = Field(default=(1,), min_length=1)
    text: Literal["prompts", "embeddings"] = "prompts"

    @field_validator("prompts", mode="before")
    @classmethod
    def _no_single_text(cls, prompts: Any) -> Any:
        return (prompts,) if isinstance(prompts, str) else prompts


class AskedQuality(Spec):
    """Whether and how pictures are compared with the baseline's, after all timing.

    Attributes:
        scorer: the CLIP model: "auto" (the model's own, or the usual one if it is on this machine), None for none, or
            what `vivace.models.scorers.find_scorer` takes.
        lpips: also compute LPIPS; its weights must be there (see `vivace.measure.lpips`).
    """

    enabled: bool = True
    scorer: str | None = "auto"
    lpips: bool = False


class Study(Spec):
    """Recipes compared on models. Each model and batch is a comparison, with the first recipe as its baseline.

    Attributes:
        models: what `vivace.load` takes. Of `synthetic:NAME` no quality is computed: its pictures show nothing.
        recipes: e.g. ("baseline", "tiny_vae+steps(20)"); recipes that mean the same are measured once.
        device: "auto", "cpu" or "cuda".
        rivals: beside each step cache also measure the same recipe with fewer plain steps instead.
    """

    models: tuple[str, ...] = Field(min_length=1)
    recipes: tuple[str, ...]
    workload: AskedWorkload = AskedWorkload()
    timing: Timing = Timing()
    quality: AskedQuality = AskedQuality()
    device: str = "auto"
    rivals: bool = True

    @classmethod
    def of(cls, models: str | Sequence[str], recipes: Sequence[str], **asked: Any) -> Study:
        """A study of flat keywords: the fields of Study, AskedWorkload and AskedQuality; `quality` may be a bool and
        `batch` one batch.

        Raises:
            UsageError, WorkloadError: a name or value that no study has.
        """
        quality = asked.pop("quality", True)
        if isinstance(quality, bool):
            quality = AskedQuality(enabled=quality, **_taken(AskedQuality, asked))
        if "batch" in asked:
            asked["batches"] = (asked.pop("batch"),)
        workload = asked.pop("workload", None)
        if workload is None:
            workload = _made(AskedWorkload, _taken(AskedWorkload, asked))
        if unknown := [name for name in asked if name not in cls.model_fields]:
            known = [*cls.model_fields, *AskedWorkload.model_fields, *AskedQuality.model_fields, "batch"]
            raise UsageError(f"a study has no '{unknown[0]}'{nearest(unknown[0], known)}")
        models = (models,) if isinstance(models, str) else tuple(models)
        return cls(models=models, recipes=tuple(recipes), workload=workload, quality=quality, **asked)


def _taken(part: type[BaseModel], asked: dict[str, Any]) -> dict[str, Any]:
    """Take out the keywords that belong to a part."""
    return {name: asked.pop(name) for name in list(asked) if name in part.model_fields}


def _made(part: type[AskedWorkload], given: dict[str, Any]) -> AskedWorkload:
    try:
        return part(**given)
    except ValidationError as error:
        problem = error.errors()[0]
        flag = "--" + str(problem["loc"][0]).replace("_", "-")
        raise WorkloadError(f"{flag} {problem.get('input')!r}: {problem['msg']}") from None
