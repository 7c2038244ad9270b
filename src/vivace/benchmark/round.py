"""Measure one round of one trial in this process: load, check, apply, warm up, time, draw, gather evidence."""

from __future__ import annotations

import io
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vivace.benchmark.store import save_picture
from vivace.contract import Component, component_of, working_part
from vivace.errors import NoEffect, Unsupported, VivaceError
from vivace.measure.environment import conditions, python_ms
from vivace.measure.kernels import attention_kernels
from vivace.measure.memory import MemoryMeter
from vivace.measure.quality import faults, pixels
from vivace.measure.timer import PipelineTimer
from vivace.models.find import find_model
from vivace.models.load import load_pipeline
from vivace.recipes.recipe import Recipe
from vivace.runtime.embeddings import encode
from vivace.runtime.session import Session, session_of
from vivace.spec.record import Outcome, Picture, Round, Sample
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial
from vivace.stats.intervals import MIN_SAMPLES
from vivace.stats.stopping import enough_samples, is_steady

Report = Callable[[dict[str, Any]], None]
Call = Sequence[tuple[int, str, int]]  # index, prompt and seed of each picture that is drawn together
_TRACE_STEPS = 2
REHEARSED_CALLS = 4
REHEARSED_STEPS = 4
_MAX_RECOMPILES = 3
_Said = Callable[[Call], dict[str, Any]]


def measure_round(trial: Trial, index: int, timing: Timing, pictures: Path, report: Report) -> Round:
    """Run one round. Failures of the trial are outcomes, not exceptions.

    Args:
        index: which round this is; pictures are kept in round 0.
        pictures: the store's folder of pictures.
        report: called with progress events.
    """
    started = datetime.now(UTC).isoformat(timespec="seconds")
    measurement = _Measurement(trial, timing, report)
    try:
        measurement.run(pictures if index == 0 and not trial.model.is_synthetic else None)
        outcome, reason = Outcome.MEASURED, measurement.refuted()
        if reason is not None:
            outcome = Outcome.NO_EFFECT
    except Exception as error:  # noqa: BLE001  the process boundary: whatever happens becomes a typed outcome
        traceback.print_exc()  # to the worker's log
        outcome, reason = explain(error)
    return Round(index=index, outcome=outcome, reason=reason, started_at=started, **measurement.results)


