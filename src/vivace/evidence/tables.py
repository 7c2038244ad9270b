"""The types of evidence: a table is one source's comparison of recipes on one model and device."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.workload import Task
from vivace.foundation.stats import Gate, Interval, Verdict

Kind = Literal["own", "committed", "community", "published", "predicted"]
"""Whose records: the user's store, those that ship with vivace, those that owners of cards contributed, or numbers that
others published; or a prediction."""


class JudgedQuality(Spec):
    """The judgement of a recipe's images.

    Attributes:
        clip, match: the bounds that the gate compared with its limits (see `vivace.report.fidelity.Kept`).
        is_lost: whether images are broken or show something else, which fails at any limits.
        of: the embedded model whose images these are; "" for the model's own.
    """

    gate: Gate | None = None
    reason: str = ""
    clip: Interval | None = None
    match: Interval | None = None
    witness: Interval | None = None
    ssim: Interval | None = None
    psnr_db: Interval | None = None
    num_prompts: int = 0
    is_lost: bool = False
    of: str = ""


class CallSpread(Spec):
    """How much single calls of a recipe differ, in seconds per image.

    Attributes:
        p99_s: None below 200 timed calls.
    """

    p50_s: float
    min_s: float
    max_s: float | None = None
    p99_s: float | None = None
    num_calls: int | None = None


class CallParts(Spec):
    """The parts of a call on a GPU, to estimate a call of another number of steps.

    Attributes:
        rest_s: seconds outside of the denoising steps; of the whole call where the recipe sets the number of steps,
            which takes as long whatever the workload's is.
    """

    steps: int
    rest_s: float
    step_s: float
    model_bytes: int


class EvidenceRow(Spec):
    """One recipe of a table, with its figures. Unknown figures are None.

    Attributes:
        steps_s: those of them that the denoising steps take; None if unknown, or if the time was scaled.
        gain: the speed-up over the table's baseline, paired by round where the source measured so.
        is_counted: the gain is computed from the denoiser's operations, not timed.
        verdict: on `gain`, as vivace's tables give it; None for published numbers and for the baseline.
        peak_bytes: peak memory: of the GPU's allocator, or the process's resident set on a CPU.
        num_rounds: processes that were timed; None if the source does not say.
        timed_steps: the number of steps that was timed, where the time was scaled from fewer to the table's.
        calls_s: the timed calls, where they are too few for an interval.
        predicted_from: the GPU whose record the time is projected from, or "its operations"; None if it was measured.
        parts: the parts of the timed calls, for single images of random weights on a GPU.
    """

    recipe: str
    label: str = ""
    num_techniques: int
    same_picture: bool
    outcome: str = "measured"
    reason: str = ""
    latency: Interval | None = None
    steps_s: float | None = None
    gain: Interval | None = None
    is_counted: bool = False
    verdict: Verdict | None = None
    peak_bytes: int | None = None
    first_call_s: float | None = None
    batch: int = 1
    spread: CallSpread | None = None
    num_rounds: int | None = None
    timed_steps: int | None = None
    calls_s: tuple[float, ...] = ()
    predicted_from: str | None = None
    measured_s: float | None = None
    parts: CallParts | None = None
    judged: JudgedQuality | None = None
    note: str = ""

    @property
    def is_known(self) -> bool:
        return self.latency is not None or self.gain is not None

    @property
    def is_estimated(self) -> bool:
        """Whether its memory is estimated; else a record has it, of whatever GPU."""
        return self.predicted_from is not None and self.measured_s is None


class EvidenceTable(Spec):
    """Recipes that one source compared on one model and device.

    Attributes:
        of: the model that was measured, where `model` is a file or a folder of its architecture; "" else.
        random_weights: times and memory are the architecture's, and images have no content.
        rows: the baseline first, if it was measured.
        at: when the newest round started, UTC; "" if unknown.
        profiled: its times are of calls under a profiler, compilation included.
        note: a caveat about its comparisons.
    """

    kind: Kind
    place: str
    model: str
    of: str = ""
    random_weights: bool = False
    device: str = "cuda"
    gpu: str
    height: int | None = None
    width: int | None = None
    steps: int | None = None
    batch: int = 1
    task: Task = "text"
    baseline: str
    rows: tuple[EvidenceRow, ...] = Field(min_length=1)
    at: str = ""
    profiled: bool = False
    note: str = ""

    @property
    def compared(self) -> list[EvidenceRow]:
        return [row for row in self.rows if row.is_known]
