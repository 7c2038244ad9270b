"""An answer as JSON, as CSV, or as whatever a format is called."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

from vivace.answers.answer import Answer
from vivace.answers.markdown import markdown_of
from vivace.answers.terminal import text_of
from vivace.errors import Unsupported
from vivace.foundation.untrusted.streams import csv_cell


def written(answer: Answer, format_: str) -> str:
    """Return the answer as text that ends with a line.

    Args:
        format_: "table" or "text", "md", "json" or "csv".
    """
    if format_ == "json":
        return json.dumps(answer.data, indent=2) + "\n"
    if format_ == "csv":
        return csv_text(answer.table)
    return markdown_of(answer) if format_ == "md" else text_of(answer)


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Return rows, of which the first has every field, as CSV with a line of headings.

    No cell is a formula to a spreadsheet.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return out.getvalue()


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
