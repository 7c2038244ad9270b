"""Progress of a benchmark on standard error: a live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
import rich.progress
from rich.progress import BarColumn, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from vivace.answers.formatting import clock, seconds, whole_words
from vivace.benchmark.progress import Progress
from vivace.cli.display.terminal import console
from vivace.foundation.spec.record import Outcome, Round
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.foundation.untrusted.streams import plain

# Share of a round that has passed when a phase begins; timing is interpolated.
_PHASE_STARTS = {
    "load": 0.0,
    "apply": 0.05,
    "first call": 0.1,
    "warm-up": 0.2,
    "timing": 0.4,
    "pictures": 0.9,
    "evidence": 0.97,
}

_BAR = 24  # characters; half of it on a terminal that is not _WIDE
_WIDE = 110
_CLOCK = 36  # characters of the longest clock, and of the gaps between the columns
_SLOW_LOAD_S = 1.0  # shorter loading times are not printed
_QUALITY_EVERY_S = 10.0  # between lines about the quality pass, where there is no live line


def title(trial: Trial) -> str:
    """Return the common part of the trials of a comparison: the model, a task other than text, a batch above 1."""
    workload = trial.workload
    task = f", {workload.task_in_words}" if workload.task != "text" else ""
    return trial.model.name + task + (f", batch {workload.batch}" if workload.batch > 1 else "")


class _RoundCount(Progress):
    """State of both kinds of progress: the trials, the number of rounds and the one that is running."""

    def __init__(self) -> None:
        self.trials: list[Trial] = []
        self.total = 0
        self.done = 0
        self.started = 0.0
        self.label = ""
        self.batch = 1
        self._quality = ""
        self._quality_began = 0.0, 0
        self._said = 0.0
        self._to_run = Counter[int]()
        self._begun = Counter[int]()

    def set_trials(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.trials = trials
        self.total = len(todo)
        self.done = 0
        self.started = time.monotonic()
        self._to_run = Counter(index for index, _ in todo)
        self._begun = Counter[int]()
        num_kept = sum(max(0, timing.rounds - self._to_run[index]) for index in range(len(trials)))
        num_rounds = self.total + num_kept
        line = f"{title(trials[0])}: {num_rounds} {'round' if num_rounds == 1 else 'rounds'}"
        if num_kept:
            line += f", {num_kept} already measured (--rerun measures them again)"
        if num_kept and len(trials) > 1 and self._to_run[0]:
            line += "; the baseline is measured again beside the others"
        click.echo(line, err=True)

    def quality(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if what != self._quality:
            self._begin_quality(what, done)
            self._said = now
            click.echo(f"quality pass, {total} images: {what}", err=True)
        elif now - self._said >= _QUALITY_EVERY_S:
            self._said = now
            left = self.quality_left(done, total)
            click.echo(f"quality pass: {what}, {done} of {total}" + (f"  ({left})" if left else ""), err=True)

    def _begin_quality(self, what: str, done: int) -> None:
        self._quality = what
        self._quality_began = time.monotonic(), done

    def quality_left(self, done: int, total: int) -> str:
        """Return the estimated time left of the quality pass's current part."""
        began, first = self._quality_began
        if done <= first:
            return ""
        left = (time.monotonic() - began) / (done - first) * (total - done)
        return f"about {clock(left)} left"

    def end_quality(self, num_scored: int, num_drawn: int, seconds_: float) -> None:
        self._quality = ""
        if num_scored or num_drawn:
            drawn = f"{num_drawn} images generated for the noise floor, " if num_drawn else ""
            click.echo(f"quality pass: {drawn}{num_scored} compared, in {seconds(seconds_)}", err=True)

    def set_round(self, index: int) -> None:
        self.label = self.trials[index].title
        self.batch = self.trials[index].workload.batch
        self._begun[index] += 1
        if self._to_run[index] > 1:
            self.label += f"  round {self._begun[index]}/{max(self._to_run[index], self._begun[index])}"

    def count_round(self) -> None:
        self.done += 1
        self.total = max(self.total, self.done)

    def count_again(self, event: dict[str, Any]) -> None:
        """Subtract the rounds of a lost place, which another place measures again."""
        again: dict[int, int] = event.get("again", {})
        self.done -= sum(again.values())
        self._begun.subtract(again)

    def left(self, part: float) -> str:
        """Return the estimated time left; `part` is the share of the running round that has passed."""
        passed = self.done + part
        if passed < 0.3:
            return ""
        left = (time.monotonic() - self.started) / passed * (self.total - passed)
        return f"about {clock(left)} left"


class PlainProgress(_RoundCount):
    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.set_trials(trials, timing, todo)

    def start_round(self, index: int, round_index: int) -> None:
        self.set_round(index)

    def event(self, event: dict[str, Any]) -> None:
        if "lost" in event:
            self.count_again(event)
            click.echo(lost(event), err=True)

    def end_round(self, index: int, round_: Round) -> None:
        self.count_round()
        left = self.left(0.0) if self.done < self.total else ""
        line = f"[{self.done}/{self.total}] {self.label}: {result(round_, self.batch)}"
        click.echo(line + (f"  ({left})" if left else ""), err=True)

    def end(self) -> None: ...


