"""The settings of a search: one frozen object, from the command line or from the keywords of `vivace.tune`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, SkipValidation

from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.run_settings import RunSettings
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.arguments import parse_bytes, parse_seconds
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits, MinQuality
from vivace.foundation.spec.settings import (
    DEFAULT_STORE,
    Batch,
    CallSettings,
    DeviceName,
    NumGpus,
    Option,
    PricePerHour,
    Prompts,
    Scorer,
    Seed,
    Settings,
    SourceSettings,
    Store,
    TaskName,
    Texts,
    Threads,
    Timeout,
    Witness,
)
from vivace.foundation.spec.study import QualityRequest, WorkloadRequest
from vivace.foundation.spec.task_names import TextMode
from vivace.foundation.spec.timing import Timing
from vivace.models.controlnet import RANDOM
from vivace.models.find import LocatedModel
from vivace.techniques import TECHNIQUES
from vivace.tuning.final.judge import QualityJudge, judge_of
from vivace.tuning.search.objective import Goal, Objective
from vivace.tuning.search.results import Watcher

DEFAULT_MINUTES = 8.0
_BATCHES: dict[Goal, int] = {"latency": 1, "memory": 1, "throughput": 4, "cost": 4}


def _amount(parse: Callable[[str], float], unit: str) -> BeforeValidator:
    """Return the rule of an amount that Python also gives as a number, of this unit."""

    def read(value: Any) -> Any:
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            return value
        return float(parse(value if isinstance(value, str) else f"{value:f}{unit}"))

    return BeforeValidator(read)


class ImageRequest(SourceSettings, CallSettings):
    """The images of a search. Fields that are None take the model's own values.

    Attributes:
        prompts: instead of the model's set of thirteen.
        batch: images per call.
        text: "prompts", or "repeated" if all timed calls have the same.
        task, images, masks, controls, strength, controlnet: the source images, as in `WorkloadRequest`.
    """

    prompts: Prompts = None
    batch: Annotated[Batch, Option("Images per call; default: as the goal says.", default="")] = 1
    text: TextMode = "prompts"
    task: TaskName = None

    def of(
        self, prompts: Sequence[str], steps: int | None = None, seeds: int = 1, seed: int = 0
    ) -> WorkloadRequest:
        """Return the workload of the first prompts, each with its own image if there is one for each."""
        files = {
            name: paths if len(paths) == 1 else paths[: len(prompts)]
            for name in ("images", "masks", "controls")
            if (paths := getattr(self, name))
        }
        return self.part(
            WorkloadRequest,
            prompts=tuple(prompts),
            seed=seed,
            num_seeds=seeds,
            num_inference_steps=steps or self.num_inference_steps,
            batches=(self.batch,),
            **files,
        )

    @property
    def has_random_controlnet(self) -> bool:
        """Whether images follow a ControlNet with random weights, so that they show nothing."""
        is_control = self.task == "control" or (self.task is None and bool(self.controls))
        return is_control and self.controlnet in (None, RANDOM)

    @property
    def options(self) -> tuple[tuple[str, str | int | float], ...]:
        """Return values that are not the model's own, as options of `vivace generate`: name and value."""
        names = ("num_inference_steps", "guidance_scale", "height", "width", "strength", "controlnet")
        values = [(name, value) for name in names if (value := getattr(self, name)) is not None]
        files = [
            (name[:-1], paths[0])
            for name in ("images", "masks", "controls")
            if (paths := getattr(self, name))
        ]
        return (*values, *files)


