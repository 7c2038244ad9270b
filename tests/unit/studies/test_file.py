"""Study files: what they may say, and what a mistake in one reads like."""

import re
from pathlib import Path
from typing import get_args

import pytest

from vivace.errors import RecipeError, UsageError
from vivace.evidence.studies import read_study
from vivace.evidence.studies.expand import StudyRow, expand
from vivace.evidence.studies.study_columns import FIGURES
from vivace.evidence.studies.study_file import Claim, Part

HEAD = 'title = "T"\n'
PART = HEAD + '[[part]]\nname = "p"\nmodels = ["tiny-sd"]\n'


def write(folder: Path, text: str) -> Path:
    path = folder / "study.toml"
    path.write_text(text)
    return path


def cases(folder: Path, text: str, *, tiny: bool = False) -> tuple[StudyRow, ...]:
    (part,) = expand(read_study(write(folder, PART + text)), tiny=tiny)
    return part.cases


def test_a_list_names_its_rows(tmp_path: Path) -> None:
    parsed = cases(tmp_path, 'recipes = ["tiny_vae", { row = "few", recipe = "steps(8)" }]')
    assert [(c.label, c.recipe) for c in parsed] == [
        ("baseline", "baseline"),
        ("tiny_vae", "tiny_vae"),
        ("few", "steps(8)"),
    ]


def test_a_matrix_has_every_combination(tmp_path: Path) -> None:
    parsed = cases(tmp_path, 'matrix = { a = ["", "tiny_vae"], b = ["", "steps(8)", "steps(4)"] }')
    assert [c.recipe for c in parsed] == [
        "baseline", "steps(8)", "steps(4)", "tiny_vae", "tiny_vae+steps(8)", "tiny_vae+steps(4)"
    ]  # fmt: skip


def test_a_combination_that_conflicts_is_a_row_with_its_reason(tmp_path: Path) -> None:
    parsed = cases(tmp_path, 'matrix = { a = ["", "compile"], b = ["", "compile(dynamic=True)"] }')
    assert [c.recipe for c in parsed if c.refused is None] == ["baseline", "compile(dynamic=True)", "compile"]
    (refused,) = [c for c in parsed if c.refused]
    assert refused.label == "compile+compile(dynamic=True)"
    assert "both set the compilation" in str(refused.refused)


def test_a_stack_adds_one_at_a_time_and_replaces_what_it_sets_again(tmp_path: Path) -> None:
    text = 'baseline = "steps(30)"\nstack = ["tiny_vae", "steps(20)", "cfg_cutoff(0.4)"]'
    (part,) = expand(read_study(write(tmp_path, PART + text)))
    assert [c.recipe for c in part.cases] == [
        "steps(30)", "tiny_vae+steps(30)", "tiny_vae+steps(20)", "tiny_vae+cfg_cutoff(0.4)+steps(20)"
    ]  # fmt: skip
    assert [(g.without, g.with_) for g in part.gains] == [
        ("steps(30)", "+ tiny_vae"),
        ("+ tiny_vae", "+ steps(20)"),
        ("+ steps(20)", "+ cfg_cutoff(0.4)"),
    ]


def test_leave_one_out_measures_the_whole_and_each_without(tmp_path: Path) -> None:
    (part,) = expand(read_study(write(tmp_path, PART + 'leave_one_out = "tiny_vae+steps(8)+bf16"')))
    assert {c.label: c.recipe for c in part.cases} == {
        "baseline": "baseline",
        "tiny_vae+dtype(bf16)+steps(8)": "tiny_vae+dtype(bf16)+steps(8)",
        "without tiny_vae": "dtype(bf16)+steps(8)",
        "without dtype(bf16)": "tiny_vae+steps(8)",
        "without steps(8)": "tiny_vae+dtype(bf16)",
    }
    assert [g.member for g in part.gains] == ["tiny_vae", "dtype(bf16)", "steps(8)"]


