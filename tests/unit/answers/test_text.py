"""Any answer on a terminal, as Markdown and as CSV."""

import io

from rich.console import Console

from vivace.answers.answer import Answer, Cell, Fact, Facts, Section, Table, TableColumn, TableRow
from vivace.answers.data import csv_text, written
from vivace.answers.markdown import markdown_of, table_markdown
from vivace.answers.terminal import print_answer, table_lines, text_of

COLUMNS = (
    TableColumn("recipe", is_text=True),
    TableColumn("s/image"),
    TableColumn("verdict", is_text=True),
    TableColumn("n", rank=2),
)
TABLE = Table(
    COLUMNS,
    (
        TableRow((Cell("tiny_vae+steps(20)"), Cell("1.2 s"), Cell("faster"), Cell("100")), ("slow | first",)),
        TableRow((Cell("a|b\x1b[31m"), Cell("10.5 s"), Cell("-"), Cell("7")), look="bad"),
    ),
)
LONG = "vivace bench --recipe baseline --recipe " + "tiny_vae+" * 9 + "steps(3)"
ANSWER = Answer(
    "x",
    "the answer",
    about=("tiny-sd",),
    sections=(Section("Table", (TABLE,)), Section("More", ("text",), is_detail=True)),
    facts=Facts((Fact("gain", "1.5x"), Fact("sure", "high", is_detail=True))),
    notes=("careful",),
    commands=(Fact("next", LONG, is_command=True),),
)


def test_names_are_aligned_to_the_left_and_figures_to_the_right() -> None:
    assert [line for line, _ in table_lines(TABLE)][:3] == [
        "recipe              s/image  verdict    n",
        "tiny_vae+steps(20)    1.2 s  faster   100",
        "a|b\\x1b[31m          10.5 s  -          7",
    ]


def test_a_narrow_terminal_drops_columns_then_breaks_a_label_at_a_plus_sign() -> None:
    lines = [line.split() for line, _ in table_lines(TABLE, 34)]
    assert lines[0] == ["recipe", "s/image", "verdict"]
    assert lines[1:3] == [["tiny_vae+", "1.2", "s", "faster"], ["steps(20)"]]
    for width in (40, 80, 120):
        out = io.StringIO()
        print_answer(ANSWER, Console(file=out, width=width, color_system=None))
        assert "10.5 s" in out.getvalue()


def test_a_short_answer_leaves_details_out_and_a_command_can_be_copied() -> None:
    brief, whole = text_of(ANSWER, details=False), text_of(ANSWER)
    assert "sure" in whole
    assert "More" in whole
    assert "sure" not in brief
    assert "More" not in brief
    assert brief.index("tiny-sd") < brief.index("the answer") < brief.index("recipe") < brief.index("careful")
    assert "next " in brief
    (first, second) = [line for line in whole.splitlines() if "--recipe" in line]
    assert first.endswith("\\")
    assert second.startswith(" " * 10)


def test_no_cell_changes_a_table_in_markdown() -> None:
    lines = table_markdown(TABLE)
    assert lines[:2] == ["| recipe | s/image | verdict | n | notes |", "| --- | --- | --- | --- | --- |"]
    assert lines[2].endswith("| slow \\| first |")
    assert lines[3] == "| a\\|b\\x1b[31m | 10.5 s | - | 7 |  |"
    assert "\n- sure: high\n" in markdown_of(ANSWER)


def test_no_cell_of_csv_is_a_formula() -> None:
    assert csv_text([{"name": "=1+1", "value": -1.5}]) == "name,value\n'=1+1,-1.5\n"


def test_a_table_in_latex_is_escaped_and_keeps_its_notes() -> None:
    rows = (
        TableRow((Cell("tiny_vae@a,b"), Cell("1.2 s"), Cell("50 % & more"), Cell("3")), ("slow_start {1}",)),
        TableRow((Cell("[x]\\y\x1b"), Cell("−1 s"), Cell("$~^"), Cell("7"))),
    )
    table = Table(COLUMNS, rows, title="Times", is_code=True)
    text = written(
        Answer("x", "fast", sections=(Section("", (table,)), Section("", (table,), "page"))), "latex"
    )
    assert text == (
        "% fast\n% Times\n"
        "\\begin{tabular}{lrlr}\n\\toprule\nrecipe & s/image & verdict & n \\\\\n\\midrule\n"
        "\\texttt{tiny\\_vae@a,b} & 1.2 s & 50 \\% \\& more & 3 \\\\\n"
        "\\texttt{{[}x]\\textbackslash{}y\\textbackslash{}x1b} & $-$1 s & "
        "\\$\\textasciitilde{}\\textasciicircum{} & 7 \\\\\n"
        "\\bottomrule\n\\end{tabular}\n\\par{\\footnotesize tiny\\_vae@a,b: slow\\_start \\{1\\}}\n"
    )
