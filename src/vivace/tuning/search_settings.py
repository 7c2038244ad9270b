"""The settings of a search: one frozen object, from the command line or from the keywords of `vivace.tune`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from vivace.benchmark.run_settings import DEFAULT_SETTINGS, RunSettings
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.foundation.spec.study import QualityRequest
from vivace.foundation.spec.timing import Timing
from vivace.models.find import LocatedModel
from vivace.techniques import TECHNIQUES
from vivace.tuning.image_request import ImageRequest
from vivace.tuning.judge import QualityJudge, judge_of
from vivace.tuning.objective import Goal, Objective

DEFAULT_MINUTES = 8.0
_BATCHES: dict[Goal, int] = {"latency": 1, "memory": 1, "throughput": 4, "cost": 4}
_USUAL_REQUEST = ImageRequest()
_USUAL_TIMING = Timing()


@dataclass(frozen=True)
class SearchSettings:
    """The settings of a search; `vivace.tune` explains them.

    Attributes:
        limits: of the quality gate; None for the usual ones.
        timing: the time limit of a round, and the threads.
        run: the store, places and what else runs share.
    """

    goal: Goal = "latency"
    max_memory_bytes: float | None = None
    max_first_call_s: float | None = None
    limits: Limits | None = None
    scorer: str | None = "auto"
    witness: str | None = None
    minutes: float | None = None
    trials: int | None = None
    start: str | None = None
    keep: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    trust_quality_of: str | None = None
    request: ImageRequest = _USUAL_REQUEST
    device: str = "auto"
    timing: Timing = _USUAL_TIMING
    price_per_hour: float | None = None
    seed: int = 0
    run: RunSettings = DEFAULT_SETTINGS

    @property
    def allowed_minutes(self) -> float | None:
        """Minutes that the search may take: the usual number unless something else limits it."""
        return DEFAULT_MINUTES if self.minutes is None and self.trials is None else self.minutes

    @property
    def quality_limits(self) -> Limits:
        """The limits of the quality gate."""
        return self.limits or DEFAULT_LIMITS

    def judge(self, located: LocatedModel) -> QualityJudge:
        """Return the judges of the model's images; for the errors see `judge_of`."""
        return judge_of(
            located,
            QualityRequest(scorer=self.scorer, witness=self.witness),
            self.quality_limits,
            trusts=self.trust_quality_of is not None,
            shows_nothing=self.request.has_random_controlnet,
        )

    def objective(self, judge: QualityJudge) -> Objective:
        """Return the goal with the limits that this judge can decide."""
        return Objective(
            self.goal,
            self.max_memory_bytes,
            self.max_first_call_s,
            judge.limits,
            self.keep,
            self.without,
            same_picture_only=judge.same_picture_only,
        )

    def images(self, objective: Objective) -> ImageRequest:
        """Return the images for the goal: batches of four for throughput, repeated prompts where a kept technique needs
        them."""
        request = self.request
        if request.batch == 1:
            request = replace(request, batch=_BATCHES[self.goal])
        if any(TECHNIQUES[name].declared.needs_repeated_prompts for name in objective.kept_names):
            request = replace(request, text="repeated")
        return request
