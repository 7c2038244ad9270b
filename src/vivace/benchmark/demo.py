"""The demo: a series of recipes on an embedded model, each with one more technique than the one before."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.benchmark.progress import SILENT, Progress
from vivace.benchmark.rounds.worker_requests import WORKER, RaceRequest, ask
from vivace.benchmark.run import Run
from vivace.benchmark.run_settings import RunSettings
from vivace.benchmark.studies import run_study, start_launcher
from vivace.errors import NoEffect, Unsupported
from vivace.foundation.spec.settings import DEFAULT_STORE
from vivace.foundation.spec.study import Study
from vivace.foundation.spec.timing import Timing
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.session import Session
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
    """Return the recipes: the baseline, then each with one more technique than the one before.

    Args:
        times_s: the result of the race between the baseline and the candidates, seconds by recipe.
    """
    fastest = min(times_s, key=times_s.__getitem__)
    helps = [fastest] if times_s[fastest] < _CLEARLY_FASTER * times_s["baseline"] else []
    changes = [*helps, *_CHANGES]
    return ["baseline"] + ["+".join(changes[: n + 1]) for n in range(len(changes))]


_RACE_S = 600.0
_STEPS = 10
_ROUNDS = 4
_TOO_SLOW = 3.0  # recipes slower than this multiple of the fastest are dropped after the first call


def race(model: str, recipes: Sequence[str], device: str) -> dict[str, float]:
    """Return each recipe's best time for a call of a few steps, seconds. Calls are interleaved.

    Recipes that are unsupported here, change nothing, or are far slower than the fastest (fp16 on a CPU that emulates
    it) are left out.
    """
    located = find_model(model)
    sessions: dict[str, Session] = {}
    for recipe in recipes:
        try:
            sessions[recipe] = open_session(located, resolve(recipe), device, {"num_inference_steps": _STEPS})
        except (Unsupported, NoEffect):
            continue
    # Two steps without decoding find the recipes that are too slow. Twice, since the
    # first call also loads kernels.
    short = {"num_inference_steps": 2, "output_type": "latent"}
    short_s = {recipe: min(_time(s, **short), _time(s, **short)) for recipe, s in sessions.items()}
    remaining = [recipe for recipe in sessions if short_s[recipe] <= _TOO_SLOW * min(short_s.values())]
    rounds = [{recipe: _time(sessions[recipe]) for recipe in remaining} for _ in range(_ROUNDS)]
    return {recipe: min(times[recipe] for times in rounds) for recipe in remaining}


def _time(session: Session, **call: Any) -> float:
    start = time.perf_counter()
    session("a red circle", **call)
    return time.perf_counter() - start
