"""Real runs of README's first two lines: what the script measures, what it skips, and what it makes of it."""

from pathlib import Path
from typing import Any

from benchmarks.command import MEASURED_IN_PART
from benchmarks.record_files import read_list
from benchmarks.tuner_runs import (
    Planned,
    TunerRun,
    best_proven,
    in_words,
    measure,
    missing,
    row_of,
)
from docgen.tuner_runs import END, START, filled, with_range


def answer(recipe: str, ratio: float, verdict: str = "faster", quality: str = "passed") -> dict[str, Any]:
    row = {
        "recipe": recipe,
        "speedup": {"ratio": ratio, "ci95": [0.8 * ratio, 1.2 * ratio], "verdict": verdict},
        "quality": {"verdict": quality, "reason": "kept"},
        "rounds": 2,
        "pictures": [{}] * 39,
    }
    final = [{"recipe": "baseline", "latency": {"median_s": 0.8}}, row]
    return {"final": final, "pick": {"recipe": recipe}, "device": "a CPU", "trials": 7, "seconds": 200.0}


def test_it_goes_on_where_it_stopped_and_says_what_was_picked(tmp_path: Path, capsys: Any) -> None:
    made: list[Planned] = []
    now = [0.0]

    def tuned(of: Planned, folder: Path) -> tuple[int, dict[str, Any]]:
        made.append(of)
        now[0] += 300
        if of == ("demo", 0):
            return 4, {"notes": ["nothing can pass"]}
        return 0, answer("tiny_vae", 5.0 if of == ("empty", 1) else 2.0)

    record = tmp_path / "runs.json"
    assert measure(record, 800, tunes=tuned, repeats=2, clock=lambda: now[0]) == MEASURED_IN_PART
    assert made == [("demo", 0), ("demo", 1)], "no other would end in time"
    assert measure(record, None, tunes=tuned, repeats=2, clock=lambda: now[0]) == 0
    assert len(made) == len(set(made)) == len(read_list(record, TunerRun)) == 4
    output = capsys.readouterr().out
    assert "demo, run 1: no recipe (exit 4)" in output
    assert "demo, run 2: 2.00x [1.60, 2.40] tiny_vae; 1.00 of 2.00x, the best proven; faster" in output
    assert "3 of 4 runs end with a proven recipe" in output
    page = filled(f"before {START}\nold\n{END} after", record)
    assert "| after `vivace demo` | 1 of 2 | -, 2.00 | 0.50 |" in page
    assert "old" not in page
    readme = with_range(f"{START}\n{END}", record)
    assert "Of 2 runs" in readme
    assert "1 ended with a proven recipe, 2.0 to 2.0 times as fast" in readme


def test_what_bench_calls_unclear_is_not_proven_and_counts_as_the_baseline() -> None:
    answers = [("steps(8)", 9.0, "unclear"), ("steps(4)", 9.0, "faster", "unclear"), ("tiny_vae", 2.0)]
    rows = [row_of(("empty", k), 0, answer(*of)) for k, of in enumerate(answers)]
    assert [row.is_proven for row in rows] == [False, False, True]
    assert best_proven(rows) == (2.0, "tiny_vae")
    assert best_proven(rows, {"tiny_vae": 2.5}) == (2.5, "tiny_vae"), "side by side, if that was measured"
    assert "0.50 to 1.00 of it, 2 of them less than 0.8" in in_words(rows)
    assert len(missing(rows)) == 37
