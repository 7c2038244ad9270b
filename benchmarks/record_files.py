"""Records of benchmarks as files: a JSON list with one case per line, or lines of JSON."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from vivace.errors import StoreError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.record import Record

Kind = TypeVar("Kind", bound=Spec)
Key = TypeVar("Key")


def read_list(path: Path, kind: type[Kind]) -> list[Kind]:
    """Read a JSON list in its order; empty if there is no such file.

    Raises:
        StoreError: the file is not a list of this kind.
    """
    if not path.exists():
        return []
    try:
        return [kind.model_validate(item) for item in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError) as error:
        raise _not_a_record(path, error) from error


def read_lines(
    path: Path, line: Callable[[dict[str, Any]], str], key: Callable[[dict[str, Any]], Key]
) -> dict[Key, dict[str, Any]]:
    """Read one case a line by its key; empty if there is no such file.

    Args:
        line: describes a case, and so fails where one lacks what this script writes.

    Raises:
        StoreError: the file holds something else.
    """
    if not path.exists():
        return {}
    try:
        records = [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
        for case in records:
            line(case)
            Environment.model_validate(case["environment"])
        return {key(case): case for case in records}
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, ZeroDivisionError) as error:
        raise _not_a_record(path, error) from error


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write Records as a JSON list, atomically."""
    write_list(path, (record.model_dump_json() for record in records))


def write_list(path: Path, cases: Iterable[str]) -> None:
    """Write a JSON list atomically, one case per line.

    Args:
        cases: as JSON.
    """
    lines = ",\n".join(cases)
    write_text(path, f"[\n{lines}\n]\n")


def write_text(path: Path, text: str) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _not_a_record(path: Path, error: Exception) -> StoreError:
    why = str(error).splitlines()[0]
    return StoreError(f"{path} is not a record of this script ({why}); give --record another file")