class SearchSettings(Settings):
    """The settings of a search, for the command and for `vivace.tune`.

    Attributes:
        goal: see `Objective`.
        max_memory_bytes, max_first_call_s: limits on the peak memory and on the first call, in bytes and seconds, or
            with units: "12GB", "2min".
        limits: of the quality gate; None for the usual ones.
        scorer, witness: the models that judge images, as for `vivace.bench`. Without a CLIP model only techniques that
            keep the image are searched.
        minutes: the search stops in time for its final; default: 8, or no limit if `trials` is given.
        trials: recipes to measure, stored ones of the same search included.
        start: a recipe to begin with.
        keep, without: techniques that every recipe has, or none.
        request: size, steps and prompts.
        gpus: screen and judge on this many GPUs of this host; the final runs on one.
        price_per_hour: of this machine, in any currency: the answer says what images cost.
        seed: of the search's own randomness.
        watcher, progress: observers of the search.
        launcher: a running launcher; None to start one.
        command: the command line to store with the runs.
    """

    goal: Annotated[
        Goal,
        Option(
            "latency: time of one image; throughput and cost: time per image of four; memory: the peak.",
        ),
    ] = "latency"
    max_memory_bytes: Annotated[
        float | None,
        _amount(parse_bytes, "B"),
        Option("Limit of the peak memory, e.g. 12GB.", "--max-memory", metavar="SIZE"),
    ] = None
    limits: MinQuality = None
    scorer: Scorer = "auto"
    witness: Witness = None
    max_first_call_s: Annotated[
        float | None,
        _amount(parse_seconds, "s"),
        Option(
            "Limit of the first call, compilation included, e.g. 60s.", "--max-first-call", metavar="TIME"
        ),
    ] = None
    minutes: Annotated[
        float | None,
        Field(gt=0, le=10_000, strict=True),
        Option("Time for the whole search; default: 8, or no limit with --trials."),
    ] = None
    trials: Annotated[
        int | None,
        Field(ge=1, le=10_000, strict=True),
        Option("Number of recipes to measure; those already in the store count."),
    ] = None
    gpus: Annotated[
        NumGpus,
        Option("Search on this many GPUs of this host; the final runs on one.", metavar="N|all"),
    ] = None
    start: Annotated[str | None, Option("Recipe to begin with.", metavar="RECIPE")] = None
    keep: Annotated[
        Texts, Option("Technique that every recipe has; repeat for more.", metavar="TECHNIQUE")
    ] = ()
    without: Annotated[
        Texts, Option("Technique that no recipe has; repeat for more.", metavar="TECHNIQUE")
    ] = ()
    request: ImageRequest = ImageRequest()
    timeout_s: Timeout = 600.0
    price_per_hour: PricePerHour = None
    device: DeviceName = "auto"
    threads: Threads = None
    store: Store = Path(DEFAULT_STORE)
    seed: Annotated[Seed, Option("Seed of the search's choices.")] = 0
    watcher: Annotated[Watcher | None, SkipValidation] = None
    progress: Annotated[Progress | None, SkipValidation] = None
    launcher: Launcher | None = None
    command: str | None = None

    @property
    def run(self) -> RunSettings:
        return self.part(RunSettings, progress=self.progress or SILENT)

    @property
    def timing(self) -> Timing:
        return self.part(Timing)

    @property
    def allowed_minutes(self) -> float | None:
        """Minutes that the search may take: the usual number unless something else limits it."""
        return DEFAULT_MINUTES if self.minutes is None and self.trials is None else self.minutes

    @property
    def quality_limits(self) -> Limits:
        return self.limits or DEFAULT_LIMITS

    def judge(self, located: LocatedModel) -> QualityJudge:
        """Return the judges of the model's images; for the errors see `judge_of`."""
        return judge_of(
            located,
            QualityRequest(scorer=self.scorer, witness=self.witness),
            self.quality_limits,
            shows_nothing=self.request.has_random_controlnet,
        )

    def objective(self, judge: QualityJudge) -> Objective:
        """Return the goal with the limits that this judge can decide."""
        return Objective(
            self.goal,
            self.max_memory_bytes,
            self.max_first_call_s,
            judge.limits,
            tuple(self.keep),
            tuple(self.without),
            same_picture_only=judge.same_picture_only,
        )

    def images(self, objective: Objective) -> ImageRequest:
        """Return the images for the goal: four a call for throughput, one prompt where a kept technique repeats it."""
        request = self.request
        if request.batch == 1:
            request = request.model_copy(update={"batch": _BATCHES[self.goal]})
        if any(TECHNIQUES[name].declared.needs_repeated_prompts for name in objective.kept_names):
            request = request.model_copy(update={"text": "repeated"})
        return request
