"""The demo: seed 001's story on the embedded model, one change after the other, each on top of the last."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vivace.benchmark.comparison import default_threads
from vivace.benchmark.launcher import WORKER
from vivace.benchmark.run import Run
from vivace.benchmark.runner import Progress, ask_race
from vivace.benchmark.store import DEFAULT_STORE
from vivace.benchmark.studies import run_study, start_launcher
from vivace.models.find import find_model
from vivace.spec.study import Study
from vivace.spec.timing import Timing

MODEL = "tiny-sd"
STEPS = 30
SEEDS = 2
# What may help a machine without changing the picture or compiling; which does is raced on the machine itself.
CANDIDATES = ("bf16", "fp16", "channels_last", "attention(math)", "int8")
_CLEARLY_FASTER = 0.97  # of the baseline's time
_CHANGES = ("tiny_vae", "steps(20)", "scheduler(dpmpp_2m)", "cfg_cutoff(0.4)")
LONGEST = 1 + 1 + len(_CHANGES)  # the baseline, what helps the machine if anything does, the changes


def run_demo(
    *,
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    worker: Sequence[str] = WORKER,
) -> tuple[Run, str]:
    """Bench the demo's recipes; returns the run and the equivalent `vivace bench` command.

    One round; the six pictures of each recipe are its samples; nothing is compiled.
    """
    with start_launcher("auto", worker) as launcher:
        threads = default_threads(find_model(MODEL))
        recipes = demo_recipes(ask_race(launcher, MODEL, ["baseline", *CANDIDATES], "auto", threads))
        study = Study.of(
            MODEL,
            recipes,
            num_seeds=SEEDS,
            num_inference_steps=STEPS,
            timing=Timing(rounds=1, repeats=6, max_warmup=1),
        )
        command = ["vivace", "bench", "--model", MODEL, "--num-inference-steps", str(STEPS)]
        command += ["--seeds", str(SEEDS), "--rounds", "1", "--repeats", "6", "--warmup", "1"]
        for recipe in recipes:
            command += ["--recipe", recipe]
        line = shlex.join(command)
        run = run_study(study, store=store, rerun=rerun, progress=progress, command=line, launcher=launcher)
        return run, line


def demo_recipes(times_s: dict[str, float]) -> list[str]:
    """The recipes, each the one before with one change more; the last is all of them together.

    Args:
        times_s: of a race between the baseline and what may help this machine.
    """
    fastest = min(times_s, key=times_s.__getitem__)
    helps = [fastest] if times_s[fastest] < _CLEARLY_FASTER * times_s["baseline"] else []
    changes = [*helps, *_CHANGES]
    return ["baseline"] + ["+".join(changes[: n + 1]) for n in range(len(changes))]
