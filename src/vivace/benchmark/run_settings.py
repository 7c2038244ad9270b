"""How a study is run: one frozen object that every function passes on unchanged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vivace.benchmark.progress import SILENT, Deadline, Progress
from vivace.benchmark.store.compared import Purpose
from vivace.errors import UsageError
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import Study
from vivace.foundation.stats.until import Until

if TYPE_CHECKING:
    from vivace.benchmark.places.local_pool import NumGpus
    from vivace.benchmark.places.spread_trials import Pool


@dataclass(frozen=True)
class RunSettings:
    """How a study is run, apart from what it measures: nothing here is part of a row's key.

    Attributes:
        store: the folder of the store; created if there is none.
        rerun: measure stored rounds again.
        progress: receives events while rounds run.
        command: the command line to store with the run; None for the equivalent `vivace bench`.
        launcher: a running launcher; None to start one.
        gpus: spread the trials over this many GPUs of this host, or "all"; each measures its own baseline.
        ray: spread the trials over a Ray cluster: its address, "auto" for a running one, "local" to start one here.
        pool: places to spread the trials over, instead of those that `gpus` or `ray` name.
        deadline: by which it has to end, with what has been measured; in one place only.
        canaries: in each of two or more rounds, time a few calls of its first recipe once more at its end, in a process
            of their own: the machine's changes are corrected for, or widen the interval.
        until: go on beyond the study's rounds until each recipe has one of these answers; in one place only.
        max_minutes: with `until`, start no round that would end later.
        purpose: what the run is for, as the store keeps it.
        plan: after all timing on a GPU, predict the memory of each trial as `vivace plan` does; takes seconds.
    """

    store: str | Path = DEFAULT_STORE
    rerun: bool = False
    progress: Progress = SILENT
    command: str | None = None
    launcher: Launcher | None = None
    gpus: NumGpus | None = None
    ray: str | None = None
    pool: Pool | None = None
    deadline: Deadline | None = None
    canaries: bool = True
    until: Until | str | None = None
    max_minutes: float = 60.0
    purpose: Purpose = Purpose.COMPARISON
    plan: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.until, str):
            object.__setattr__(self, "until", Until.parse(self.until))

    @property
    def folder(self) -> Path:
        """The folder of the store."""
        return Path(self.store)

    @property
    def is_spread(self) -> bool:
        """Whether the trials are spread over several places."""
        return self.pool is not None or self.gpus is not None or self.ray is not None

    def check(self, study: Study) -> None:
        """Refuse settings that exclude each other, or that the study cannot have."""
        flag = "--gpus" if self.gpus is not None else "--ray" if self.ray is not None else None
        if self.until is not None and (flag is not None or self.rerun):
            raise UsageError(f"--until continues stored rounds, in one place; leave out {flag or '--rerun'}")
        if flag is None:
            return
        if self.gpus is not None and self.ray is not None:
            raise UsageError("--gpus and --ray exclude each other: Ray takes the GPUs of its own nodes")
        if self.gpus is not None and study.device == "cpu":
            raise UsageError("--gpus: --device cpu has no GPUs; leave out one of them")
        if self.gpus is not None and self.gpus != "all" and self.gpus < 1:
            raise UsageError(f"--gpus {self.gpus}: give a number from 1, or all")
        if "max" in study.workload.batches:
            raise UsageError(
                f"{flag}: --batch max is found on one GPU; run that first, and give the number here"
            )


DEFAULT_SETTINGS = RunSettings()
