"""A study, the input of a benchmark: models, recipes, workload, timing settings and quality."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field

from vivace.errors import UsageError, WorkloadError, nearest
from vivace.foundation.spec.input_errors import InputErrors
from vivace.foundation.spec.settings import (
    CallSettings,
    DeviceName,
    NumSeeds,
    Option,
    Prompts,
    Scorer,
    Seed,
    Settings,
    SourceSettings,
    TaskName,
    Witness,
    one_of_many,
    read_by,
)
from vivace.foundation.spec.task_names import TextMode
from vivace.foundation.spec.timing import Timing

Function = TypeVar("Function", bound=Callable[..., Any])
BatchSize = int | Literal["max"]
PromptSet = Annotated[
    str | None,
    Option(
        "Built-in set of thirteen prompts at three seeds, instead of --prompts: tinyworld for the embedded models, "
        "edit for models that edit, real for others.",
        metavar="NAME",
    ),
]
TextForm = Annotated[
    TextMode,
    Option(
        "prompts: new prompts in each call; repeated: the same in every call, for prompt_cache; embeddings: encode the "
        "prompts before the timed call."
    ),
]
Models = Annotated[
    tuple[str, ...],
    Field(min_length=1),
    Option("Model name, synthetic:NAME, org/repo[@revision], folder or file; repeat for more.", "--model"),
]


def parse_batches(text: str) -> tuple[BatchSize, ...]:
    """Return the batch sizes of a list such as `1,2,max`, without duplicates."""
    try:
        return tuple(
            dict.fromkeys(
                "max" if part == "max" else int(one_of_many(part, 1, 4096))
                for part in (part.strip() for part in text.split(","))
            )
        )
    except ValueError:
        raise ValueError(
            f"{text!r} is not a list of whole numbers from 1 to 4096, or max, separated by commas"
        ) from None


class WorkloadRequest(SourceSettings, CallSettings):
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

    prompts: Prompts = None
    prompt_set: PromptSet = None
    seed: Seed = 0
    num_seeds: NumSeeds = None
    batches: Annotated[
        tuple[BatchSize, ...],
        Field(min_length=1),
        read_by(parse_batches),
        Option(
            "Images per call, or max for as many as fit the GPU; each value gets its own table.",
            "--batch",
            metavar="N[,N...]",
            default="1",
        ),
    ] = (1,)
    text: TextForm = "prompts"
    task: TaskName = None


class QualityRequest(Settings):
    """Whether and how images are compared with the baseline's, after all timing.

    `scorer` None means no scores. `noise_floor`: draw some of the baseline's images again with a change that should not
    matter.
    """

    enabled: Annotated[
        bool, Option("After all timing, compare the images with the baseline's.", "--quality")
    ] = True
    scorer: Scorer = "auto"
    witness: Witness = None
    lpips: Annotated[bool, Option("Also compute LPIPS; needs AlexNet's weights on this machine.")] = False
    noise_floor: bool = True


class Study(Settings):
    """Recipes to compare on models. Each model and batch is one comparison; the first recipe is its baseline.

    Attributes:
        models: what `vivace.load` takes. No quality is computed for `synthetic:NAME`, whose weights are random.
        recipes: e.g. ("baseline", "tiny_vae+steps(20)"); a repeated recipe is compared with itself.
    """

    models: Models
    recipes: Annotated[
        tuple[str, ...],
        Option("A recipe; repeat for more. The first is the baseline.", "--recipe", metavar="R"),
    ]
    workload: WorkloadRequest = WorkloadRequest()
    timing: Timing = Timing()
    quality: QualityRequest = QualityRequest()
    device: DeviceName = "auto"
    rivals: Annotated[
        bool, Option("For each step cache, also measure the same recipe with fewer steps instead.")
    ] = True

    @classmethod
    def of(cls, models: str | Sequence[str], recipes: Sequence[str], **keywords: Any) -> Study:
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
            quality = QualityRequest(enabled=quality, **pop_fields(QualityRequest, fields))
        if "batch" in fields:
            fields["batches"] = (fields.pop("batch"),)
        workload = fields.pop("workload", None)
        if workload is None:
            with InputErrors(WorkloadError):
                workload = WorkloadRequest(**pop_fields(WorkloadRequest, fields))
        if unknown := [name for name in fields if name not in cls.model_fields]:
            names = [*cls.model_fields, *WorkloadRequest.model_fields, *QualityRequest.model_fields, "batch"]
            raise UsageError(f"a study has no '{unknown[0]}'{nearest(unknown[0], names)}")
        models = (models,) if isinstance(models, str) else tuple(models)
        with InputErrors():
            return cls(models=models, recipes=tuple(recipes), workload=workload, quality=quality, **fields)


STUDY_ONLY = ("models", "recipes", "quality", "rivals")
"""Fields of a study that one recipe's profile, or a comparison of two, has not."""


def takes_fields(*kinds: type, without: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Return a decorator that shows the fields of classes in a function's signature, in the place of **keywords."""

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        first = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        fields = {
            each.name: each.replace(
                kind=each.KEYWORD_ONLY,
                annotation=each.empty
                if issubclass(kind, Settings)
                else each.annotation,  # which checks itself
            )
            for kind in kinds
            for each in inspect.signature(kind).parameters.values()
            if each.name not in {*signature.parameters, *without}
        }
        vars(function)["__signature__"] = signature.replace(parameters=[*first, *fields.values()])
        return function

    return show


def pop_fields(kind: type, keywords: dict[str, Any]) -> dict[str, Any]:
    """Remove and return the keywords that are fields of a class."""
    names = inspect.signature(kind).parameters
    return {name: keywords.pop(name) for name in list(keywords) if name in names}
