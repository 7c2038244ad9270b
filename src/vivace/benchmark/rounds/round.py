"""Measure one round of a trial in this process: load, apply, warm up, time, save images, collect evidence."""

from __future__ import annotations

import io
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.benchmark.store.images import read_sources, save_image
from vivace.errors import NoEffect, Unsupported, VivaceError, WorkloadError
from vivace.foundation.spec.record import CAPTURED_WHILE_TIMED, HIDDEN, ImageRecord, Outcome, Round, Sample
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.foundation.stats.intervals import MIN_SAMPLES
from vivace.foundation.stats.until import enough_samples, is_steady
from vivace.foundation.untrusted.files import is_out_of_memory
from vivace.machinery.technique import Component, component_of, working_part
from vivace.measure.accelerator import MemoryMeter, PipelineTimer
from vivace.measure.image_metrics import faults, pixels
from vivace.measure.machine import check_works
from vivace.measure.nvml import GpuMeter, opened_gpu
from vivace.measure.profiling.profiler import attention_kernels, gpu_busy_s
from vivace.measure.this_environment import conditions, gpu_conditions, python_ms
from vivace.models.find import find_model
from vivace.models.reading_limits import ReadingLimits, is_trusted
from vivace.models.sources import image_arguments
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.calls import Call as Call
from vivace.runtime.calls import encode, generators_of, prompts_of
from vivace.runtime.finite_images import hidden_images
from vivace.runtime.opening import open_session, session_of
from vivace.runtime.pipelines import pipeline_for
from vivace.runtime.session import Session

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL.Image import Image

Report = Callable[[dict[str, Any]], None]
PromptArguments = Callable[[Call], dict[str, Any]]
_TRACE_STEPS = 2
REHEARSED_CALLS = 4
REHEARSED_STEPS = 4
_MAX_RECOMPILES = 3
_RACE_STEPS = 10
_RACE_ROUNDS = 4
_TOO_SLOW = 3.0  # recipes slower than this multiple of the fastest are dropped after the first call


def measure_round(
    trial: Trial,
    index: int,
    timing: Timing,
    images: Path | None,
    report: Report,
    sources: Path | None = None,
) -> Round:
    """Run one round and return its results. Failures of the trial are outcomes, not exceptions; random weights have no
    images."""
    started = datetime.now(UTC).isoformat(timespec="milliseconds")
    measurement = Measurement(trial, timing, report, sources)
    try:
        measurement.run(None if trial.model.is_synthetic else images)
        outcome, reason = Outcome.MEASURED, measurement.refutation
        if reason is not None:
            outcome = Outcome.NO_EFFECT
    except Exception as error:  # noqa: BLE001  the process boundary: every failure becomes an outcome
        traceback.print_exc()  # to the worker's log
        outcome, reason = explain(error)
    return Round(index=index, outcome=outcome, reason=reason, started_at=started, **measurement.results)


