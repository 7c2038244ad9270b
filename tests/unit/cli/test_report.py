"""`vivace report`: a page, tables and charts of a store."""

import csv
import io
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.make import make_environment, make_round, make_trial
from tests.typed import run_vivace
from vivace.benchmark import Store
from vivace.foundation.spec.recipe_syntax import RecipeSpec, TechniqueCall

RECIPES = ("baseline", "tiny_vae", "steps(1)")
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose store has one run."""
    with Store.create(tmp_path / ".vivace") as store:
        trials = [make_trial(recipe, model="tiny-sd") for recipe in RECIPES]
        for key in store.add_trials(trials, make_environment()):
            store.append(key, make_round(0))
        store.start_run("vivace bench", trials, make_environment(), None, 1)
    return tmp_path


def test_the_tables_go_to_standard_output_or_to_a_file(folder: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(run_vivace(folder, "report", "--format", "csv").stdout)))
    assert tuple(row["recipe"] for row in rows) == RECIPES
    rows = json.loads(run_vivace(folder, "report", "--format", "json").stdout)
    assert tuple(row["recipe"] for row in rows) == RECIPES
    text = run_vivace(folder, "report", "--format", "md").stdout
    assert text.startswith("tiny-sd on Test CPU\n\n")
    assert "\n| recipe |" in text
    assert not list(folder.glob("*.html"))
    done = run_vivace(folder, "report", "--format", "csv", "-o", "rows.csv")
    assert done.stdout == "rows.csv\n"
    assert (folder / "rows.csv").read_text().count("\n") == 4
    run_vivace(folder, "report", "--format", "csv", "--title", "x", code=2)


def test_the_charts_are_files_of_their_own(folder: Path) -> None:
    done = run_vivace(folder, "report", "--charts", "charts")
    assert done.stdout.splitlines()[0] == "page.html"
    assert [Path(line) for line in done.stdout.splitlines()[1:]] == [
        Path("charts", name) for name in ("1-tiny-sd-times.svg", "1-tiny-sd-speed-and-memory.svg")
    ]
    for path in (folder / "charts").iterdir():
        drawn = ET.parse(path).getroot()
        assert drawn.tag == f"{SVG}svg"
        texts = " ".join("".join(text.itertext()) for text in drawn.iter(f"{SVG}text"))
        assert all(recipe in texts for recipe in RECIPES)
        assert not list(drawn.iter(f"{SVG}script"))
        assert "href" not in path.read_text()


def test_text_in_charts_is_escaped(tmp_path: Path) -> None:
    with Store.create(tmp_path / ".vivace") as store:
        trials = [make_trial("baseline", model="<script>\x1b&")]
        for key in store.add_trials(trials, make_environment()):
            store.append(key, make_round(0))
        store.start_run("vivace bench", trials, make_environment(), None, 1)
    run_vivace(tmp_path, "report", "--charts", "charts")
    (chart,) = (tmp_path / "charts").iterdir()
    assert chart.name == "1-script-times.svg"
    title = ET.parse(chart).getroot().find(f"{SVG}title")
    assert title is not None
    assert title.text == "<script>\\x1b& on Test CPU"


def test_rows_of_a_removed_technique_are_shown_and_not_recommended(folder: Path) -> None:
    call = TechniqueCall(name="token_merging", knobs={"ratio": 0.25, "levels": 1}, targets=("denoiser",))
    spec = RecipeSpec(text="token_merging(0.25)", techniques=(call,), same_picture=False)
    gone = make_trial("steps(2)", model="tiny-sd").model_copy(update={"recipe": spec})
    trials = [make_trial("baseline", model="tiny-sd"), gone]
    with Store.create(folder / ".vivace") as store:
        for key in store.add_trials(trials, make_environment()):
            store.append(key, make_round(0))
        store.start_run("vivace bench", trials, make_environment(), None, 1)
    rows = json.loads(run_vivace(folder, "report", "--format", "json").stdout)
    assert {"baseline", "token_merging(0.25)"} <= {row["recipe"] for row in rows}
    run_vivace(folder, "report")
    assert "token_merging(0.25)" in (folder / "page.html").read_text()
    advised = run_vivace(folder, "recommend", "tiny-sd", "--gpu", "cpu", "--format", "json").stdout
    assert "token_merging" not in json.dumps(json.loads(advised)["recipe"])
