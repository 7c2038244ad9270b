"""Files inside the page: tables and prompts as `data:` links, which a browser saves without network and without script.

Browsers refuse such links beyond some megabytes, and a page should stay small enough to be mailed. Larger tables are
not embedded; the page says how to get them.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from vivace.report.rows import Row
from vivace.report.table import render

MAX_LINK_BYTES = 1_500_000
"""Largest link: Chromium saves links of up to 2 MB."""
_TYPES = {"csv": "text/csv;charset=utf-8", "json": "application/json", "txt": "text/plain;charset=utf-8"}


@dataclass(frozen=True)
class OfferedFile:
    """A file to save. `uri` is None if it is too large to be embedded."""

    kind: str
    name: str
    uri: str | None
    num_bytes: int


def table_files(rows: Sequence[Row], stem: str, max_bytes: int = MAX_LINK_BYTES) -> tuple[OfferedFile, ...]:
    """Return the rows as CSV and JSON files, with the content that `vivace bench --format` prints.

    A large JSON file has the same content without line breaks.

    Args:
        stem: of the files' names.
        max_bytes: limit of each link.
    """
    rows_json = render(rows, "json")
    if link_bytes(rows_json) > max_bytes:
        rows_json = json.dumps(json.loads(rows_json), separators=(",", ":"), ensure_ascii=False) + "\n"
    return (
        text_file(render(rows, "csv"), "csv", stem, max_bytes),
        text_file(rows_json, "json", stem, max_bytes),
    )


def text_file(text: str, kind: str, stem: str, max_bytes: int = MAX_LINK_BYTES) -> OfferedFile:
    """Return a text as a file of a kind (csv, json, txt)."""
    content = text.encode()
    uri = None
    if link_bytes(text) <= max_bytes:
        uri = f"data:{_TYPES[kind]};base64,{base64.b64encode(content).decode()}"
    return OfferedFile(kind, f"{file_stem(stem)}.{kind}", uri, len(content))


def link_bytes(text: str) -> int:
    """Return the length of a text as base64."""
    return -(-len(text.encode()) // 3) * 4


def file_stem(text: str) -> str:
    """Return a text as a file name that every system takes, e.g. "org-model-2026-01-31"."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:100] or "vivace"
