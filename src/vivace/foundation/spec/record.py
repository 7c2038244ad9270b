"""Stored measurements. Only raw samples are stored; statistics are computed when a Record is read."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from vivace.foundation.spec.base import SparseSpec, Spec
from vivace.foundation.spec.ceilings import Ceilings, Work
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.trial import Trial

CAPTURED_WHILE_TIMED = "cuda_graphs_recorded_while_timed"
"""Key of a round's evidence: how many CUDA graphs were captured during the timed calls, if any were."""

HIDDEN = "hidden by the safety checker"
"""Fault of an image that the model's own safety checker replaced by a black one."""


class Outcome(StrEnum):
    """How a round ended. Every failure is stored with a reason."""

    MEASURED = "measured"
    UNSUPPORTED = "unsupported"
    NO_EFFECT = "no_effect"
    OUT_OF_MEMORY = "out_of_memory"
    CRASHED = "crashed"
    TIMED_OUT = "timed_out"
    FAILED_QUALITY = "failed_quality"
    """Never stored: reports give it to a measured row whose images fail the quality limits."""

    @property
    def is_final(self) -> bool:
        """Whether a later run keeps the round instead of trying again: the trial would end the same way."""
        return self in {Outcome.MEASURED, Outcome.UNSUPPORTED, Outcome.NO_EFFECT, Outcome.OUT_OF_MEMORY}


class Sample(Spec):
    """One timed call of the whole pipeline, which generates one batch of images.

    Attributes:
        image: index of the first image of the batch.
        total_s: wall-clock seconds.
        cpu_s: CPU seconds of the process.
        stages_s: seconds by stage (text, encode, steps, vae, other); their sum is `total_s`. `encode` is of images to
            start from, and missing without them.
    """

    picture: int
    total_s: float
    cpu_s: float
    stages_s: dict[str, float]
    num_denoiser_calls: int


class Memory(Spec):
    """Bytes: of PyTorch's allocator on CUDA, of the process's resident set (libraries included) on a CPU.

    Attributes:
        before_bytes: held before the model was loaded.
        model_bytes: held after the recipe was applied.
        peak_bytes: the most held during the timed calls.
    """

    kind: str
    before_bytes: int
    model_bytes: int
    peak_bytes: int
    weights_bytes: int


class GpuWindow(Spec):
    """The GPU over the timed calls of a round, read through NVML. What cannot be read is None.

    Attributes:
        seconds: from the first reading to the last one.
        energy_j: joules of the whole card in the window.
        energy_from: "counter" (the driver's), or "sampled power" (its integral).
        power_w, sm_clock_mhz: the mean power and the median clock.
        throttled: why clocks were held down in any reading, e.g. "power cap".
        reason: why there is no energy, or nothing at all.
    """

    calls: int
    seconds: float | None = None
    num_readings: int = 0
    energy_j: float | None = None
    energy_from: str | None = None
    power_w: float | None = None
    max_power_w: float | None = None
    sm_clock_mhz: float | None = None
    min_sm_clock_mhz: float | None = None
    max_temperature_c: float | None = None
    throttled: tuple[str, ...] = ()
    reason: str | None = None


class Canary(Spec):
    """The calls of a round's first trial once more, in another process of it: how fast the machine was then.

    Attributes:
        started_at: UTC, ISO 8601.
        samples_s: seconds of each call.
    """

    started_at: str
    samples_s: tuple[float, ...] = Field(min_length=1)


class ImageRecord(Spec):
    """An image of the workload, stored in the store's folder under the sha256 of its PNG file.

    Attributes:
        faults: defects that make the image useless: black, flat, noise (see `vivace.measure.image_metrics`), or
            `HIDDEN`.
    """

    index: int
    prompt: str
    seed: int
    sha256: str
    faults: tuple[str, ...] = ()


class Round(SparseSpec):
    """The measurement of one trial in one process: one stored row.

    Attributes:
        started_at: UTC, ISO 8601, to the millisecond; records of earlier versions have whole seconds.
        load_s, apply_s: seconds to load the model and to apply the recipe.
        warmup_s: seconds of each call before the timed ones, the first call included.
        steady: whether the warm-up ended because the times were steady.
        gpu_busy_s: seconds of a traced call in which the GPU was busy; None on a CPU.
        gpu: the GPU over the timed calls; None on a CPU.
        effects: what each technique changed, by technique.
        evidence: what was observed during the calls.
        conditions: the machine's state: load, clocks.
        work: what the recipe computes in a call; only in one round, and only where `ceilings` are known.
        ceilings: the limits of the device, measured by `vivace doctor --measure`.
        canaries: of the first trial of its round, its calls in later processes of the round.
    """

    omits = ("canaries",)

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
    gpu_busy_s: float | None = None
    gpu: GpuWindow | None = None
    effects: dict[str, dict[str, int | float | str]] = Field(default_factory=dict)
    evidence: dict[str, int | float | str | list[str]] = Field(default_factory=dict)
    pictures: tuple[ImageRecord, ...] = ()
    conditions: dict[str, float | str] = Field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    work: Work | None = None
    ceilings: Ceilings | None = None
    canaries: tuple[Canary, ...] = ()


class Record(Spec):
    """A Trial, its Environment, and its rounds."""

    trial: Trial
    environment: Environment
    rounds: tuple[Round, ...] = Field(min_length=1)

    @property
    def outcome(self) -> Outcome:
        """The outcome of the first round that failed; MEASURED if none did."""
        return next((r.outcome for r in self.rounds if r.outcome is not Outcome.MEASURED), Outcome.MEASURED)

    @property
    def reason(self) -> str | None:
        """The reason of the first round that failed; None if none did."""
        return next((r.reason for r in self.rounds if r.outcome is not Outcome.MEASURED), None)
