"""Foreign text cannot control a terminal, break a Markdown table, or become a formula in a spreadsheet."""

import csv
import io

import pytest

from tests.make import make_record, make_round
from vivace.answers.data import written
from vivace.foundation.spec.record import Outcome
from vivace.foundation.untrusted.streams import (
    PlainStream,
    csv_cell,
    markdown_cell,
    markdown_code_cell,
    plain,
)
from vivace.report.rows import rows_of
from vivace.report.run_answer import answer_of

ESCAPE = "\x1b]0;owned\x07\x1b[31m\x9b2J"


def test_control_characters_become_visible() -> None:
    assert plain("a\tb\nc é 😀 \u200d") == "a\tb\nc é 😀 \u200d"
    assert plain("\x1b[2J\r\x00\x7f\x9b\u202e\u2028\udc80") == (r"\x1b[2J\x0d\x00\x7f\x9b\u202e\u2028\udc80")


def test_streams_pass_nothing_harmful_whoever_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = PlainStream(raw)
    print(f"x{ESCAPE}é", file=stream)
    stream.writelines(["\x1b"])
    raw.flush()
    assert raw.buffer.getvalue() == rb"x\x1b]0;owned\x07\x1b[31m\x9b2J\xe9" + b"\n" + rb"\x1b"
    assert not hasattr(stream, "buffer")


@pytest.mark.parametrize(
    ("encoding", "expected"),
    [
        ("ascii", '2 x 3 +- 1 - "_#" \\u65e5'),
        ("cp1252", "2 × 3 ± 1 – “_#” \\u65e5"),
        ("utf-8", "2 × 3 ± 1 – “▁█” 日"),
    ],
)
def test_what_a_terminal_lacks_has_a_plainer_form(encoding: str, expected: str) -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    PlainStream(raw).write("2 × 3 ± 1 – “▁█” 日")
    raw.flush()
    assert raw.buffer.getvalue().decode(encoding) == expected


@pytest.mark.parametrize(
    "value", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", '=cmd|" /C calc"!A0']
)
def test_no_text_is_a_formula(value: str) -> None:
    assert str(csv_cell(value)).startswith("'")


@pytest.mark.parametrize("value", [-1, -0.5, None, True, "a=1", "tiny_vae+bf16", "1-2"])
def test_other_cells_stay(value: object) -> None:
    assert csv_cell(value) is value or csv_cell(value) == value


def test_tables_hold_foreign_reasons() -> None:
    reason = f"=cmd|x{ESCAPE}\n](javascript:x) <img src=x>"
    failed = make_record("steps(5)", make_round(0, outcome=Outcome.CRASHED, reason=reason))
    rows = rows_of([make_record("baseline"), failed])
    row = list(csv.DictReader(io.StringIO(written(answer_of(rows), "csv"))))[1]
    assert row["reason"].startswith("'=cmd|x\\x1b]0")
    heading, *lines = [line for line in written(answer_of(rows), "md").splitlines() if line.startswith("|")]
    line = next(line for line in lines if "steps(5)" in line)
    assert line.replace("\\|", "").count("|") == heading.count("|")
    assert "\x1b" not in line
    assert "](" not in line
    assert "<img" not in line.replace("\\<", "")


def test_markdown() -> None:
    assert markdown_cell("a|b\nc") == "a\\|b c"
    assert markdown_code_cell("a") == "`a`"
    assert markdown_code_cell("a`b") == "`` a`b ``"
