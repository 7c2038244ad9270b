"""The demo: a series of recipes on an embedded model, each with one more technique than the one before."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.rounds.worker_requests import WORKER, RaceRequest, ask, start_launcher
from vivace.benchmark.run import Run
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.studies import run_study
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import Study
from vivace.foundation.spec.timing import Timing
from vivace.models.find import find_model
from vivace.runtime.workloads import default_threads

MODEL = "tiny-sd"
STEPS = 30
PROMPT_SET, SEEDS = "tinyworld", 1  # the quality gate needs several prompts
# Techniques that keep the image and need no compiler. A race on this machine picks the fastest.
CANDIDATES = ("bf16", "fp16", "channels_last", "attention(math)", "int8")
_CLEARLY_FASTER = 0.97  # of the baseline's time
_CHANGES = ("tiny_vae", "steps(20)", "scheduler(dpmpp_2m)", "cfg_cutoff(0.4)")
LONGEST = 1 + 1 + len(_CHANGES)  # the baseline, the winner of the race if it helps, the changes


def run_demo(
    *,
    store: str | Path = DEFAULT_STORE,
    rerun: bool = False,
    progress: Progress | None = None,
    worker: Sequence[str] = WORKER,
) -> tuple[Run, str]:
    """Benchmark the demo's recipes; return the run and the equivalent `vivace bench` command.

    There is one round. The first six of each recipe's thirteen images are its samples.
    """
    with start_launcher("auto", worker) as launcher:
        threads = default_threads(find_model(MODEL))
        request = RaceRequest(model=MODEL, recipes=("baseline", *CANDIDATES), device="auto", threads=threads)
        recipes = demo_recipes(ask(launcher, request, _RACE_S))
        study = Study.of(
            MODEL,
            recipes,
            prompt_set=PROMPT_SET,
            num_seeds=SEEDS,
            num_inference_steps=STEPS,
            timing=Timing(rounds=1, repeats=6, max_warmup=1),
        )
        line = f"vivace bench --model {MODEL} --num-inference-steps {STEPS} --prompt-set {PROMPT_SET} --seeds {SEEDS}"
        command = [*line.split(), "--rounds", "1", "--repeats", "6", "--warmup", "1"]
        for recipe in recipes:
            command += ["--recipe", recipe]
        line = shlex.join(command)
        settings = RunSettings(
            store=store, rerun=rerun, progress=progress or SILENT, command=line, launcher=launcher
        )
        return run_study(study, settings), line


def demo_recipes(times_s: dict[str, float]) -> list[str]:
    """Return the baseline, then recipes with one more technique each, by the seconds of the race of candidates."""
    fastest = min(times_s, key=times_s.__getitem__)
    helps = [fastest] if times_s[fastest] < _CLEARLY_FASTER * times_s["baseline"] else []
    changes = [*helps, *_CHANGES]
    return ["baseline"] + ["+".join(changes[: n + 1]) for n in range(len(changes))]


_RACE_S = 600.0
