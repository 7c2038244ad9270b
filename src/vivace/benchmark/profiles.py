"""Profile a recipe in a worker process: `vivace.profile`."""

from __future__ import annotations

import gzip
import shutil
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from vivace.answers.data import dataframe
from vivace.answers.terminal import text_of
from vivace.benchmark.rounds.round import Measurement, Report, draw, explain, num_graphs
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.rounds.worker_requests import ProfileRequest, ask, start_launcher
from vivace.benchmark.store.images import save_sources
from vivace.errors import Unsupported
from vivace.foundation.processes.launcher import Launcher, OnEvent
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.profiling import Profile
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Outcome
from vivace.foundation.spec.study import STUDY_ONLY, Study, WorkloadRequest, takes_fields
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.foundation.untrusted.destinations import replace_from
from vivace.measure.accelerator import MemoryMeter
from vivace.measure.profiling import breakdown
from vivace.measure.profiling.profiler import host_waits, traced, uncollected
from vivace.measure.profiling.trace import Trace
from vivace.report.profile_answer import ProfileChange, answer_of, changes, table_rows
from vivace.runtime.workloads import checked_request, default_threads


@dataclass(frozen=True)
class Profiled:
    """A profile. `print(profiled)` shows its tables.

    Attributes:
        profile: all figures.
    """

    profile: Profile

    def to_dicts(self) -> list[dict[str, Any]]:
        """Return the operator table, one flat dictionary a row: the columns of `vivace profile --format csv`."""
        return table_rows(self.profile)

    def to_dataframe(self) -> Any:
        """Return `to_dicts` as a pandas DataFrame."""
        return dataframe(self.to_dicts())

    def against(self, before: Profiled) -> list[ProfileChange]:
        """Return how each operator's time differs from that in another profile, the largest change first."""
        return changes(before.profile, self.profile)

    def _repr_html_(self) -> str:
        """Return the tables for notebooks."""
        from vivace.answers.page import in_notebook, page_of

        return in_notebook(page_of(answer_of(self.profile)))

    def __str__(self) -> str:
        return text_of(answer_of(self.profile))


@takes_fields(WorkloadRequest, Study, without=STUDY_ONLY)
def profile(
    model: str,
    recipe: str = BASELINE,
    *,
    calls: int = 3,
    trace: str | Path | None = None,
    launcher: Launcher | None = None,
    on_event: OnEvent | None = None,
    **fields: Any,
) -> Profiled:
    """Profile one whole call of a recipe after the warm-up, in a separate process.

    Nothing is compiled or tuned inside the profiled call: such calls are discarded. Nothing is stored.

    Args:
        model: what `vivace.load` takes.
        recipe: e.g. "bf16+compile".
        calls: how many to profile; the figures are those of the call of median length.
        trace: file for the Chrome trace, which Perfetto opens too; compressed if its name ends in .gz.
        on_event: called with each event of the worker, such as {"event": "phase", "phase": "warm-up", "done": 2}.
        fields: the fields of `WorkloadRequest`, `timing` and `device`, as for `vivace.bench`.

    Raises:
        UsageError, UnknownModel, Unsupported, WorkerError, OutputError: see `vivace.errors`.
    """
    study = Study.of(model, [recipe], **fields)
    timing, device = study.timing, study.device
    request = checked_request(model, recipe, **fields)
    if timing.threads is None:
        timing = timing.model_copy(update={"threads": default_threads(request.located)})
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vivace-")))
        if launcher is None:
            launcher = stack.enter_context(start_launcher(device))
        environment = ask_environment(launcher, device, timing.threads)
        trial = Trial(
            model=request.located.model,
            recipe=request.recipe.spec,
            workload=request.workload,
            device=environment.device,
        )
        sources = None
        if request.sources is not None:
            sources = save_sources(folder / "sources", request.sources.by_sha)
        file = folder / ("trace.json.gz" if str(trace).endswith(".gz") else "trace.json")
        profile_request = ProfileRequest(
            trial=trial,
            timing=timing,
            calls=calls,
            environment=environment,
            trace=None if trace is None else str(file),
            threads=timing.threads,
            sources=sources,
        )
        measured = Profile.model_validate(
            ask(launcher, profile_request, timing.timeout_s, on_event or (lambda _: None))
        )
        if trace is not None:
            replace_from(Path(trace), file)
    return Profiled(measured)


_MAX_ATTEMPTS = 4
_MAX_EVENTS = 200_000
"""With Python's calls, a trace has several times as many events: longer calls are traced over fewer steps."""
_WAIT_STEPS = 4
_COMPRESSION = 6  # of trace files: a quarter of the time of 9, gzip's default, for 7 % more bytes


def profiled(
    trial: Trial,
    timing: Timing,
    num_calls: int,
    environment: Environment,
    file: Path | None,
    report: Report,
    sources: Path | None = None,
) -> Profile:
    """Profile whole calls after the warm-up; the figures are those of the call of median length, and so is the trace
    `file`."""
    try:
        return _profiled(
            Measurement(trial, timing, report, sources), trial, num_calls, environment, file, report
        )
    except Exception as error:
        outcome, reason = explain(error)
        if outcome is Outcome.CRASHED:
            traceback.print_exc()  # to the worker's log
        raise Unsupported(f"{trial.recipe.text} cannot be profiled: {reason}") from error