def test_one_study_for_each_part_and_model_with_its_own_workload(tmp_path: Path) -> None:
    text = """
title = "T"
workload = { num_inference_steps = 9, height = 64 }
model = { tiny-flux = { num_inference_steps = 5 } }
[[part]]
name = "a"
models = ["tiny-sd", "tiny-flux"]
recipes = ["steps(2)"]
[[part]]
name = "b"
models = ["tiny-sd"]
workload = { height = 96 }
recipes = ["steps(2)"]
"""
    parts = expand(read_study(write(tmp_path, text)))
    assert [(p.part.name, p.model) for p in parts] == [("a", "tiny-sd"), ("a", "tiny-flux"), ("b", "tiny-sd")]
    workloads = [p.study.workload for p in parts]
    assert [(w.num_inference_steps, w.height) for w in workloads] == [(9, 64), (5, 64), (9, 96)]
    assert [p.model for p in expand(read_study(write(tmp_path, text)), parts=["b"])] == ["tiny-sd"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title = ", "is not TOML"),
        ('[[part]]\nname = "p"\nmodels = ["tiny-sd"]\nrecipes = ["bf16"]', "title: must be given"),
        (PART, "give one of recipes, matrix, stack, leave_one_out"),
        (PART + 'recipies = ["bf16"]', "part 1, recipies: is not known; did you mean 'recipes'?"),
        (PART + "recipes = 3", "part 1, recipes: 3 must be a list"),
        (
            PART + 'recipes = ["bf16"]\nfigures = ["latencyy"]',
            "'latencyy' is not a figure; did you mean 'latency'?",
        ),
        (PART + f"matrix = {{ a = {['tiny_vae'] * 30}, b = {['bf16'] * 30} }}", "and it has 900"),
        (PART + 'recipes = ["bf16"]\n' + PART[len(HEAD) :] + 'recipes = ["bf16"]', "two parts are named 'p'"),
        (PART + 'recipes = ["bf16"]\n[tiny]\nmodels = { sd15 = "tiny-sd" }', "[tiny.models] names 'sd15'"),
        (
            PART
            + 'recipes = ["bf16"]\n[[claim]]\nsays = "x"\nkind = "faster"\nrows = ["bf17"]\nthan = "baseline"',
            "the row 'bf17', which no part has; did you mean 'bf16'?",
        ),
        (PART + 'recipes = ["bf16"]\n[timing]\nrounds = 0', "timing, rounds: 0 must be at least 1"),
        ('name = "x"\n' + PART + 'recipes = ["bf16"]', "name 'x' is not known"),
        (
            'published = "../x.csv"\n' + PART + 'recipes = ["bf16"]',
            "must be the name of a file beside the study",
        ),
        ('published = "none.csv"\n' + PART + 'recipes = ["bf16"]', "No such file"),
    ],
)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        read_study(write(tmp_path, text))
    assert message in str(caught.value)
    assert "study.toml" in str(caught.value) or "none.csv" in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ['recipes = ["bf17"]', 'baseline = "bf17"\nrecipes = ["bf16"]', 'stack = ["bf17"]', 'leave_one_out = "bf17"',
     'matrix = { a = ["bf17"] }',
     'recipes = ["bf16"]\n[tiny]\nmodels = { tiny-sd = "tiny-sd" }\nreplace = { bf17 = "" }'],
)  # fmt: skip
def test_a_wrong_recipe_of_a_study_is_marked(tmp_path: Path, text: str) -> None:
    with pytest.raises(RecipeError, match="no technique 'bf17'; did you mean 'bf16'"):
        read_study(write(tmp_path, PART + text))


def test_two_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    text = 'recipes = [{ row = "a", recipe = "bf16" }, { row = "a", recipe = "tiny_vae" }]'
    with pytest.raises(UsageError, match="two recipes are called 'a'"):
        expand(read_study(write(tmp_path, PART + text)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ["sdxl"]}, "--model sdxl: "),
        ({"parts": ["waterfal"]}, "did you mean 'waterfall'?"),
        ({"tiny": True, "synthetic": True}, "exclude each other"),
    ],
)
def test_what_a_study_does_not_have_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        expand(read_study("001"), **options)
    assert message in str(caught.value)


def test_the_example_of_the_docs_is_a_study(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "studies.md").read_text()
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    parts = expand(read_study(write(tmp_path, example)))
    assert {part.part.name: len(part.cases) for part in parts} == {
        "list": 3,
        "matrix": 8,
        "waterfall": 4,
        "members": 5,
    }
    assert all(case.refused is None for part in parts for case in part.cases)


def test_the_docs_name_every_figure_and_kind_of_claim() -> None:
    page = (Path(__file__).parents[3] / "docs" / "studies.md").read_text()
    kinds = get_args(Claim.model_fields["kind"].annotation)
    assert all(f"`{name}`" in page for name in (*FIGURES, *kinds, *Part.model_fields))
