"""What README and docs/tuning.md say of real runs: what `python -m benchmarks.tuner_runs` recorded."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record_files import read_list
from benchmarks.tuner_runs import GROUPS, Group, Picks, TunerRun, in_words, picks_beside, shares_of_best
from vivace.answers.markdown import markdown_lines

START, END = "<!-- runs -->", "<!-- end of runs -->"
_NONE_YET = "No runs are recorded yet."
_HEADINGS = (
    "store", "proven", "times as fast, each run", "least of the best", "median", "recipes", "seconds"
)  # fmt: skip
_STORES: dict[Group, str] = {"empty": "empty", "demo": "after `vivace demo`"}


def filled(page: str, record: Path) -> str:
    """Return docs/tuning.md with the table of the record."""
    rows = read_list(record, TunerRun)
    return _between(page, _table(rows, picks_beside(record)) if rows else _NONE_YET)


def with_range(page: str, record: Path) -> str:
    """Return README with what its first two lines gave."""
    rows = [row for row in read_list(record, TunerRun) if row.group == "demo"]
    return _between(page, _range(rows) if rows else _NONE_YET)


def _between(page: str, text: str) -> str:
    before, rest = page.split(START, 1)
    _, after = rest.split(END, 1)
    return f"{before}{START}\n{text}\n{END}{after}"


def _range(rows: Sequence[TunerRun]) -> str:
    proven = [row for row in rows if row.is_proven]
    speedups = [row.speedup for row in proven if row.speedup is not None]
    number = "all" if len(proven) == len(rows) else f"{len(proven)}"
    reach = f", {min(speedups):.1f} to {max(speedups):.1f} times as fast as the baseline" if speedups else ""
    return (
        f"Of {len(rows)} runs of these two lines on {_devices(rows)}, {number} ended with a proven recipe{reach} "
        "([the runs](docs/tuning.md#real-runs))."
    )


def _table(rows: Sequence[TunerRun], picks: Picks | None) -> str:
    shares = shares_of_best(rows, picks)
    cells = []
    for group in GROUPS:
        of_group = [(row, share) for row, share in zip(rows, shares, strict=True) if row.group == group]
        if of_group:
            cells.append(_cells(group, *zip(*of_group, strict=True)))
    lines = [*markdown_lines(_HEADINGS, cells), "", f"On {_devices(rows)}. {in_words(rows, picks)}."]
    if picks is not None:
        lines[-1] += (
            " Shares of the best are of speed-ups that were measured in the same rounds, after the runs."
        )
    lines += [f"Nothing was proven in: {row.line(rows, picks)}." for row in rows if not row.is_proven]
    return "\n".join(lines)


def _devices(rows: Sequence[TunerRun]) -> str:
    return ", ".join(dict.fromkeys(row.device for row in rows if row.device is not None))


def _cells(group: Group, rows: Sequence[TunerRun], shares: Sequence[float]) -> list[str]:
    return [
        _STORES[group],
        f"{sum(row.is_proven for row in rows)} of {len(rows)}",
        ", ".join(f"{row.speedup:.2f}" if row.is_proven else "-" for row in rows),
        f"{min(shares):.2f}",
        f"{statistics.median(shares):.2f}",
        f"{statistics.median(row.trials or 0 for row in rows):g}",
        f"{statistics.median(row.seconds or 0.0 for row in rows):.0f}",
    ]
