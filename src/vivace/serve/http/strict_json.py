"""Untrusted JSON: a duplicate name is an error, since parsers differ in the value they keep."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

_MOST_DIGITS = 100


def parsed_json(text: str | bytes) -> Any:
    """Parse a JSON text strictly.

    Raises:
        JSONDecodeError, UnicodeDecodeError: it is not JSON.
        ValueError: it is too deep, has a number that is too long, or gives a name twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice[:100]!r} is given twice; give it once")
    return content


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)
