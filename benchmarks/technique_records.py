"""Files of records in the order of measurement: a row stands after the baseline that was measured beside it.

A file may hold rows of several GPUs; rows are compared with a baseline on their own GPU."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from benchmarks.command import locked
from benchmarks.record_files import read_list, write_records
from benchmarks.technique_cases import Key
from vivace.errors import StoreError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.spec.record import Record
from vivace.report.rows import Row, rows_of


def key_of(record: Record) -> Key:
    return record.trial.recipe.text, record.trial.workload.num_inference_steps


def _where(record: Record) -> tuple[str, Key]:
    return record.environment.device_name, key_of(record)


def num_timed(record: Record) -> int:
    """Return the number of timed calls of all rounds."""
    return sum(len(round_.samples) for round_ in record.rounds)


def read_records(path: Path) -> list[Record]:
    """Read the records in the order of measurement; empty if there is no such file.

    Raises:
        StoreError: the file is not a list of Records.
    """
    return read_list(path, Record)


def check_device(records: Iterable[Record], new: Record, path: Path) -> None:
    """Check that a record is of the same device as the others, since rows are compared with each other.

    Raises:
        StoreError: the file is of another device.
    """
    for old in records:
        if old.environment.device_name != new.environment.device_name:
            raise StoreError(
                f"{path} was made on {old.environment.device_name}, and this is {new.environment.device_name}; give "
                "--record another file"
            )


def add(new: Record, path: Path, baseline: str = BASELINE, behind: Record | None = None) -> list[Record]:
    """Add a record to the file, which other processes may have changed. Failed attempts are replaced; baselines are all
    kept, each for the rows after it.

    Args:
        baseline: the baseline recipe in canonical form.
        behind: the baseline that the same process measured before. Another process may have added one since, from
            another GPU, with which the new record must not be compared.

    Returns:
        All records of the file.

    Raises:
        StoreError: the file cannot be read.
    """
    with locked(path):
        records = read_records(path)
        kept = [old for old in records if key_of(old)[0] == baseline or _where(old) != _where(new)]
        index = len(kept)
        if behind is not None and key_of(new)[0] != baseline:
            start = [record.model_dump_json() for record in kept].index(behind.model_dump_json()) + 1
            others = (k for k in range(start, len(kept)) if key_of(kept[k]) == key_of(behind))
            index = next(others, index)
        kept.insert(index, new)
        write_records(path, kept)
    return kept


def add_group(beside: Record, news: Sequence[Record], path: Path) -> list[Record]:
    """Add rows after the baseline that was measured beside them, in place of this GPU's older rows of the same keys.
    Baselines that no row is compared with are dropped.

    Returns:
        All records of the file.

    Raises:
        StoreError: the file cannot be read.
    """
    own, replaced = key_of(beside)[0], {_where(new) for new in news}
    with locked(path):
        records = read_records(path)
        kept = [
            (record, base) for record, base in with_baselines(records, own) if _where(record) not in replaced
        ]
        used = [base for _, base in kept if base is not None]
        remaining = [
            record for record, base in kept if base is not None or any(record is base_ for base_ in used)
        ]
        remaining += [beside, *news]
        write_records(path, remaining)
    return remaining


def by_gpu(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of each GPU, in order."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record.environment.device_name, []).append(record)
    return grouped


def row_of(record: Record, among: Sequence[Record], baseline: str = BASELINE) -> Row:
    """Return a record's row, compared with its baseline."""
    (row,) = [row for row in rows_with_baselines(among, baseline) if row.record is record]
    return row


def with_baselines(records: Sequence[Record], baseline: str = BASELINE) -> list[tuple[Record, Record | None]]:
    """Return each record with the latest earlier baseline of the same GPU and number of steps; None for a baseline.

    Args:
        baseline: the baseline recipe in canonical form.
    """
    paired: list[tuple[Record, Record | None]] = []
    latest: dict[tuple[str, int], Record] = {}
    for record in records:
        recipe, steps = key_of(record)
        where = record.environment.device_name, steps
        if recipe == baseline:
            latest[where] = record
        if recipe == baseline or where in latest:
            paired.append((record, None if recipe == baseline else latest[where]))
    return paired


def rows_with_baselines(records: Sequence[Record], baseline: str = BASELINE) -> list[Row]:
    """Return one row per record, in order, compared as `with_baselines` says."""
    return [
        rows_of([record] if beside is None else [beside, record])[-1]
        for record, beside in with_baselines(records, baseline)
    ]
