"""The keywords of `vivace.bench`, `compare` and `profile`, for type checkers: the fields of a study, flat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from vivace.foundation.spec.study import BatchSize, QualityRequest, WorkloadRequest
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.workload import Task, TextMode


class WorkloadKeywords(TypedDict, total=False):
    """The fields of `WorkloadRequest`; `batch` is a single batch."""

    prompts: Sequence[str] | str | None
    prompt_set: str | None
    seed: int
    num_seeds: int | None
    height: int | None
    width: int | None
    num_inference_steps: int | None
    guidance_scale: float | None
    batch: BatchSize
    batches: Sequence[BatchSize]
    text: TextMode
    task: Task | None
    images: Sequence[str] | str
    masks: Sequence[str] | str
    controls: Sequence[str] | str
    strength: float | None
    controlnet: str | None


class CallKeywords(WorkloadKeywords, total=False):
    """Those of `vivace.compare` and `vivace.profile`."""

    workload: WorkloadRequest
    timing: Timing
    device: str


class StudyKeywords(CallKeywords, total=False):
    """Those of `vivace.bench` and `Study.of`: the fields of `Study`, `WorkloadRequest` and `QualityRequest`."""

    quality: bool | QualityRequest
    scorer: str | None
    witness: str | None
    lpips: bool
    noise_floor: bool
    rivals: bool
