"""The table of docs/tuning.md about real runs: what `python -m benchmarks.tuner_runs` recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record_files import read_list
from benchmarks.tuner_runs import GROUPS, Picks, TunerRun, best_proven, in_words, picks_beside, speedup_of
from vivace.report.text_table import markdown_lines

START, END = "<!-- runs -->", "<!-- end of runs -->"
_NONE_YET = "No runs are recorded yet."
_HEADINGS = (
    "model", "minutes", "proven", "times as fast, each run", "median of the best", "recipes", "seconds"
)  # fmt: skip


def filled(page: str, record: Path) -> str:
    """Return the page with the table of the record."""
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    rows = read_list(record, TunerRun)
    return f"{before}{START}\n{_text(rows, picks_beside(record)) if rows else _NONE_YET}\n{END}{after}"


def _text(rows: Sequence[TunerRun], picks: Picks | None) -> str:
    cells = []
    for model, minutes in GROUPS:
        of_group = [row for row in rows if (row.model, row.minutes) == (model, minutes)]
        if of_group:
            cells.append(_cells(model, minutes, of_group, best_proven(model, rows, picks)[0], picks))
    best = "; ".join(
        f"of {model} `{recipe}`, {speedup:.2f}x"
        for model in dict.fromkeys(row.model for row in rows)
        for speedup, recipe in [best_proven(model, rows, picks)]
    )
    devices = ", ".join(dict.fromkeys(row.device for row in rows if row.device is not None))
    lines = markdown_lines(_HEADINGS, cells)
    lines += ["", f"On {devices}. {in_words(rows, picks)}. The best is {best}. A star: beside a busy core."]
    if picks is not None:
        lines[-1] += (
            " Shares of the best are of speed-ups that were measured in the same rounds, after the runs."
        )
    lines += [f"Nothing was proven in: {row.line}." for row in rows if not row.is_proven]
    return "\n".join(lines)


def _cells(
    model: str, minutes: float, rows: Sequence[TunerRun], best: float, picks: Picks | None
) -> list[str]:
    speedups = [row.speedup or 1.0 if row.is_proven else 1.0 for row in rows]
    each = ", ".join(
        f"{speedup:.2f}{'*' if row.beside else ''}" if row.is_proven else f"-{'*' if row.beside else ''}"
        for speedup, row in zip(speedups, rows, strict=True)
    )
    trials = statistics.median(row.trials or 0 for row in rows)
    seconds = statistics.median(row.seconds or 0.0 for row in rows)
    proven = sum(row.is_proven for row in rows)
    share = statistics.median(speedup_of(row, picks) for row in rows) / best
    counts = (f"{trials:g}", f"{seconds:.0f}")
    return [model, f"{minutes:g}", f"{proven} of {len(rows)}", each, f"{share:.2f}", *counts]
