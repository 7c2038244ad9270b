"""A table of texts on a terminal, as plain text, as Markdown and as CSV."""

import io

from rich.console import Console

from vivace.report.text_table import TextTable, csv_text

TABLE = TextTable(
    ("recipe", "s/image", "verdict"),
    [("tiny_vae+steps(20)", "1.2 s", "faster"), ("a|b\x1b[31m", "10.5 s", "-")],
    left=frozenset({"verdict"}),
    label_width=12,
)


def test_names_are_aligned_to_the_left_and_figures_to_the_right() -> None:
    assert TABLE.aligned() == [
        "recipe              s/image  verdict",
        "tiny_vae+steps(20)    1.2 s  faster",
        "a|b\\x1b[31m          10.5 s  -",
    ]


def test_no_cell_changes_a_table_in_markdown() -> None:
    assert TABLE.markdown()[:2] == ["| recipe | s/image | verdict |", "| --- | --- | --- |"]
    assert TABLE.markdown()[3] == "| a\\|b\\x1b[31m | 10.5 s | - |"


def test_a_long_label_breaks_at_a_plus_sign_on_a_terminal() -> None:
    out = io.StringIO()
    TABLE.print(Console(file=out, width=60, color_system=None))
    assert [line.split() for line in out.getvalue().splitlines()[1:3]] == [
        ["tiny_vae+", "1.2", "s", "faster"],
        ["steps(20)"],
    ]


def test_no_cell_of_csv_is_a_formula() -> None:
    assert csv_text(["name", "value"], [{"name": "=1+1", "value": -1.5}]) == "name,value\n'=1+1,-1.5\n"
