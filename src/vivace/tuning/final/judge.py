"""The judges of a search's images, and the search space without a judge."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vivace.benchmark import QualityRequest
from vivace.benchmark.comparison import check_quality_options
from vivace.benchmark.store import Invocation
from vivace.benchmark.studies import USUAL_SCORER, find_judges
from vivace.errors import UsageError
from vivace.foundation.spec.limits import DEFAULT_LIMITS, Limits
from vivace.measure.witness_limits import calibrated_limits, limit_notes
from vivace.models.find import LocatedModel
from vivace.models.scorers import LocatedScorer
from vivace.techniques import TECHNIQUES
from vivace.tuning.search.results import Result, Rung


@dataclass(frozen=True)
class QualityJudge:
    """How images are judged.

    Attributes:
        quality: the setting of the studies.
        limits: of the gate; without a CLIP model they have none on its margin.
        scorer: the CLIP model, with the second witness; None for none.
        compares: whether images are compared with the baseline's.
        reason: why there is no CLIP model; "" if there is one, or if images show nothing anyway.
        usual: the CLIP model that would judge this model's images.
        limits_from: sentences about the sources of the judging models' limits.
    """

    quality: QualityRequest = field(default_factory=QualityRequest)
    limits: Limits = DEFAULT_LIMITS
    scorer: LocatedScorer | None = None
    compares: bool = True
    reason: str = ""
    usual: str = USUAL_SCORER
    limits_from: tuple[str, ...] = ()

    @property
    def same_picture_only(self) -> bool:
        """Whether only techniques that keep the image are searched, for lack of a judge."""
        return self.scorer is None

    def quality_request(self, enabled: bool, *, noise_floor: bool = False) -> QualityRequest:
        """Return the quality settings of the search's studies."""
        return self.quality.model_copy(update={"enabled": enabled, "noise_floor": noise_floor})

    def is_of(self, run: Invocation) -> bool:
        """Whether a stored run was judged as this search judges."""
        return not self.compares or run.scorer == (None if self.scorer is None else self.scorer.id)

    def adjust(self, result: Result | None, run: Invocation) -> Result | None:
        """Return a stored result without the verdict of another judge."""
        if result is None or result.rung is Rung.SCREENED or self.is_of(run):
            return result
        return replace(result, rung=Rung.SCREENED, slack=None, gate=None, reason=None)

    def notes(self, command: str) -> list[str]:
        """Describe the source of the limits, or what a judge would add where there is none, and the command for it."""
        if not self.reason:
            return list(self.limits_from)
        number = sum(not kind.declared.same_picture for kind in TECHNIQUES.values())
        return [
            f"{self.reason}, so only techniques that keep the image are searched; their images are compared with the "
            "baseline's",
            f"a CLIP model would also judge the {number} techniques that change the image, such as fewer steps, step "
            f"caches and distilled weights, which often gain most: {_with_scorer(command, self.usual)}",
        ]


def judge_of(
    located: LocatedModel,
    quality: QualityRequest,
    limits: Limits,
    *,
    shows_nothing: bool = False,
) -> QualityJudge:
    """Return the judges of images, which may show nothing though the weights are trained. Errors: see `find_judges`."""
    is_synthetic = located.model.is_synthetic
    flags = {"--scorer": quality.scorer not in (None, "auto"), "--witness": quality.witness is not None}
    check_quality_options(located, *(flag for flag, is_given in flags.items() if is_given))
    if is_synthetic and limits != DEFAULT_LIMITS:
        check_quality_options(located, "--min-quality")
    if is_synthetic or shows_nothing:
        return QualityJudge(quality, limits, compares=False)
    scorer = find_judges(located, quality)
    if scorer is not None:
        model = f"{located.model.name}@{located.model.revision}"
        used = calibrated_limits(limits, model, scorer.id)
        return QualityJudge(quality, used, scorer, limits_from=tuple(limit_notes(model, scorer.id, limits)))
    if isinstance(limits.clip, float):
        raise UsageError(
            f"--min-quality clip={limits.clip:g}: {_why_none(quality)}; add --scorer NAME, e.g. {USUAL_SCORER}, or "
            "leave the limit out"
        )
    own = None if located.entry is None else located.entry.scorer
    without = limits.model_copy(update={"clip": None})
    return QualityJudge(quality, without, reason=_why_none(quality), usual=own or USUAL_SCORER)


def _why_none(quality: QualityRequest) -> str:
    if quality.scorer is None:
        return "--scorer none leaves nothing that judges other images"
    return f"no CLIP model that judges images is on this machine ({USUAL_SCORER} is the usual one)"


def _with_scorer(command: str, scorer: str) -> str:
    words = command.replace(" --scorer none", "").replace(" --scorer=none", "")
    return f"{words} --scorer {scorer}"
