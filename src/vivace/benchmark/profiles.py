"""Profile a recipe in a worker process: `vivace.profile`."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from vivace.answers.data import dataframe
from vivace.answers.terminal import text_of
from vivace.benchmark.rounds.runner import ask_environment
from vivace.benchmark.rounds.worker_requests import ProfileRequest, ask
from vivace.benchmark.store.images import save_sources
from vivace.benchmark.studies import start_launcher
from vivace.foundation.processes.launcher import Launcher, OnEvent
from vivace.foundation.spec.profiling import Profile
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.study import CallKeywords, Study
from vivace.foundation.spec.trial import Trial
from vivace.foundation.untrusted.destinations import replace_from
from vivace.report.profile_answer import ProfileChange, answer_of, changes, table_rows
from vivace.runtime.request import checked_request
from vivace.runtime.workloads import default_threads


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
        """Return `to_dicts` as a pandas DataFrame.

        Raises:
            Unsupported: pandas is not installed.
        """
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


def profile(
    model: str,
    recipe: str = BASELINE,
    *,
    calls: int = 3,
    trace: str | Path | None = None,
    launcher: Launcher | None = None,
    on_event: OnEvent | None = None,
    **fields: Unpack[CallKeywords],
) -> Profiled:
    """Profile one whole call of a recipe after the warm-up, in a separate process.

    Nothing is compiled or tuned inside the profiled call: such calls are discarded. Nothing is stored.

    Args:
        model: what `vivace.load` takes.
        recipe: e.g. "bf16+compile".
        calls: how many to profile; the figures are those of the call of median length.
        trace: file for the Chrome trace, which Perfetto opens too; compressed if its name ends in .gz.
        launcher: a running launcher; None to start one.
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