def draw_untimed(trial: Trial, number: int, pictures: Path) -> tuple[Picture, ...]:
    """The first pictures of a trial, kept in the folder `pictures`; nothing is timed.

    Raises:
        UnknownModel, Unsupported, NoEffect: see `vivace.errors`.
    """
    measurement = _Measurement(trial, Timing(), lambda event: None)
    session = measurement.load_and_apply(MemoryMeter(trial.device))
    calls = trial.workload.calls()
    measurement.keep_pictures(session, calls[: -(-number // trial.workload.batch)], pictures)
    drawn: tuple[Picture, ...] = measurement.results["pictures"]
    return drawn


def open_trial(trial: Trial) -> Session:
    """The trial's model with its recipe applied, for calls that are not measured.

    Raises:
        UnknownModel, Unsupported, NoEffect: see `vivace.errors`.
    """
    return _Measurement(trial, Timing(), lambda event: None).load_and_apply(MemoryMeter(trial.device))


def try_call(session: Session, call: Call, text: str) -> None:
    """One step and the decoding."""
    said = in_words(call) if text == "prompts" else encode(session, [prompt for _, prompt, _ in call])
    draw(session, call, said, num_inference_steps=1)


def rehearse(trial: Trial, timing: Timing) -> str | None:
    """Ask of memory in this process what `measure_round` would ask, in a fraction of its time: the same calls in the
    same order and the trace, but of calls and of steps at most a few. After those the allocator has seen all kinds of
    steps (computed, answered by a cache, without guidance) more than once, and goes round in a circle.

    Returns:
        Why it does not fit; None if it does.

    Raises:
        UnknownModel, Unsupported, NoEffect: see `vivace.errors`; and whatever else fails but for memory.
    """
    try:
        _Measurement(trial, timing, lambda event: None).rehearse()
    except Exception as error:
        outcome, reason = explain(error)
        if outcome is not Outcome.OUT_OF_MEMORY:
            raise
        return reason
    return None


def explain(error: Exception) -> tuple[Outcome, str]:
    import torch

    text = str(error).strip()
    if isinstance(error, Unsupported):
        return Outcome.UNSUPPORTED, text
    if isinstance(error, NoEffect):
        return Outcome.NO_EFFECT, text
    is_allocation = "can't allocate memory" in text or "out of memory" in text.lower()
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and is_allocation
    ):
        return Outcome.OUT_OF_MEMORY, text.splitlines()[0] if text else "the allocation failed"
    if isinstance(error, VivaceError):
        return Outcome.CRASHED, text
    return Outcome.CRASHED, f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


class _Measurement:
    """One round in progress; `results` fills as it goes, so that a failed round keeps what it had."""

    def __init__(self, trial: Trial, timing: Timing, report: Report) -> None:
        self._trial = trial
        self._timing = timing
        self._report = report
        self._drawn: dict[int, Any] = {}
        self._refuted: str | None = None
        self.results: dict[str, Any] = {"conditions": conditions()}

    def refuted(self) -> str | None:
        return self._refuted

    def run(self, pictures: Path | None) -> None:
        meter = MemoryMeter(self._trial.device)
        session = self.load_and_apply(meter)
        said = self._said(session)
        timed = self._timed(session, said)
        self._warm_up(timed)
        meter.start_peak()
        self._time(timed)
        self.results["conditions"] |= {"python_after_ms": python_ms()}
        self.results["memory"] = meter.read()
        evidence: dict[str, Any] = dict(session.evidence())
        if pictures is not None:
            self.keep_pictures(session, self._trial.workload.calls(), pictures)
        self._report({"event": "phase", "phase": "evidence"})
        evidence["attention_kernels"] = self._trace(session, said)
        self.results["evidence"] = evidence
        self._refuted = session.refuted(evidence)

    def rehearse(self) -> None:
        """See the function of that name."""
        session = self.load_and_apply(MemoryMeter(self._trial.device))
        said = self._said(session)
        steps = min(int(session.defaults["num_inference_steps"]), REHEARSED_STEPS)
        timed = self._timed(session, said, num_inference_steps=steps)
        num_calls = self._timing.max_warmup + (self._timing.repeats or MIN_SAMPLES)
        for k in range(min(num_calls, REHEARSED_CALLS)):
            timed(k)
        self._trace(session, said)

    def _timed(self, session: Session, said: _Said, **told: Any) -> Callable[[int], Sample]:
        """A function that draws the k-th call's pictures, and keeps them.

        Args:
            told: to the pipeline, instead of what is in force.
        """
        timer = PipelineTimer(session.pipe, self._trial.device)
        calls = self._trial.workload.calls()

        def timed(k: int) -> Sample:
            call = calls[k % len(calls)]
            given = said(call)  # encoded before the window opens, if at all
            output, sample = timer.time_call(lambda: draw(session, call, given, **told), call[0][0])
            self._keep(call, output)
            return sample

        return timed

    def _trace(self, session: Session, said: _Said) -> list[str]:
        """The attention kernels of a short call."""
        call = self._trial.workload.calls()[0]
        return attention_kernels(
            _parts_with_attention(session.pipe),
            lambda: draw(session, call, said(call), num_inference_steps=_TRACE_STEPS),
        )

    def load_and_apply(self, meter: MemoryMeter) -> Session:
        trial = self._trial
        self._report({"event": "phase", "phase": "load"})
        start = time.perf_counter()
        found = find_model(trial.model.name)
        if found.model.revision != trial.model.revision:
            raise VivaceError(f"the files of {trial.model.name} changed while they were being measured")
        recipe = Recipe.from_spec(trial.recipe)
        pipe = load_pipeline(found, trial.device, keep_on_host=recipe.loads_from_host)
        self.results["load_s"] = time.perf_counter() - start
        self._report({"event": "phase", "phase": "apply"})
        start = time.perf_counter()
        workload = trial.workload
        session = session_of(
            pipe,
            found,
            recipe,
            trial.device,
            {
                "height": workload.height,
                "width": workload.width,
                "num_inference_steps": workload.num_inference_steps,
                "guidance_scale": workload.guidance_scale,
            },
            workload.prompts,
        )
        self.results["apply_s"] = time.perf_counter() - start
        self.results["effects"] = session.effects
        self.results["warnings"] = tuple(session.warnings)
        meter.loaded(session.pipe)
        return session

    def _warm_up(self, timed: Callable[[int], Sample]) -> None:
        """Call at the same shape until the times are steady, or the cap; the status says which."""
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

    def _time(self, timed: Callable[[int], Sample]) -> None:
        samples: list[Sample] = []
        spent = 0.0
        recompiles = 0
        while not self._enough(samples, spent):
            before = _num_graphs()
            sample = timed(len(samples))
            if _num_graphs() != before:
                # Compiling is not steady state: what was timed so far becomes warm-up.
                recompiles += 1
                self.results["warmup_s"] += (*(s.total_s for s in samples), sample.total_s)
                samples, spent = [], 0.0
                if recompiles > _MAX_RECOMPILES:
                    raise VivaceError("torch.compile kept recompiling inside the measured window")
                continue
            samples.append(sample)
            spent += sample.total_s
            self._report(
                {"event": "sample", "phase": "timing", "done": len(samples), "of": self._timing.repeats}
                | {"last_s": sample.total_s, "spent_s": spent, "cap_s": self._timing.max_seconds}
            )
        self.results["samples"] = tuple(samples)

    def _enough(self, samples: list[Sample], spent_s: float) -> bool:
        if self._timing.repeats is not None:
            return len(samples) >= self._timing.repeats
        times = [s.total_s for s in samples]
        return bool(times) and (
            enough_samples(times) or (spent_s >= self._timing.max_seconds and len(times) >= MIN_SAMPLES)
        )

    def keep_pictures(self, session: Session, calls: Sequence[Call], folder: Path) -> None:
        """Pictures of the timed calls are kept; those that were not reached are drawn now, untimed."""
        kept: dict[int, Picture] = {}
        said = self._said(session)
        num_pictures = len({index for call in calls for index, _, _ in call})
        for call in calls:
            self._report({"event": "phase", "phase": "pictures", "done": len(kept), "of": num_pictures})
            if any(index not in self._drawn for index, _, _ in call):
                self._keep(call, draw(session, call, said(call)))
            for index, prompt, seed in call:
                png = io.BytesIO()
                self._drawn[index].save(png, format="PNG")
                sha256 = save_picture(folder, png.getvalue())
                found = tuple(faults(pixels(self._drawn[index])))
                kept[index] = Picture(index=index, prompt=prompt, seed=seed, sha256=sha256, faults=found)
        self.results["pictures"] = tuple(kept[index] for index in sorted(kept))

    def _keep(self, call: Call, output: Any) -> None:
        """The first drawing of a picture counts."""
        for (index, _, _), image in zip(call, output.images, strict=True):
            self._drawn.setdefault(index, image)

    def _said(self, session: Session) -> _Said:
        """How a call is told its prompts: in words, or as embeddings that were made before."""
        if self._trial.workload.text == "prompts":
            return in_words
        known: dict[tuple[int, ...], dict[str, Any]] = {}

        def encoded(call: Call) -> dict[str, Any]:
            key = tuple(index for index, _, _ in call)
            if key not in known:
                known[key] = encode(session, [prompt for _, prompt, _ in call])
            return known[key]

        return encoded


def _parts_with_attention(pipe: Any) -> dict[str, Any]:
    """The denoiser, and what decodes its latents."""
    parts: tuple[Component, ...] = ("denoiser", "vae")
    return {c: working_part(c, module) for c in parts if (module := component_of(pipe, c)) is not None}


def in_words(call: Call) -> dict[str, Any]:
    return {"prompt": call[0][1] if len(call) == 1 else [prompt for _, prompt, _ in call]}


def draw(session: Session, call: Call, said: dict[str, Any], **told: Any) -> Any:
    """Each picture with its own generator. The noise is drawn on the CPU, so that devices agree on it."""
    import torch

    generators = [torch.Generator("cpu").manual_seed(seed) for _, _, seed in call]
    return session(**said, generator=generators[0] if len(call) == 1 else generators, **told)


def _num_graphs() -> int:
    """Graphs that torch.compile has made so far in this process."""
    import sys

    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])
