"""Tables in JSON: lists of objects, lists of lists, objects of lists and objects of objects, at any depth."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.evidence.lint.contributions import KEY, contribution_tables
from vivace.evidence.lint.file_tables import Table
from vivace.foundation.untrusted.files import parse_json

_HEADINGS = ("columns", "headers", "header", "headings", "fields")
_LABEL = "name"


def json_tables(file: Path, text: str, *, is_lines: bool) -> list[Table]:
    """Return the tables of a JSON text, or of one with a value in each line.

    Raises:
        ValueError: it is not JSON, or says that it is a contribution and is none.
    """
    # Only line feeds end a line of JSON; other separators may stand in its texts.
    lines = [line for line in text.split("\n") if line.strip()]
    content: Any = [parse_json(line) for line in lines] if is_lines else parse_json(text)
    if isinstance(content, dict) and KEY in content:
        return contribution_tables(file, content)
    tables: list[Table] = []
    _collect(file, "", content, tables)
    return tables


def _collect(file: Path, name: str, content: Any, tables: list[Table]) -> None:
    """Add the table that a list or an object is, then those inside it."""
    if isinstance(content, list):
        if rows := [
            (number, _flat(value)) for number, value in enumerate(content, 1) if isinstance(value, dict)
        ]:
            _add(file, name, rows, tables)
        elif content and all(isinstance(value, list) for value in content):
            _add_lists(file, name, content, None, tables)
            return
        for value in content:
            _collect_inside(file, name, value, tables)
    elif isinstance(content, dict):
        if _is_table_of_columns(content):
            lists = [list(row) for row in zip(*content.values(), strict=True)]
            _add_lists(file, name, lists, [str(key) for key in content], tables)
            return
        if rows := _rows_by_key(content):
            _add(file, name, rows, tables)
            for value in content.values():
                _collect_inside(file, name, value, tables)
            return
        if name == "":
            _add(file, name, [(1, _flat({k: v for k, v in content.items() if k not in _HEADINGS}))], tables)
        _collect_inside(file, name, content, tables)


def _collect_inside(file: Path, name: str, content: Any, tables: list[Table]) -> None:
    if isinstance(content, list):
        _collect(file, name, content, tables)
    if not isinstance(content, dict):
        return
    headings = next((content[key] for key in _HEADINGS if _are_texts(content.get(key))), None)
    for key, value in content.items():
        below = f"{name}.{key}".lstrip(".")
        if headings is not None and _are_lists(value, len(headings)):
            _add_lists(file, below, value, headings, tables)
        elif isinstance(value, list | dict) and value is not headings:
            _collect(file, below, value, tables)


def _add(file: Path, name: str, rows: Sequence[tuple[int, dict[str, str]]], tables: list[Table]) -> None:
    headings = tuple(dict.fromkeys(key for _, row in rows for key in row))
    if not headings:
        return
    table = Table(file, headings, context=name, unit="row")
    for number, row in rows:
        table.add(number, [row.get(key, "") for key in headings])
    tables.append(table)


def _add_lists(
    file: Path, name: str, rows: Sequence[Sequence[Any]], headings: Sequence[str] | None, tables: list[Table]
) -> None:
    """Add a table of lists, whose first is the headings if none are given and it has only texts."""
    first = 1
    if headings is None:
        if not _are_texts(rows[0]) or len(rows) < 2:
            return
        headings, rows, first = [str(value) for value in rows[0]], rows[1:], 2
    table = Table(file, tuple(headings), context=name, unit="row")
    for number, row in enumerate(rows, first):
        table.add(number, [_text(value) or "" for value in row])
    tables.append(table)


def _is_table_of_columns(content: dict[str, Any]) -> bool:
    """Whether an object has a list for each of several columns, all of one length."""
    lists = list(content.values())
    return (
        len(lists) > 1
        and all(
            isinstance(value, list) and value and not isinstance(value[0], list | dict) for value in lists
        )
        and len({len(value) for value in lists}) == 1
    )


def _rows_by_key(content: dict[str, Any]) -> list[tuple[int, dict[str, str]]]:
    """Return the rows of an object whose values are objects with the same keys, each with its own key as its name."""
    if len(content) < 2 or not all(isinstance(value, dict) for value in content.values()):
        return []
    shared = set.intersection(*(set(value) for value in content.values()))
    flat = [(key, _flat(value)) for key, value in content.items()]
    if not shared or not all(row for _, row in flat):
        return []
    return [(number, {_LABEL: key} | row) for number, (key, row) in enumerate(flat, 1)]


def _are_texts(content: Any) -> bool:
    return isinstance(content, list) and bool(content) and all(isinstance(value, str) for value in content)


def _are_lists(content: Any, width: int) -> bool:
    return (
        isinstance(content, list)
        and bool(content)
        and all(isinstance(value, list) and len(value) == width for value in content)
    )


def _flat(content: dict[str, Any], before: str = "") -> dict[str, str]:
    """Return an object's texts and numbers by the path of their keys."""
    flat: dict[str, str] = {}
    for key, value in content.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{key}.")
        elif (text := _text(value)) is not None:
            flat[before + key] = text
    return flat


def _text(value: Any) -> str | None:
    """Return a text or a number as a cell, a list of them by how many there are; None for everything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and not any(isinstance(value, list | dict) for value in value):
        return f"{len(value)} values"
    return json.dumps(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
