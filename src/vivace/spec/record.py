"""What was measured. Raw samples only: every statistic is computed when a Record is read."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.spec.trial import Trial


class Outcome(StrEnum):
    """How a round ended. All are values, all are stored, each failure with a reason in words."""

    MEASURED = "measured"
    UNSUPPORTED = "unsupported"
    NO_EFFECT = "no_effect"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    FAILED_QUALITY = "failed_quality"
    """Never stored: a measured row reads so when its pictures fail the limits in force."""

    @property
    def is_final(self) -> bool:
        """A rerun does not try again: the same trial would end the same way."""
        return self in {Outcome.MEASURED, Outcome.UNSUPPORTED, Outcome.NO_EFFECT, Outcome.OUT_OF_MEMORY}


class Sample(Spec):
    """One timed call of the whole pipeline, seconds. `stages_s` sums to `total_s` (keys: text, steps, vae, other).

    The call draws the workload's `batch` of pictures; `picture` is the first of them.
    """

    picture: int
    total_s: float
    cpu_s: float
    stages_s: dict[str, float]
    num_denoiser_calls: int


class Memory(Spec):
    """Bytes. On CUDA the allocator's figures; on CPU the process's resident set (libraries included).

    `before_bytes` is what the process held before the model was loaded.
    """

    kind: str
    before_bytes: int
    model_bytes: int
    peak_bytes: int
    weights_bytes: int


class Picture(Spec):
    """A picture of the workload, stored in the store's folder under its content's sha256.

    `faults` names what makes it no picture at all: black, flat, noise (see measure.quality).
    """

    index: int
    prompt: str
    seed: int
    sha256: str
    faults: tuple[str, ...] = ()


class Round(Spec):
    """One process's worth of measuring one trial: one stored row."""

    index: int
    outcome: Outcome
    reason: str | None = None
    started_at: str
    load_s: float | None = None
    apply_s: float | None = None
    first_call_s: float | None = None
    warmup_s: tuple[float, ...] = ()
    steady: bool | None = None
    samples: tuple[Sample, ...] = ()
    memory: Memory | None = None
    effects: dict[str, dict[str, int | float | str]] = Field(default_factory=dict)
    evidence: dict[str, int | float | str | list[str]] = Field(default_factory=dict)
    pictures: tuple[Picture, ...] = ()
    conditions: dict[str, float | str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()


class Record(Spec):
    """A Trial, its Environment, and the rounds that it has been measured in."""

    trial: Trial
    environment: Environment
    rounds: tuple[Round, ...] = Field(min_length=1)

    @property
    def outcome(self) -> Outcome:
        """Measured if every round was; else the outcome of the first round that failed."""
        for round_ in self.rounds:
            if round_.outcome is not Outcome.MEASURED:
                return round_.outcome
        return Outcome.MEASURED

    @property
    def reason(self) -> str | None:
        for round_ in self.rounds:
            if round_.outcome is not Outcome.MEASURED:
                return round_.reason
        return None