def _profiled(
    measurement: Measurement,
    trial: Trial,
    num_calls: int,
    environment: Environment,
    file: Path | None,
    report: Report,
) -> Profile:
    with measurement.load_and_apply(MemoryMeter(trial.device)) as session:
        prompt_arguments = measurement.prompt_arguments(session)
        timed = measurement.timed(session, prompt_arguments)
        measurement.warm_up(timed)
        call = trial.workload.calls()[0]
        plain = timed(0)

        def next_call(**overrides: Any) -> Callable[[], Any]:
            """Return the call to trace, with its prompts encoded or forgotten beforehand."""
            return partial(draw, session, call, prompt_arguments(call), **overrides)

        def record(part: Path | None) -> Trace:
            return traced(session.pipe, next_call(), part)

        traces: list[Trace] = []
        num_discarded = 0
        for index in range(num_calls):
            report({"event": "phase", "phase": "profiled call", "done": index})
            part = None if file is None else _part(file, index)
            trace, discarded = _steady_trace(partial(record, part))
            traces.append(trace)
            num_discarded += discarded
        order = sorted(range(num_calls), key=lambda index: traces[index].end - traces[index].start)
        middle = order[(num_calls - 1) // 2]
        trace = traces[middle]
        if file is not None:
            report({"event": "phase", "phase": "trace file"})
            _finish(_part(file, middle), file)
        report({"event": "phase", "phase": "synchronisations"})
        steps = int(session.defaults["num_inference_steps"])
        shorter: dict[str, Any] = {}
        if len(trace.host) > _MAX_EVENTS and steps > _WAIT_STEPS:
            shorter = {"num_inference_steps": trial.workload.steps_that_run(_WAIT_STEPS)}
        waits = host_waits(session.pipe, next_call(**shorter))
        report({"event": "phase", "phase": "evidence"})
        kernels = measurement.attention_kernels(session, prompt_arguments)
        refuted = session.refuted(session.evidence() | {"attention_kernels": kernels})
        report({"event": "phase", "phase": "tables"})
        with uncollected():
            busy = breakdown.busy_us(trace) / 1e6 if trace.device else None
            length = (trace.end - trace.start) / 1e6
            gaps = breakdown.gaps(trace)
            return Profile(
                trial=trial,
                environment=environment,
                warmup_s=measurement.results["warmup_s"],
                steady=measurement.results["steady"],
                plain_s=plain.total_s,
                traced_s=length,
                gpu_busy_s=busy,
                gpu_idle_s=None if busy is None else length - busy,
                host_late_s=None if busy is None else sum(gap.host_late_s for gap in gaps),
                num_calls=num_calls,
                num_discarded=num_discarded,
                num_denoiser_calls=plain.num_denoiser_calls,
                operators=tuple(
                    breakdown.operators(trace, [other for other in traces if other is not trace])
                ),
                kernels=tuple(breakdown.kernels(trace)),
                families=tuple(breakdown.families(trace)),
                components=tuple(breakdown.components(trace)),
                gaps=tuple(gaps),
                waits=tuple(waits),
                memory=breakdown.memory(trace),
                warnings=(
                    *session.warnings,
                    *((f"no effect: {refuted}",) if refuted else ()),
                    *_warnings(measurement, trace, trial, _WAIT_STEPS if shorter else None),
                ),
            )


def _part(file: Path, index: int) -> Path:
    return file.with_name(f"{index}.json")


def _finish(part: Path, file: Path) -> None:
    if file.suffix != ".gz":
        part.replace(file)
        return
    with part.open("rb") as source, gzip.open(file, "wb", compresslevel=_COMPRESSION) as target:
        shutil.copyfileobj(source, target, 1 << 20)


def _steady_trace(trace_call: Callable[[], Trace]) -> tuple[Trace, int]:
    """Return the first trace of a call in which nothing was compiled or tuned, and how many were discarded."""
    for num_discarded in range(_MAX_ATTEMPTS):
        before = num_graphs()
        trace = trace_call()
        if num_graphs() == before and not trace.compiling:
            return trace, num_discarded
    names = f" ({', '.join(trace.compiling[:3])})" if trace.compiling else ""
    raise Unsupported(
        f"something was compiled or tuned in each of {_MAX_ATTEMPTS} calls{names}, so that a profile would show "
        "compiling; give more --warmup, or a recipe that does not compile again"
    )


def _warnings(measurement: Measurement, trace: Trace, trial: Trial, wait_steps: int | None) -> list[str]:
    warnings = []
    if not measurement.results["steady"]:
        warnings.append("the warm-up ended before the times were steady; give more --warmup")
    if trial.device == "cuda" and not trace.device:
        warnings.append("the trace has no kernels: the driver does not let this process trace the GPU")
    if wait_steps is not None:
        warnings.append(
            f"synchronisations were looked for in a call of {wait_steps} steps, to keep the trace small"
        )
    return warnings
