"""Run trials round by round, interleaved, each in its own process, and store each round the moment it ends."""

from __future__ import annotations

import contextlib
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from vivace.benchmark.launcher import Ending, Launcher, last_line
from vivace.benchmark.plan import Plan
from vivace.benchmark.store import Store
from vivace.errors import Unsupported, WorkerError
from vivace.spec.environment import Environment
from vivace.spec.record import Outcome, Record, Round
from vivace.spec.trial import Trial

_ASK_TIMEOUT_S = 600.0


class Progress(Protocol):
    """What a terminal or a log is told while trials run. `index` counts trials, the baseline is 0."""

    def begin(self, trials: list[Trial], plan: Plan, num_kept: int) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


class Silent:
    """No progress shown."""

    def begin(self, trials: list[Trial], plan: Plan, num_kept: int) -> None: ...
    def start_round(self, index: int, round_index: int) -> None: ...
    def event(self, event: dict[str, Any]) -> None: ...
    def end_round(self, index: int, round_: Round) -> None: ...
    def end(self) -> None: ...
    def end_quality(self, num_scored: int, num_drawn: int, seconds: float) -> None: ...


def ask_environment(launcher: Launcher, device: str, threads: int | None) -> Environment:
    """The environment as a worker sees it: this process never imports torch, nor touches a GPU."""
    return Environment.model_validate(
        _ask(launcher, {"kind": "environment", "device": device, "threads": threads})
    )


def ask_race(
    launcher: Launcher, model: str, recipes: list[str], device: str, threads: int
) -> dict[str, float]:
    """Seconds for a short call of each recipe (see benchmark.race); those that cannot run here are left out."""
    request = {"kind": "race", "model": model, "recipes": recipes, "device": device, "threads": threads}
    return {name: float(value) for name, value in _ask(launcher, request).items()}


def ask_largest_batch(launcher: Launcher, trial: Trial, threads: int | None) -> int:
    """The largest batch of the trial's recipe that fits the GPU.

    Raises:
        Unsupported: on a CPU, or not even one picture fits.
    """
    if trial.device != "cuda":
        raise Unsupported(
            "--batch max needs a GPU: a CPU's memory has no hard end, and batches do not make it faster; give numbers"
        )
    request = {"kind": "largest_batch", "trial": trial.model_dump(mode="json"), "threads": threads}
    found = int(_ask(launcher, request)["batch"])
    if found == 0:
        raise Unsupported(
            f"not even one picture of {trial.model.name} fits this GPU with {trial.recipe.text}"
        )
    return found


def _ask(launcher: Launcher, request: dict[str, Any]) -> dict[str, Any]:
    ending = launcher.run(request, timeout_s=_ASK_TIMEOUT_S)
    if ending.value is None:
        raise WorkerError(f"the worker process failed: {last_line(ending.log) or ending}")
    if "error" in ending.value:
        raise Unsupported(ending.value["error"])
    return ending.value


def run_trials(
    trials: list[Trial],
    environment: Environment,
    plan: Plan,
    store: Store,
    launcher: Launcher,
    *,
    rerun: bool = False,
    progress: Progress | None = None,
) -> list[Record]:
    """Measure what is not measured yet and return the trials' Records, in the trials' order.

    Rounds are interleaved, every second one in reverse order (A B B A), so that drift of the machine hits all trials
    alike. A trial that failed in a round is not tried in the later rounds of this run.
    """
    progress = progress or Silent()
    keys = [trial.key(environment) for trial in trials]
    todo = [
        (index, round_index)
        for round_index in range(plan.rounds)
        for index in _order(len(trials), round_index)
        if rerun or not _is_kept(store.rounds(keys[index]), round_index, plan)
    ]
    progress.begin(trials, plan, len(trials) * plan.rounds - len(todo))
    failed: set[int] = set()
    try:
        for index, round_index in todo:
            if index in failed:
                continue
            progress.start_round(index, round_index)
            round_ = _run_round(trials[index], round_index, plan, store, launcher, progress)
            store.append(keys[index], round_)
            if round_.outcome is not Outcome.MEASURED:
                failed.add(index)
            progress.end_round(index, round_)
    finally:
        progress.end()
    records = [_limited(store.record(key), plan.rounds) for key in keys]
    return [record for record in records if record is not None]


