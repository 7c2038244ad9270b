"""How often `vivace compare` is wrong, and how many pairs it needs: simulated pairs of known truth.

A part of `python -m benchmarks.coverage`. Processes, machine and calls vary as there.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.noises import MACHINE_SD, NOISES, PROCESS_SDS, draw_round
from vivace.foundation.stats.ratios import pair_logs
from vivace.foundation.stats.sequential import DEFAULT_MAX_PAIRS, decide_logs, looks
from vivace.foundation.stats.verdicts import Verdict

FAIL_IF = 0.03
SLOWDOWNS = (0.0, 0.01, 0.03, 0.05, 0.10)
"""True slowdowns of the second recipe: none, that at which "same" ends, that which is allowed, and real ones."""


def cases(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each case: noise, process_sd, slowdown, and the shares of its comparisons."""
    for noise, process_sd, slowdown in itertools.product(NOISES, PROCESS_SDS, SLOWDOWNS):
        case = {"noise": noise, "process_sd": process_sd, "slowdown": slowdown}
        yield case | simulate_pairs(noise, process_sd, slowdown, repeats)


def simulate_pairs(noise: str, process_sd: float, slowdown: float, repeats: int) -> dict[str, float]:
    """Return the shares of simulated comparisons that end with each verdict, and the mean number of pairs.

    `failed`, `passed`, `undecided`: the same with an allowed slowdown of FAIL_IF; `fail_if_pairs` are its pairs.
    """
    generator = np.random.default_rng(zlib.crc32(repr((noise, process_sd, slowdown)).encode()))
    count = dict.fromkeys((*Verdict, "failed", "passed", "undecided"), 0)
    pairs = fail_if_pairs = 0
    steps = looks(DEFAULT_MAX_PAIRS)
    for _ in range(repeats):
        logs, errors = _pairs(noise, process_sd, slowdown, generator)
        for fail_if in (None, FAIL_IF):
            for number in steps:
                decision = decide_logs(logs[:number], errors[:number], len(steps) + 1, fail_if)
                if decision.is_final:
                    break
            if fail_if is None:
                count[decision.verdict] += 1
                pairs += decision.num_pairs
            else:
                count[{True: "failed", False: "passed", None: "undecided"}[decision.regressed]] += 1
                fail_if_pairs += decision.num_pairs
    shares = {str(name): number / repeats for name, number in count.items()}
    return shares | {"pairs": pairs / repeats, "fail_if_pairs": fail_if_pairs / repeats}


def _pairs(
    noise: str, process_sd: float, slowdown: float, generator: np.random.Generator
) -> tuple[list[float], list[float]]:
    machine = np.exp(MACHINE_SD * generator.standard_normal(DEFAULT_MAX_PAIRS))
    levels = np.exp(process_sd * generator.standard_normal((2, DEFAULT_MAX_PAIRS)))
    levels[1] *= 1 + slowdown
    drawn = [
        [
            draw_round(NOISES[noise], generator, None) * level * speed
            for level, speed in zip(of, machine, strict=True)
        ]
        for of in levels
    ]
    logs, errors = pair_logs(*drawn)
    assert errors is not None
    return logs, errors