class TerminalProgress(_RoundCount):
    """Show one live line: recipe, phase, current estimate, bar, time left."""

    def __init__(self) -> None:
        super().__init__()
        terminal = console(stderr=True)
        self._bar = rich.progress.Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=_BAR if terminal.width >= _WIDE else _BAR // 2),
            _Clock(self),
            console=terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._part = 0.0
        self._phase_started = 0.0
        self._times: list[float] = []
        self._quality_done = 0, 1

    def begin(self, trials: list[Trial], timing: Timing, todo: Sequence[tuple[int, int]]) -> None:
        self.set_trials(trials, timing, todo)
        if self._task is not None:  # of the previous comparison
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task("starting", total=max(1, self.total))
        self._bar.start()

    def start_round(self, index: int, round_index: int) -> None:
        self.set_round(index)
        self._times = []
        self._show("start", 0.0)

    def event(self, event: dict[str, Any]) -> None:
        if "lost" in event:
            self.count_again(event)
            self._bar.console.print(Text(lost(event), "yellow"))
            return
        phase = event.get("phase", "")
        part = _PHASE_STARTS.get(phase, 0.0)
        if phase == "timing":
            self._times.append(event["last_s"])
            num_calls = event.get("of")
            share = event["done"] / num_calls if num_calls else event["spent_s"] / event["cap_s"]
            part += 0.5 * min(1.0, share)
            typical = sorted(self._times)[len(self._times) // 2]
            phase = f"timing, {event['done']}{f' of {num_calls}' if num_calls else ''} calls, {seconds(typical)} each"
        elif phase == "warm-up":
            phase = f"warm-up, call {event['done'] + 1}"
        self._show(phase, part)

    def end_round(self, index: int, round_: Round) -> None:
        self.count_round()
        style = "green" if round_.outcome is Outcome.MEASURED else "yellow"
        terminal = self._bar.console
        label = whole_words(self.label, terminal.width)
        terminal.print(Text.assemble((f"{label}  ", "bold"), (result(round_, self.batch), style)))
        self._show("", 0.0)

    def end(self) -> None:
        self._bar.stop()

    def quality(self, what: str, done: int, total: int) -> None:
        if what != self._quality:
            self._begin_quality(what, done)
            if self._task is not None:
                self._bar.remove_task(self._task)
            self._task = self._bar.add_task(what, total=max(1, total))
            self._phase_started = time.monotonic()
            self._bar.start()
        assert self._task is not None
        self._quality_done = done, total
        self._bar.update(self._task, description=f"quality pass: {what}, {done} of {total}", completed=done)

    def end_quality(self, num_scored: int, num_drawn: int, seconds_: float) -> None:
        self._bar.stop()
        super().end_quality(num_scored, num_drawn, seconds_)

    def clock_texts(self) -> str:
        """Return the round's number, the phase's duration and the time left; called at each refresh."""
        if self._quality:
            left = self.quality_left(*self._quality_done)
            return clock(time.monotonic() - self._phase_started) + (f"  {left}" if left else "")
        count = f"{min(self.done + 1, self.total)}/{self.total}"
        duration = time.monotonic() - self._phase_started
        phase = f"  {clock(duration)}" if duration >= 3 else ""
        return f"{count}{phase}  {self.left(self._part)}"

    def _show(self, phase: str, part: float) -> None:
        assert self._task is not None
        self._part = part
        self._phase_started = time.monotonic()
        width = self._bar.console.width
        room = width - len(phase) - _CLOCK - (_BAR if width >= _WIDE else _BAR // 2)
        most = min(48, max(8, room))
        short = self.label if len(self.label) <= most else self.label[: most - 1] + "…"
        self._bar.update(self._task, description=f"{short}  {phase}", completed=self.done + part)


class _Clock(ProgressColumn):
    """Show the clock of a TerminalProgress. It advances even while a phase, such as compiling, reports nothing."""

    def __init__(self, progress: TerminalProgress) -> None:
        super().__init__(Column(no_wrap=True))
        self._progress = progress

    def render(self, task: Task) -> Text:
        return Text(self._progress.clock_texts(), style="dim")


def with_progress(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the Python API that shows its progress where somebody watches, unless one is given."""

    @functools.wraps(function)
    def shown(*args: Any, **kwargs: Any) -> Any:
        given = {name: value for name, value in kwargs.items() if value is not None}
        return function(
            *args, **(kwargs | _displays(function.__name__, kwargs) | given if is_watched() else kwargs)
        )

    return shown


def is_watched() -> bool:
    """Whether this is a notebook, an IPython shell, or a program on a terminal."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None or (sys.stderr is not None and sys.stderr.isatty())


def _displays(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    from vivace.cli.measuring.compare import say_pair
    from vivace.cli.measuring.prove import ProofProgress
    from vivace.cli.measuring.tune import SearchDisplay

    if name == "compare":
        return {"on_pair": say_pair}
    if name == "tune":
        return {"watcher": SearchDisplay(given.get("minutes"), given.get("trials"))}
    return {"progress": ProofProgress() if name == "prove" else for_this_terminal()}


def for_this_terminal() -> PlainProgress | TerminalProgress:
    return TerminalProgress() if sys.stderr.isatty() else PlainProgress()


def lost(event: dict[str, Any]) -> str:
    """Describe the loss of a place, and where its rounds run instead."""
    return plain(
        f"{event['lost']} was lost: {event['why']}; its finished rounds are kept, the others are measured elsewhere"
    )


def result(round_: Round, batch: int = 1) -> str:
    """Return a finished round's time and number of samples, or its outcome and reason."""
    if round_.outcome is not Outcome.MEASURED:
        return f"{round_.outcome.value}: {round_.reason}"
    times = sorted(s.total_s / batch for s in round_.samples)
    text = f"{seconds(times[len(times) // 2])} an image, {len(times)} samples"
    if round_.load_s is not None and round_.load_s >= _SLOW_LOAD_S:
        text += f", loaded in {seconds(round_.load_s)}"
    return text
