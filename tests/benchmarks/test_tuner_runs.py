"""The script that runs `vivace tune` twenty times: what it measures, what it skips, and what it makes of it."""

import os
from pathlib import Path
from typing import Any

from benchmarks.command import MEASURED_IN_PART
from benchmarks.record_files import read_list
from benchmarks.tuner_runs import Planned, TunerRun, busy_cores, measure, planned, row_of, summary
from docs.tuner_runs import END, START, filled


def answer(recipe: str, ratio: float, low: float, rounds: int = 2, verdict: str = "passed") -> dict[str, Any]:
    row = {
        "recipe": recipe,
        "speedup": {"ratio": ratio, "ci95": [low, 2 * ratio - low], "verdict": "faster"},
        "quality": {"verdict": verdict, "reason": "kept"},
        "rounds": rounds,
        "pictures": [{}] * 39,
    }
    final = [{"recipe": "baseline", "latency": {"median_s": 0.8}}, row]
    return {"final": final, "pick": {"recipe": recipe}, "device": "a CPU", "trials": 7, "seconds": 200.0}


def test_the_twenty_runs_and_those_beside_a_busy_core() -> None:
    every = planned()
    assert len(every) == len(set(every)) == 20
    assert sorted((of.model, of.minutes) for of in every if of.beside) == [("tiny-flux", 4), ("tiny-sd", 4)]
    assert {(of.model, of.minutes) for of in every[:4]} == {(of.model, of.minutes) for of in every}


def test_it_goes_on_where_it_stopped_and_says_what_was_proven(tmp_path: Path, capsys: Any) -> None:
    made: list[Planned] = []
    now = [0.0]

    def tuned(of: Planned, folder: Path) -> tuple[int, dict[str, Any]]:
        made.append(of)
        now[0] += 100
        if of.repeat == 0 and of.model == "tiny-flux":
            return 4, {"notes": ["nothing can pass"]}
        return 0, answer("tiny_vae", 2.0, 1.5)

    record = tmp_path / "runs.json"
    assert measure(record, 300, tuned, lambda: now[0]) == MEASURED_IN_PART
    assert len(made) == len(read_list(record, TunerRun)) == 3
    assert measure(record, None, tuned, lambda: now[0]) == 0
    assert len(made) == len(set(made)) == 20
    output = capsys.readouterr().out
    assert "tiny-flux, 4 min, run 1: nothing proven (exit 4): nothing can pass" in output
    assert "19 of 20 runs end with a proven recipe" in output
    page = filled(f"before {START}\nold\n{END} after", record)
    assert "| tiny-flux | 4 | 4 of 5 | -, 2.00, 2.00, 2.00, 2.00* | 1.00 | 7 | 200 |" in page
    assert "old" not in page
    assert page.startswith("before")


def test_only_an_interval_of_several_rounds_and_a_passed_quality_prove() -> None:
    of = Planned("synthetic:sd15", 4.0, 0, 0)
    rows = [
        row_of(of, 0, answer("tiny_vae", 3.0, 1.5)),
        row_of(of, 0, answer("tiny_vae", 2.0, 1.5)),
        row_of(of, 0, answer("steps(8)", 9.0, 0.9)),
        row_of(of, 0, answer("steps(8)", 9.0, 5.0, rounds=1)),
        row_of(of, 0, answer("steps(8)", 9.0, 5.0, verdict="unclear")),
    ]
    assert [row.is_proven for row in rows] == [True, True, False, False, False]
    figures = summary(rows)
    assert figures["proven"] == 2
    assert figures["median_of_best"] == 1 / 2.5, "an unproven run counts as the baseline"


def test_a_core_is_busy_meanwhile_and_then_let_go() -> None:
    before = len(_children())
    with busy_cores(1):
        assert len(_children()) == before + 1
    assert len(_children()) == before


def _children() -> list[str]:
    """Return the processes that this one has started, by their number."""
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
