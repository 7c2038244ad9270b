"""What a recommendation is asked for, and the answer: a recipe with its evidence, the runner-up, and how sure it is."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from vivace.evidence.recommendation.predicted import ChipLimit
from vivace.evidence.tables import CallSpread, JudgedQuality, Kind
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Interval
from vivace.runtime.memory.fit import RESERVE_BYTES

Goal = Literal["latency", "memory", "throughput", "cost", "stability"]
"""Memory is the peak; throughput and cost are over all batch sizes; stability is how little single calls differ."""
Sure = Literal["high", "medium", "low", "none"]
Reason = Literal["memory", "memory unknown", "quality", "unproven", "hardware", "not measured", "no figure"]


class Criteria(Spec):
    """The requirements that a recommended recipe must meet, and the goal.

    Attributes:
        model: a name of the catalogue, `synthetic:NAME`, or whatever the records call it.
        gpu: None for this machine's GPU, or any if it has none.
        num_gpus: how many of them were named.
        max_bytes: a hard limit on peak memory.
        limits: quality that a recipe's images must be proven to keep; None: they must not have failed the gate's usual
            limits.
        price_per_hour: of the GPU, in any currency.
        same_picture: only recipes that keep the image.
        task: what the images start from.
    """

    model: str = Field(min_length=1)
    gpu: str | None = None
    num_gpus: int = Field(default=1, ge=1)
    max_bytes: float | None = Field(default=None, gt=0)
    limits: Limits | None = None
    goal: Goal = "latency"
    price_per_hour: float | None = Field(default=None, gt=0)
    same_picture: bool = False
    task: Task = "text"


def _titled(text: str, label: str) -> str:
    is_named = label and not text.startswith(label.partition(" #")[0])
    return f"{text} ({label})" if is_named else text


class RecipeFigures(Spec):
    """The figures of a recipe in the table of the answer; None if unknown.

    Attributes:
        same_picture: whether it keeps the image of the table's baseline.
        gain: the speed-up over the table's baseline.
        score: the goal's figure relative to the table's baseline; more is better.
        latency: seconds per image on the requested GPU, at the basis' number of steps: predicted where
            `predicted_from` is not None; None where that time is unknown.
        predicted_from: the GPU whose record the time is projected from, or "its operations"; None if it was measured.
        measured_s: seconds per image on that GPU.
        cost_per_1000: of a thousand images, in the price's currency; only for the requested GPU.
    """

    recipe: str
    label: str = ""
    batch: int = 1
    num_techniques: int = 0
    same_picture: bool = True
    score: Interval
    gain: Interval | None = None
    is_counted: bool = False
    latency: Interval | None = None
    peak_bytes: int | None = None
    first_call_s: float | None = None
    spread: CallSpread | None = None
    num_rounds: int | None = None
    timed_steps: int | None = None
    predicted_from: str | None = None
    measured_s: float | None = None
    cost_per_1000: float | None = None
    judged: JudgedQuality | None = None
    note: str = ""

    @property
    def is_estimated(self) -> bool:
        """Whether its memory is estimated; else a record has it, of whatever GPU."""
        return self.predicted_from is not None and self.measured_s is None

    @property
    def title(self) -> str:
        title = self.recipe if self.batch == 1 else f"{self.recipe}, batch {self.batch}"
        return _titled(title, self.label)


class Basis(Spec):
    """The table that the answer rests on.

    Attributes:
        of: the model that was measured, where `model` is a file or a folder of its architecture; "" else.
        near: "same" GPU as requested, "generation", or "other"; "any" if no GPU was requested and this machine has
            none.
    """

    kind: Kind
    place: str
    model: str
    of: str = ""
    gpu: str
    near: Literal["same", "generation", "other", "any"]
    random_weights: bool
    baseline: str
    height: int | None
    width: int | None
    steps: int | None
    batch: int
    device: str = "cuda"
    at: str = ""
    note: str = ""

    @property
    def is_direct(self) -> bool:
        """Whether it was measured on the requested GPU, or no GPU was requested."""
        return self.near in ("same", "any")


class LeftOut(Spec):
    """A recipe that was not ranked, and the reason."""

    recipe: str
    kind: Reason
    why: str
    label: str = ""
    score: float | None = None

    @property
    def title(self) -> str:
        return _titled(self.recipe, self.label)


class Elsewhere(Spec):
    """Another source's best recipe among those that are allowed.

    Attributes:
        gains_more: whether it gained more over the published model, by a record of vivace's on the same generation of
            GPUs, than the chosen recipe.
    """

    basis: Basis
    best: RecipeFigures
    gains_more: bool = False


class OtherModel(Spec):
    """Another model of the family that is faster in the same source, on the same GPU."""

    model: str
    recipe: str
    latency_s: float
    instead_of_s: float
    ratio: float
    steps: int | None
    place: str
    gpu: str


class Recommendation(Spec):
    """The best recipe by the existing records. `print` it for eight lines.

    Attributes:
        model: as it was found, without "synthetic:".
        alike: the catalogue's model whose architecture a file or a folder has; "" for models of the catalogue.
        gpu: the requested one, or this machine's; None without one.
        recipe: None if no record supports any.
        chosen: its figures.
        baseline: the figures of the table's baseline.
        over_published: for the goal latency, its speed-up over the model as published, where another record than its
            own knows that.
        quality: a sentence about its images.
        is_tie: whether it is tied with the runner-up.
        why: why the runner-up lost.
        ties: all recipes that are tied with the best.
        ranking: every recipe that was allowed, the best first.
        safe: the best that keeps the image, of evidence as good, where the chosen one's quality is not proven.
        left_out: the recipes that were not ranked, with the reasons.
        elsewhere: the advice of other sources.
        other_model: of the family, with fewer steps.
        limit: the shortest time of the model's steps on the GPU; None if unknown.
        card_bytes: the memory of the GPU, which a recipe has to fit with a reserve; None if unknown.
        published_bytes: what the model as published needs; None if unknown.
        missing: the missing evidence.
        disturbed: recipes of the user's own records on this GPU that claim no gain, since other programs disturbed all
            their times; the baseline that they are compared with stands before them. () if there are none.
        sure: the confidence in this answer; `doubts` explain why it is not higher.
        next: command lines to run next.
    """

    criteria: Criteria
    model: str
    alike: str = ""
    gpu: str | None
    recipe: str | None = None
    basis: Basis | None = None
    chosen: RecipeFigures | None = None
    baseline: RecipeFigures | None = None
    over_published: float | None = None
    quality: str = ""
    runner_up: RecipeFigures | None = None
    is_tie: bool = False
    why: str = ""
    ties: tuple[str, ...] = ()
    ranking: tuple[RecipeFigures, ...] = ()
    safe: Elsewhere | None = None
    left_out: tuple[LeftOut, ...] = ()
    elsewhere: tuple[Elsewhere, ...] = ()
    other_model: OtherModel | None = None
    limit: ChipLimit | None = None
    card_bytes: int | None = None
    published_bytes: int | None = None
    missing: tuple[str, ...] = ()
    disturbed: tuple[str, ...] = ()
    sure: Sure = "none"
    doubts: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def most_bytes(self) -> float | None:
        """The most bytes that a recipe may take; None if unknown."""
        card = None if self.card_bytes is None else self.card_bytes - RESERVE_BYTES
        return min((most for most in (self.criteria.max_bytes, card) if most is not None), default=None)

    def figures(self, recipe: str) -> RecipeFigures | None:
        """Return the figures of a recipe in canonical form in the answer's source; None if it was not ranked."""
        return next((figures for figures in self.ranking if figures.recipe == recipe), None)

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain data, as `vivace recommend --format json` prints it."""
        return self.model_dump(mode="json")

    def _repr_html_(self) -> str:
        from vivace.answers.page import in_notebook

        return in_notebook(self.explain())

    def explain(self) -> str:
        """Return the whole answer as text: what it rests on, the alternatives, what is missing, what to measure."""
        return self._text(details=True)

    def __str__(self) -> str:
        return self._text(details=False)

    def _text(self, *, details: bool) -> str:
        from vivace.answers.terminal import text_of
        from vivace.evidence.recommendation.answer import answer_of

        return text_of(answer_of(self), details=details).rstrip()
