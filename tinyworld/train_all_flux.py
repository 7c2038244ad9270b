"""Run all trainings of the FLUX family, its VAEs and tiny-clip on one GPU, in calls of limited length.

    python -m tinyworld.train_all_flux --out build/flux --bring DIR                      the first call
    python -m tinyworld.train_all_flux --out build/flux --bring DIR --carried build/flux-carried    later calls

Every stage is a separate process (`python -m tinyworld.train_...`). A stage that needs a finished training starts after
it; a stage that only needs another stage's model starts together with it, compiles, and then waits. All stop resumably
STOP_MARGIN_S before the limit. The files for the next call are written to `--bring` (see `carry`) each time a stage
ends, every REFRESH_S, and finally BRING_MARGIN_S before the limit. When all stages are finished, it does nothing.
"""

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from tinyworld import carry

STOP_MARGIN_S = 75.0
"""Trainings end this long before the limit: saving takes seconds, and an interrupted save would lose the whole call."""
BRING_MARGIN_S = 40.0
REFRESH_S = 90.0
TRIES = 2
POLL_S = 0.5
SQUEEZE = 0.4
"""Share by which a training may be shortened after a slow start to end within this call."""


@dataclass(frozen=True)
class Stage:
    """One training. `after`: stages that must be finished before it starts; `least_s`: minimum remaining time."""

    name: str
    module: str
    makes: str  # the folder that it leaves
    minutes: float
    arguments: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    least_s: float = 60.0
    gpu: int = 0  # of a machine that has several; modulo their number


STAGES = (
    # First call: the VAE alone decides how soon the teacher starts, so only the small scorer runs beside it.
    Stage("vae-16", "train_vae", "vae-16", 2.2, ("--channels", "16")),
    Stage("clip", "train_clip", "tiny-clip", 4.0, ("--scenes", "100000"), gpu=1),
    # Second call.
    Stage("t5", "train_t5", "t5", 0.7, ("--scenes", "100000")),
    Stage(
        "flux-teacher", "train_flux", "tiny-flux-teacher", 4.7, ("--stage", "teacher", "--scenes", "200000")
    ),
    Stage(
        "flux-student",
        "train_flux",
        "tiny-flux",
        2.2,
        ("--stage", "student", "--scenes", "150000"),
        least_s=120.0,
    ),
    # Third call.
    Stage("flux-schnell", "train_schnell", "tiny-flux-schnell", 3.5, after=("flux-student",), least_s=240.0),
    Stage(
        "tiny-vae-16",
        "train_tiny_vae",
        "tiny-flux-tiny-vae",
        4.0,
        ("--channels", "16"),
        after=("flux-student",),
        least_s=200.0,
        gpu=1,
    ),
)
STUDENT = "flux-student"
SPENT = ("t5", "flux-teacher")
"""Stages whose models are no longer needed once the student's folder exists."""


@dataclass
class Running:
    stage: Stage
    process: subprocess.Popen[bytes]
    log: TextIO


@dataclass
class StageRunner:
    """Runs the stages until all are finished or the time limit is reached."""

    out: Path
    bring: Path
    limit_s: float
    common: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = STAGES
    gpus: int = 1
    start_from: Path | None = None  # an earlier teacher's folder, for T5 and teacher to train on from
    running: list[Running] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)
    started: float = field(default_factory=time.perf_counter)

    @property
    def left_s(self) -> float:
        """Seconds until trainings must have stopped."""
        return self.limit_s - STOP_MARGIN_S - (time.perf_counter() - self.started)

    def finished(self, name: str) -> bool:
        stage = next(stage for stage in self.stages if stage.name == name)
        if any(run.stage is stage for run in self.running) or not carry.is_finished(self.out, name):
            return False
        return (name in SPENT and self._student_is_there()) or (self.out / stage.makes).exists()

    def _student_is_there(self) -> bool:
        return any(stage.name == STUDENT and (self.out / stage.makes).exists() for stage in self.stages)

    def run(self) -> bool:
        """Run the stages; return whether all are finished."""
        self.out.mkdir(parents=True, exist_ok=True)
        refreshed = time.perf_counter()
        while True:
            ended = self._collect()
            self._start_ready_stages()
            now = time.perf_counter()
            if ended or now - refreshed > REFRESH_S:
                self._bring()
                refreshed = time.perf_counter()
            over = self.left_s < BRING_MARGIN_S - STOP_MARGIN_S
            if over or not self.running:
                break
            time.sleep(POLL_S)
        for run in self.running:  # only what did not stop by itself, half a minute late
            self._say(f"{run.stage.name} did not stop in time; its last checkpoint stays")
            run.process.kill()
            run.process.wait()
            run.log.close()
        self.running.clear()
        self._bring()
        unfinished = [stage.name for stage in self.stages if not self.finished(stage.name)]
        self._say(f"to do: {', '.join(unfinished)}" if unfinished else "all finished")
        return not unfinished

    def _collect(self) -> bool:
        """Collect the stages that have ended; return whether there were any."""
        over = [run for run in self.running if run.process.poll() is not None]
        for run in over:
            run.log.close()
            self.running.remove(run)
            self._say(f"{run.stage.name} ended with {run.process.returncode}")
        return bool(over)

    def _start_ready_stages(self) -> None:
        busy = {run.stage.name for run in self.running}
        for stage in self.stages:
            tries = self.tries.get(stage.name, 0)
            if (
                stage.name not in busy
                and tries < TRIES
                and not self.finished(stage.name)
                and all(self.finished(name) for name in stage.after)
                and self.left_s >= stage.least_s
            ):
                self._start(stage, tries)

    def _start(self, stage: Stage, tries: int) -> None:
        self.tries[stage.name] = tries + 1
        command = [sys.executable, "-m", f"tinyworld.{stage.module}", "--out", str(self.out)]
        command += ["--minutes", str(stage.minutes), "--stop-s", f"{self.left_s:.0f}"]
        command += ["--squeeze", str(SQUEEZE), *stage.arguments, *self.common]
        if self.start_from and stage.name in ("t5", "flux-teacher"):
            command += ["--start-from", str(self.start_from)]
        if tries:  # the most robust settings for a second try
            command += ["--no-compile", "--no-graph"]
        environment = dict(os.environ)
        if self.gpus > 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(stage.gpu % self.gpus)
        log = (self.out / f"{stage.name}.log").open("a", encoding="utf-8")
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.running.append(Running(stage, process, log))
        self._say(f"{stage.name} starts")

    def _bring(self) -> None:
        folders = frozenset(stage.makes for stage in self.stages if stage.name in SPENT)
        leave = folders if self._student_is_there() else frozenset()
        size = carry.pack(self.out, self.bring, leave)
        self._say(f"{size / 2**20:.1f} MiB to bring")

    def _say(self, what: str) -> None:
        print(f"{time.perf_counter() - self.started:5.0f} s  {what}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to work in")
    parser.add_argument("--bring", type=Path, required=True, help="folder for the files of the next call")
    parser.add_argument("--carried", type=Path, help="folder with the files of an earlier call")
    parser.add_argument("--limit-s", type=float, default=595.0, help="when the machine ends this process")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--common", default="", help="arguments for every training, in one string")
    parser.add_argument("--start-from", type=Path, help="an earlier teacher's folder, to train on from")
    args = parser.parse_args()
    if args.carried:
        carry.unpack(args.carried, args.out)
    runner = StageRunner(
        args.out,
        args.bring,
        args.limit_s,
        tuple(args.common.split()),
        gpus=args.gpus,
        start_from=args.start_from,
    )
    sys.exit(0 if runner.run() else 4)


if __name__ == "__main__":
    main()
