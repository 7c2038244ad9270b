"""Rows as a pandas DataFrame, for those who have pandas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vivace.errors import Unsupported


def dataframe(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame.

    Raises:
        Unsupported: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise Unsupported("to_dataframe needs pandas: pip install pandas (to_dicts needs nothing)") from None
    return pandas.DataFrame(rows)
