"""The script that measures the published studies in pieces, and the pages of its records."""

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import studies as script
from benchmarks import study_groups
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.study_groups import own
from docgen.study_pages import page, printed
from tests import stub_worker
from vivace.benchmark import Timing
from vivace.evidence.studies.study_answer import value_text
from vivace.evidence.studies.study_columns import FIGURES
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.stats import Interval
from vivace.foundation.untrusted.streams import markdown_cell

Call = Callable[..., int]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """The script with a worker that answers at once, on the studies' own models."""
    monkeypatch.setattr(
        script.studies,  # type: ignore[attr-defined]
        "start_launcher",
        lambda device: Launcher(stub_worker.COMMAND, tries_gpu=False),
    )

    def called(*arguments: str, store: str = "store") -> int:
        places = ["--folder", str(tmp_path / "results"), "--store", str(tmp_path / store)]
        return run(script.command, [*arguments, *places])

    return called


def rows(folder: Path, name: str = "002") -> list[list[str]]:
    """The recipes of each sitting of a record."""
    return [[row.recipe.text for row in sitting.rows] for sitting in own(name, folder / "results")]


@pytest.mark.long
def test_a_study_is_measured_in_pieces(call: Call, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = "dtype(fp32)+attention(math)"
    assert call("002", "--limit-s", "0") == MEASURED_IN_PART
    assert "the same command goes on with 002 synthetic:sd15" in capfd.readouterr().err
    assert rows(tmp_path) == []

    assert call("002", "--only", "fp32+attention(math)+compile") == 0
    assert rows(tmp_path) == [[base, "dtype(fp32)+compile+attention(math)"]]
    lines = capfd.readouterr().out.splitlines()
    assert [line.startswith("002 synthetic:sd15 ") for line in lines] == [True, True]
    assert "1.00x" in lines[1]

    # Another machine: the store is new, so a new sitting begins with its baseline; the old row is not measured again.
    assert call("002", "--only", "fp32+attention(efficient)+compile", store="new") == 0
    assert rows(tmp_path)[1] == [base, "dtype(fp32)+compile+attention(efficient)"]
    # The same machine, at once: the sitting goes on.
    assert call("002", store="new") == 0
    assert [len(recipes) for recipes in rows(tmp_path)] == [2, 6]
    capfd.readouterr()

    assert call("002", store="third") == 0
    assert capfd.readouterr().out == "", "all is measured"
    assert not (tmp_path / "third").exists()
    assert call("002", "--rounds", "2", store="third") == 0
    assert [len(recipes) for recipes in rows(tmp_path)] == [2, 6, 7]
    text = page("002", "", tmp_path / "results")
    assert "**7 of 7 rows are measured**" in text
    assert "here: Test CPU" in text


def test_groups_share_a_sitting_where_model_and_workload_are_the_same() -> None:
    timing = Timing(rounds=1, repeats=3)
    groups = {group.name: group for group in study_groups.groups_of("004", timing)}
    (group,) = groups.values()
    assert [part.part.name for part in group.parts] == ["techniques", "combined", "members"]
    cached = "first_block_cache(hits=0.8)+attention(flash)"
    assert group.baselines([cached]) == ["dtype(fp16)", "baseline"]
    assert group.missing([]) == sorted(group.missing([]), key=lambda recipe: group.known_s[recipe])


@pytest.mark.parametrize("name", published_studies())
def test_the_page_has_every_table_of_the_source(name: str) -> None:
    """Each published value is in a cell of its row, and each remark and each reason of an empty cell is said.

    `make check` holds the page to what is generated.
    """
    text = (Path(__file__).parents[2] / "docs" / "studies" / f"{name}.md").read_text()
    for cell in read_study(name).cells:
        assert not cell.note or markdown_cell(cell.note) in text, cell
        if not cell.value:
            continue
        cell_text = printed(cell)
        if cell.metric in FIGURES and cell.gpu and cell.number is not None:
            cell_text = value_text(cell.metric, Interval(cell.number, None, None))
        lines = [
            line
            for line in text.splitlines()
            if line.startswith((f"| {markdown_cell(cell.row)} |", f"| `{cell.row}` |"))
        ]
        assert any(f"| {cell_text}" in line for line in lines), cell
