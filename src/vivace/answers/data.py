"""An answer as JSON, as CSV, as LaTeX, as JUnit's XML, or as whatever a format is called."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from vivace.answers.answer import Answer, Table
from vivace.answers.markdown import markdown_of
from vivace.answers.terminal import text_of
from vivace.errors import Unsupported
from vivace.foundation.untrusted.streams import csv_cell, plain


def written(answer: Answer, format_: str) -> str:
    """Return the answer as text that ends with a line."""
    if format_ == "json":
        return json.dumps(answer.data, indent=2) + "\n"
    if format_ == "csv":
        return csv_text(answer.table)
    if format_ == "latex":
        return "\n".join(_latex_lines(answer)) + "\n"
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


_LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "−": "$-$",
        "[": "{[}",
    }
)


def _latex_lines(answer: Answer) -> Iterator[str]:
    """Yield the tables of an answer, for documents that load booktabs; notes stand below their table."""
    for text in (*answer.about, answer.headline):
        yield f"% {' '.join(plain(text).split())}"
    for section in answer.sections:
        for table in section.blocks:
            if isinstance(table, Table) and table.rows and section.where != "page":
                yield from _latex_table(table)
    for part in answer.parts:
        yield from ("", *_latex_lines(part))


def _latex_table(table: Table) -> Iterator[str]:
    kept = table.kept("text")
    columns = [table.columns[number] for number in kept]
    notes = [f"{row.cells[0].text}: {note}" for row in table.rows for note in row.notes]
    if table.title:
        yield f"% {plain(table.title)}"
    yield r"\begin{tabular}{" + "".join("l" if c.is_text or c is columns[0] else "r" for c in columns) + "}"
    yield r"\toprule"
    yield " & ".join(_latex(column.name) for column in columns) + r" \\"
    yield r"\midrule"
    for row in table.rows:
        first, *others = (_latex(row.cells[number].text) for number in kept)
        yield " & ".join([rf"\texttt{{{first}}}" if table.is_code else first, *others]) + r" \\"
    yield from (r"\bottomrule", r"\end{tabular}")
    for note in (*notes, *table.note.splitlines()):
        yield rf"\par{{\footnotesize {_latex(note)}}}"


def _latex(text: str) -> str:
    return plain(text).translate(_LATEX)


def junit_of(answer: Answer) -> str:
    """Return the cases of an answer as JUnit's XML, which CI servers show as tests."""
    counts = Counter(case.outcome for case in answer.cases)
    numbers = {"tests": len(answer.cases), "failures": counts["failure"], "errors": counts["error"]}
    about = {name: str(number) for name, number in (numbers | {"skipped": counts["skipped"]}).items()}
    suite = ElementTree.Element("testsuite", {"name": f"vivace {answer.command}"} | about)
    for case in answer.cases:
        test = ElementTree.SubElement(suite, "testcase", classname=answer.command, name=plain(case.name))
        if case.outcome != "passed":
            ending = ElementTree.SubElement(test, case.outcome, message=plain(case.message))
            ending.text = plain(case.request)
        elif case.message:
            ElementTree.SubElement(test, "system-out").text = plain(case.message)
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, "unicode", xml_declaration=True) + "\n"


def dataframe(rows: Sequence[dict[str, Any]]) -> Any:
    """Return rows as a pandas DataFrame."""
    try:
        import pandas
    except ImportError:
        raise Unsupported("to_dataframe needs pandas: pip install pandas (to_dicts needs nothing)") from None
    return pandas.DataFrame(rows)
