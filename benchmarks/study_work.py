"""Count what the measured rows of the studies compute, so that their pages say how far each is from the GPU's limit.

    python -m benchmarks.study_work 002 --limit-s 500     count what results/study-002.json lacks; no GPU, seconds a row

The count goes into the row, and the ceilings of results/ceilings.json (`python -m benchmarks.ceilings`) into the
sittings of their GPU, driver and PyTorch. The record is written after each row. A row that cannot be counted, e.g. for
lack of a library that is installed elsewhere, is told and tried again the next time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import click

from benchmarks.ceilings import RECORD, ceilings_of
from benchmarks.command import MEASURED_IN_PART, locked, run
from benchmarks.sittings import write_sittings
from benchmarks.study_groups import RESULTS, own, record_file, record_of
from vivace.benchmark import studies
from vivace.benchmark.rounds.work import count_by_worker
from vivace.errors import UsageError, nearest
from vivace.evidence.studies.sittings import Sitting, SittingRow
from vivace.evidence.studies.study_file import published_studies
from vivace.foundation.spec.ceilings import Work
from vivace.foundation.spec.record import Outcome


@click.command("study_work")
@click.argument("names", nargs=-1, metavar="[STUDY]...")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), default=RESULTS, help="Of the records."
)
@click.option("--limit-s", type=click.FloatRange(min=0), help="Start no row after this many seconds.")
def command(names: Sequence[str], folder: Path, limit_s: float | None) -> int:
    """Count what measured rows compute, one line per row; resumable."""
    for name in names:
        if name not in published_studies():
            raise UsageError(f"no study '{name}'{nearest(name, published_studies())}")
    started = time.monotonic()
    with studies.start_launcher("cpu") as launcher:
        for name in names or published_studies():
            sittings = own(name, folder)
            for number, sitting in enumerate(sittings):
                sittings[number] = _with_ceilings(name, sitting, folder)
                for row in sitting.rows:
                    if row.round.outcome is not Outcome.MEASURED or row.round.work is not None:
                        continue
                    if limit_s is not None and time.monotonic() - started >= limit_s:
                        click.echo(f"{limit_s:g} s are over; the same command goes on", err=True)
                        return MEASURED_IN_PART
                    before = time.monotonic()
                    work = count_by_worker(record_of(sitting, row), row.round, launcher)
                    if work.components:
                        counted = row.model_copy(
                            update={"round": row.round.model_copy(update={"work": work})}
                        )
                        sittings[number] = _in_place(sittings[number], counted)
                        _write(name, folder, sittings)
                    click.echo(f"{name} {_line(sitting, row, work)} ({time.monotonic() - before:.0f} s)")
            if sittings:
                _write(name, folder, sittings)
    return 0


def _with_ceilings(name: str, sitting: Sitting, folder: Path) -> Sitting:
    measured = ceilings_of(sitting.environment, folder / RECORD.name)
    if measured is None:
        facts = sitting.environment
        click.echo(
            f"{name} {sitting.model.name}: no ceilings of {facts.device_name}, driver {facts.driver}, torch "
            f"{facts.libraries.get('torch')}; `python -m benchmarks.ceilings` measures them there"
        )
        return sitting
    return sitting.model_copy(update={"ceilings": measured})


def _in_place(sitting: Sitting, row: SittingRow) -> Sitting:
    rows = tuple(row if counted.recipe == row.recipe else counted for counted in sitting.rows)
    return sitting.model_copy(update={"rows": rows})


def _write(name: str, folder: Path, sittings: Sequence[Sitting]) -> None:
    """Write what was counted into the record, whose rows may have grown meanwhile."""
    path = record_file(name, folder)
    counted = {_key(row): row for sitting in sittings for row in sitting.rows}
    ceilings = {_key(sitting.rows[0]): sitting.ceilings for sitting in sittings if sitting.rows}
    with locked(path):
        updated = []
        for sitting in own(name, folder):
            rows = tuple(counted.get(_key(row), row) for row in sitting.rows)
            measured = ceilings.get(_key(rows[0])) if rows else None
            updated.append(
                sitting.model_copy(update={"rows": rows, "ceilings": measured or sitting.ceilings})
            )
        write_sittings(path, updated)


def _key(row: SittingRow) -> tuple[str, str]:
    return row.round.started_at, row.recipe.text


def _line(sitting: Sitting, row: SittingRow, work: Work) -> str:
    flop = sum(each.gemm_flop + each.conv_flop + each.attention_flop for each in work.components)
    count = f"{flop / 1e12:.3g} TFLOP" if work.components else f"not counted: {work.reason}"
    return f"{sitting.model.name} {row.recipe.text}: {count}"


if __name__ == "__main__":
    raise SystemExit(run(command))
