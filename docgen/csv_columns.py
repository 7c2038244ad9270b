"""The page docs/csv-columns.md: what each column of the CSV means, from the list that makes them."""

from __future__ import annotations

from vivace.answers.markdown import markdown_lines
from vivace.report.csv_rows import COLUMNS

_TEXT = """{note}
# Columns of the CSV

What each column means that `vivace bench --format csv`, `vivace report --format csv` and `Run.to_dicts()` give, a row
for each recipe. Times are seconds per image, memory is bytes. A cell is empty where a row has no such figure: `reason`
and `warnings` say why. The name of a column never changes its meaning; new ones may come.

{columns}
"""


def page(note: str) -> str:
    """Return the page as Markdown."""
    rows = [(f"`{name}`", about) for name, (about, _) in COLUMNS.items()]
    return _TEXT.format(note=note, columns="\n".join(markdown_lines(("column", "meaning"), rows)))