def draw_images(
    trial: Trial, number: int, images: Path, report: Report, sources: Path | None = None
) -> dict[str, Any]:
    """Generate the first images of a trial, untimed, in whole batches; return fields of a NoiseFloor."""
    measurement = Measurement(trial, Timing(), report, sources)
    try:
        session = measurement.load_and_apply(MemoryMeter(trial.device))
        measurement.keep_images(session, trial.workload.calls()[: -(-number // trial.workload.batch)], images)
    except Exception as error:  # noqa: BLE001  the process boundary
        outcome, reason = explain(error)
        return {"pictures": [], "reason": f"{outcome.value.replace('_', ' ')}: {reason}"}
    drawn = measurement.results["pictures"]
    return {"pictures": [image.model_dump(mode="json") for image in drawn], "reason": None}


class OpenTrial:
    """A trial's model with its recipe applied, for calls that are not measured."""

    def __init__(self, trial: Trial, sources: Path | None = None) -> None:
        self._steps = trial.workload.steps_that_run(1)
        self._measurement = Measurement(trial, Timing(), lambda event: None, sources)
        self.session = self._measurement.load_and_apply(MemoryMeter(trial.device))

    def try_call(self, call: Call) -> None:
        """Run one step and the decoding."""
        arguments = self._measurement.prompt_arguments(self.session)(call)
        draw(self.session, call, arguments, num_inference_steps=self._steps)


def rehearse(trial: Trial, timing: Timing, sources: Path | None = None) -> str | None:
    """Allocate the memory that `measure_round` would, in a fraction of its time.

    It runs the same calls in the same order and the trace, but at most REHEARSED_CALLS calls of REHEARSED_STEPS steps.
    By then the allocator has served every kind of step (computed, skipped by a cache, without guidance) more than once,
    and its state repeats.

    Returns:
        Why the round does not fit; None if it does.
    """
    measurement = Measurement(trial, timing, lambda event: None, sources)
    try:
        session = measurement.load_and_apply(MemoryMeter(trial.device))
        steps = min(
            int(session.defaults["num_inference_steps"]), trial.workload.steps_that_run(REHEARSED_STEPS)
        )
        prompt_arguments = measurement.prompt_arguments(session)
        timed = measurement.timed(session, prompt_arguments, num_inference_steps=steps)
        for k in range(min(timing.max_warmup + (timing.repeats or MIN_SAMPLES), REHEARSED_CALLS)):
            timed(k)
        measurement.attention_kernels(session, prompt_arguments)
    except Exception as error:
        outcome, reason = explain(error)
        if outcome is not Outcome.OUT_OF_MEMORY:
            raise
        return reason
    return None


def explain(error: Exception) -> tuple[Outcome, str]:
    """Return the outcome of a round's exception, and the reason: one line, or vivace's own message."""
    text = str(error).strip()
    if isinstance(error, Unsupported | WorkloadError):
        return Outcome.UNSUPPORTED, text
    if isinstance(error, NoEffect):
        return Outcome.NO_EFFECT, text
    if is_out_of_memory(error):
        return Outcome.OUT_OF_MEMORY, text.splitlines()[0] if text else "the allocation failed"
    if isinstance(error, VivaceError):
        return Outcome.CRASHED, text
    return Outcome.CRASHED, f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


class Measurement:
    """One round in progress.

    Attributes:
        results: fields of the Round, filled as they become known, so that a failed round keeps them.
        refutation: why a technique had no effect, by the evidence; None if all had one.
    """

    def __init__(self, trial: Trial, timing: Timing, report: Report, sources: Path | None = None) -> None:
        self._trial = trial
        self._sources = sources
        self._timing = timing
        self._report = report
        self._images: dict[int, Image] = {}
        self._pipeline = ""
        self._pictures: dict[str, Any] = {}
        self._hidden: set[int] = set()
        self.refutation: str | None = None
        self.results: dict[str, Any] = {"conditions": conditions()}

    def run(self, images: Path | None) -> None:
        """Measure the round; save its images in a folder, if there is one."""
        meter = MemoryMeter(self._trial.device)
        session = self.load_and_apply(meter)
        prompt_arguments = self.prompt_arguments(session)
        timed = self.timed(session, prompt_arguments)
        self.warm_up(timed)
        self.results["conditions"] |= gpu_conditions()  # only now is CUDA initialised, and the GPU warm
        meter.start_peak()
        captured = _num_captured(session)
        with opened_gpu() as gpu, GpuMeter(gpu) as observed:
            self._time(timed, observed)
        captured = _num_captured(session) - captured
        after = {f"{name}_after": value for name, value in gpu_conditions().items()}
        self.results["conditions"] |= after | {"python_after_ms": python_ms()}
        self.results["memory"] = meter.read()
        evidence: dict[str, Any] = dict(session.evidence())
        if captured:
            evidence[CAPTURED_WHILE_TIMED] = captured
        if images is not None:
            self.keep_images(session, self._trial.workload.calls(), images)
        self._report({"event": "phase", "phase": "evidence"})
        if self._trial.device == "cuda":
            call = self._trial.workload.calls()[0]
            self.results["gpu_busy_s"] = gpu_busy_s(lambda: draw(session, call, prompt_arguments(call)))
        evidence["attention_kernels"] = self.attention_kernels(session, prompt_arguments)
        self.results["evidence"] = evidence
        self.refutation = session.refuted(evidence)

    def timed(
        self, session: Session, prompt_arguments: PromptArguments, **overrides: Any
    ) -> Callable[[int], Sample]:
        """Return a function that times the k-th call, or the first if prompts are repeated, and keeps its images."""
        timer = PipelineTimer(session.pipe, self._trial.device)
        calls = self._trial.workload.calls()

        def timed(k: int) -> Sample:
            call = calls[k % len(calls) if self._trial.workload.text != "repeated" else 0]
            arguments = prompt_arguments(call)  # embeddings are made before the timing starts
            output, sample = timer.time_call(lambda: draw(session, call, arguments, **overrides), call[0][0])
            self._keep(call, output)
            return sample

        return timed

    def attention_kernels(self, session: Session, prompt_arguments: PromptArguments) -> list[str]:
        call = self._trial.workload.calls()[0]
        steps = self._trial.workload.steps_that_run(_TRACE_STEPS)
        return attention_kernels(
            _parts_with_attention(session.pipe),
            lambda: draw(session, call, prompt_arguments(call), num_inference_steps=steps),
        )

    def load_and_apply(self, meter: MemoryMeter) -> Session:
        """Load the model and apply the recipe; record times, effects and warnings."""
        trial = self._trial
        start = time.perf_counter()
        located = find_model(trial.model.name)
        limits = None if is_trusted(located) else asdict(ReadingLimits.of(located))
        self._report({"event": "phase", "phase": "load", "limits": limits})
        if located.model.revision != trial.model.revision:
            raise VivaceError(f"the files of {trial.model.name} changed while they were being measured")
        workload = trial.workload
        self._pipeline, self._pictures = located.pipeline, {}
        if workload.sources:
            assert self._sources is not None
            self._pictures = read_sources(self._sources, workload)
        recipe = Recipe.from_spec(trial.recipe)
        check_works(trial.device)
        pipe = pipeline_for(located, recipe, trial.device, workload.task, workload.controlnet)
        self.results["load_s"] = time.perf_counter() - start
        self._report({"event": "phase", "phase": "apply"})
        start = time.perf_counter()
        session = session_of(pipe, located, recipe, trial.device, workload.call, workload.prompts)
        self.results["apply_s"] = time.perf_counter() - start
        session.defers_check = (
            trial.model.is_synthetic
        )  # random weights draw no image, and what takes as long may be NaN
        self.results["effects"] = session.effects
        self.results["warnings"] = tuple(session.warnings)
        meter.loaded(session.pipe)
        return session

    def prompt_arguments(self, session: Session) -> PromptArguments:
        """Return a function from a call to its arguments besides the session's defaults: prompts, or embeddings that
        are encoded once, and images.

        Call it before each call: a benchmark draws few prompts many times, and they count as new each time, unless the
        workload says that they are repeated.
        """
        workload = self._trial.workload
        embeddings: dict[tuple[int, ...], dict[str, Any]] = {}

        def arguments(call: Call) -> dict[str, Any]:
            indices = [index for index, _, _ in call]
            images = image_arguments(self._pipeline, workload, indices, self._pictures)
            if workload.text != "embeddings":
                if workload.text == "prompts":
                    session.forget_prompts()
                return prompts_of(call) | images
            key = tuple(indices)
            if key not in embeddings:
                embeddings[key] = encode(session, [prompt for _, prompt, _ in call], workload.task)
            return embeddings[key] | images

        return arguments

    def warm_up(self, timed: Callable[[int], Sample]) -> None:
        """Repeat the call until the times are steady or a limit is reached; `steady` says which."""
        times: list[float] = []
        while not times or not (
            len(times) >= self._timing.max_warmup
            or is_steady(times[1:])
            or sum(times[1:]) >= self._timing.max_seconds
        ):
            self._report(
                {"event": "phase", "phase": "warm-up" if times else "first call", "done": len(times)}
            )
            times.append(timed(len(times)).total_s)
            self.results["first_call_s"] = times[0]
            self.results["warmup_s"] = tuple(times)
        self.results["steady"] = is_steady(times[1:])

    def _time(self, timed: Callable[[int], Sample], gpu: GpuMeter) -> None:
        """Time calls until there are enough samples; calls that compiled count as warm-up."""
        samples: list[Sample] = []
        spent = 0.0
        recompiles = 0
        gpu.start()
        while not self._enough(samples, spent):
            before = num_graphs()
            sample = timed(len(samples))
            if num_graphs() != before:
                # A call that compiled is not steady state: the samples so far become warm-up.
                recompiles += 1
                self.results["warmup_s"] += (*(s.total_s for s in samples), sample.total_s)
                samples, spent = [], 0.0
                gpu.start()
                if recompiles > _MAX_RECOMPILES:
                    raise VivaceError("torch.compile kept recompiling during the timed calls")
                continue
            samples.append(sample)
            spent += sample.total_s
            self._report(
                {"event": "sample", "phase": "timing", "done": len(samples), "of": self._timing.repeats}
                | {"last_s": sample.total_s, "spent_s": spent, "cap_s": self._timing.max_seconds}
            )
        self.results |= {"gpu": gpu.stop(len(samples)), "samples": tuple(samples)}

    def _enough(self, samples: list[Sample], spent_s: float) -> bool:
        if self._timing.repeats is not None:
            return len(samples) >= self._timing.repeats
        times = [s.total_s for s in samples]
        return bool(times) and (
            enough_samples(times) or (spent_s >= self._timing.max_seconds and len(times) >= MIN_SAMPLES)
        )

    def keep_images(self, session: Session, calls: Sequence[Call], folder: Path) -> None:
        """Save the images of the timed calls; generate the missing ones now, untimed."""
        kept: dict[int, ImageRecord] = {}
        prompt_arguments = self.prompt_arguments(session)
        num_images = len({index for call in calls for index, _, _ in call})
        for call in calls:
            self._report({"event": "phase", "phase": "pictures", "done": len(kept), "of": num_images})
            if any(index not in self._images for index, _, _ in call):
                self._keep(call, draw(session, call, prompt_arguments(call)))
            for index, prompt, seed in call:
                png = io.BytesIO()
                self._images[index].save(png, format="PNG")
                sha256 = save_image(folder, png.getvalue())
                faulty = (*faults(pixels(self._images[index])), *((HIDDEN,) if index in self._hidden else ()))
                kept[index] = ImageRecord(index=index, prompt=prompt, seed=seed, sha256=sha256, faults=faulty)
        self.results["pictures"] = tuple(kept[index] for index in sorted(kept))

    def _keep(self, call: Call, output: Any) -> None:
        """Keep the images of a call, unless an earlier call generated them already."""
        hidden = hidden_images(output) or (False,) * len(call)
        for (index, _, _), image, is_hidden in zip(call, output.images, hidden, strict=True):
            if index not in self._images:
                self._images[index] = image
                self._hidden |= {index} if is_hidden else set()


def _num_captured(session: Session) -> int:
    return int(session.evidence().get("cuda_graphs_recorded", 0))  # type: ignore[arg-type]


def _parts_with_attention(pipe: DiffusionPipeline) -> dict[str, torch.nn.Module]:
    parts: tuple[Component, ...] = ("denoiser", "vae")
    return {c: working_part(c, module) for c in parts if (module := component_of(pipe, c)) is not None}


def draw(session: Session, call: Call, prompt_arguments: dict[str, Any], **overrides: Any) -> Any:
    """Generate a call's images, each with its own generator; return the pipeline's output."""
    return session(**prompt_arguments, **generators_of(call), **overrides)


def num_graphs() -> int:
    import sys

    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])


def race(model: str, recipes: Sequence[str], device: str) -> dict[str, float]:
    """Return each recipe's best time for a call of a few steps, seconds. Calls are interleaved.

    Recipes that are unsupported here, change nothing, or are far slower than the fastest (fp16 on a CPU that emulates
    it) are left out.
    """
    located = find_model(model)
    sessions: dict[str, Session] = {}
    for recipe in recipes:
        try:
            sessions[recipe] = open_session(
                located, resolve(recipe), device, {"num_inference_steps": _RACE_STEPS}
            )
        except (Unsupported, NoEffect):
            continue
    # Two steps without decoding find the recipes that are too slow. Twice, since the
    # first call also loads kernels.
    short = {"num_inference_steps": 2, "output_type": "latent"}
    short_s = {
        recipe: min(_seconds_of(s, **short), _seconds_of(s, **short)) for recipe, s in sessions.items()
    }
    remaining = [recipe for recipe in sessions if short_s[recipe] <= _TOO_SLOW * min(short_s.values())]
    rounds = [{recipe: _seconds_of(sessions[recipe]) for recipe in remaining} for _ in range(_RACE_ROUNDS)]
    return {recipe: min(times[recipe] for times in rounds) for recipe in remaining}


def _seconds_of(session: Session, **call: Any) -> float:
    start = time.perf_counter()
    session("a red circle", **call)
    return time.perf_counter() - start