def _order(num_trials: int, round_index: int) -> list[int]:
    order = list(range(num_trials))
    return order if round_index % 2 == 0 else order[::-1]


def _is_kept(stored: dict[int, Round], round_index: int, plan: Plan) -> bool:
    """Whether a stored round answers the question: measured with samples enough, or finally failed."""
    earlier = [stored[i].outcome for i in range(round_index) if i in stored]
    if any(outcome.is_final and outcome is not Outcome.MEASURED for outcome in earlier):
        return True
    round_ = stored.get(round_index)
    if round_ is None or not round_.outcome.is_final:
        return False
    if round_.outcome is Outcome.MEASURED and plan.repeats is not None:
        return len(round_.samples) >= plan.repeats
    return True


def _limited(record: Record | None, rounds: int) -> Record | None:
    """Only the rounds that this run asked for; the store may hold more from an earlier, longer run."""
    if record is None:
        return None
    kept = tuple(r for r in record.rounds if r.index < rounds)
    return record.model_copy(update={"rounds": kept}) if kept else None


def _run_round(
    trial: Trial, round_index: int, plan: Plan, store: Store, launcher: Launcher, progress: Progress
) -> Round:
    started = datetime.now(UTC).isoformat(timespec="seconds")
    request = {
        "kind": "round",
        "trial": trial.model_dump(mode="json"),
        "round": round_index,
        "plan": plan.model_dump(mode="json"),
        "pictures": str((store.folder / "pictures").absolute()),
        "threads": plan.threads,
    }
    kills_before = _kernel_oom_kills()
    ending = launcher.run(request, plan.timeout_s, progress.event)
    if ending.value is not None:
        round_ = Round.model_validate(ending.value)
    else:
        outcome, reason = _explain(ending, plan, _kernel_oom_kills() > kills_before)
        round_ = Round(index=round_index, outcome=outcome, reason=reason, started_at=started)
    if round_.outcome is Outcome.CRASHED:
        _keep_log(store, trial, ending.log)
    return round_


def _explain(ending: Ending, plan: Plan, oom_killed: bool) -> tuple[Outcome, str]:
    if ending.timed_out:
        return Outcome.TIMED_OUT, f"the round took longer than {plan.timeout_s:g} s (--timeout) and was ended"
    if ending.signal == signal.SIGKILL and oom_killed:
        return Outcome.OUT_OF_MEMORY, "the system ran out of memory and killed the process"
    if ending.signal is not None:
        name = signal.Signals(ending.signal).name
        said = last_line(ending.log)
        return Outcome.CRASHED, f"the process was ended by {name}" + (f" ({said})" if said else "")
    said = last_line(ending.log) or "nothing"
    return Outcome.CRASHED, f"the process ended with status {ending.status}; its last words: {said}"


def _kernel_oom_kills() -> int:
    """How often the kernel's out-of-memory killer has struck, where Linux tells."""
    total = 0
    for path in (Path("/proc/vmstat"), Path("/sys/fs/cgroup/memory.events")):
        with contextlib.suppress(OSError, ValueError):
            for line in path.read_text().splitlines():
                if line.startswith("oom_kill "):
                    total += int(line.split()[1])
    return total


def _keep_log(store: Store, trial: Trial, log: str) -> None:
    """The worker's whole last words, for whoever wants to mend the crash."""
    with contextlib.suppress(OSError):
        folder = store.folder / "logs"
        folder.mkdir(exist_ok=True)
        (folder / f"{trial.recipe.digest()[:12]}.log").write_text(f"recipe: {trial.recipe.text}\n\n{log}")
