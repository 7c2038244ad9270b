"""What the records say in the package, for `vivace recommend`."""

from pathlib import Path

import pytest

from benchmarks import committed_tables
from benchmarks.sittings import write_sittings
from benchmarks.study_groups import own, record_file
from docgen.technique_lines import lines_of
from tests.make import make_environment, make_record, make_round
from vivace.evidence.recommendation import Criteria
from vivace.evidence.recommendation.advise import recommend_from
from vivace.evidence.studies.expand import expand
from vivace.evidence.studies.sittings import Sitting, SittingRow
from vivace.evidence.studies.study_file import read_study
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import workload_of


def write_study(path: Path, *timed: tuple[str, dict[str, float]]) -> dict[str, str]:
    """Write a sitting of study 001 for each GPU with the seconds of rows by label; return the recipes by label."""
    (part,) = expand(read_study("001"), synthetic=True)
    recipes = {case.label: case.recipe for case in part.cases}
    located = find_model(part.measured_on)
    sittings = [
        Sitting(
            environment=make_environment().model_copy(update={"device": "cuda", "device_name": gpu}),
            model=located.model,
            workload=workload_of(located, part.study.workload, 1),
            device="cuda",
            rows=tuple(
                SittingRow(recipe=resolve(recipes[label]).spec, round=make_round(0, (s, 1.01 * s, 0.99 * s)))
                for label, s in times.items()
            ),
        )
        for gpu, times in timed
    ]
    write_sittings(path, sittings)
    return recipes


def test_recommend_reads_studies(tmp_path: Path) -> None:
    """A row of a study's record counts beside the baseline of its own sitting."""
    path = record_file("001", tmp_path)
    assert list(committed_tables.of_study(own("001", tmp_path), path)) == []
    card = "NVIDIA H200"
    recipes = write_study(
        path, (card, {"Baseline": 1.2, "Compiled": 0.4}), (card, {"Baseline": 1.0, "Final": 0.2})
    )
    (table,) = committed_tables.of_study(own("001", tmp_path), path)
    assert (table.kind, table.place, table.model, table.random_weights) == (
        "committed",
        "results/study-001.json",
        "sd15",
        True,
    )
    assert table.baseline == recipes["Baseline"]
    gains = {row.recipe: row.gain and round(row.gain.point, 2) for row in table.rows}
    assert gains == {recipes["Baseline"]: None, recipes["Compiled"]: 3.0, recipes["Final"]: 5.0}
    answer = recommend_from(Criteria(model="sd15", gpu="H200"), [table])
    assert answer.recipe == recipes["Compiled"]
    (final,) = answer.left_out
    assert final.recipe == recipes["Final"]
    assert "compared with 30 steps of the model" in final.why, "the model's own are 50, and this one takes 20"
    assert answer.basis is not None
    assert answer.basis.place == "results/study-001.json"
    kept = recommend_from(Criteria(model="sd15", gpu="H200", same_picture=True), [table])
    assert kept.recipe == recipes["Compiled"]
    assert [out.recipe for out in kept.left_out] == [recipes["Final"]]


def test_a_study_has_a_table_for_each_gpu(tmp_path: Path) -> None:
    path = record_file("001", tmp_path)
    recipes = write_study(
        path,
        ("NVIDIA H200", {"Baseline": 1.2, "Compiled": 0.4}),
        ("NVIDIA H100 80GB HBM3", {"Baseline": 2.0, "Final": 0.5}),
    )
    tables = {table.gpu: table for table in committed_tables.of_study(own("001", tmp_path), path)}
    assert {gpu: [row.recipe for row in table.rows] for gpu, table in tables.items()} == {
        "NVIDIA H200": [recipes["Baseline"], recipes["Compiled"]],
        "NVIDIA H100 80GB HBM3": [recipes["Baseline"], recipes["Final"]],
    }


def test_recipes_that_set_their_steps_are_not_scaled() -> None:
    """SD 1.5 is timed over 25 steps here and scaled to its 50; a recipe of 20 steps takes as long whatever is asked."""
    times = {"cuda_graph": 1.0, "compile+cuda_graph": 0.5, "cuda_graph+steps(20)": 0.4}
    records = [
        make_record(recipe, *(make_round(k, (s, 1.01 * s, 0.99 * s)) for k in range(2)))
        for recipe, s in times.items()
    ]
    scaled = committed_tables._of_techniques("sd15", records)
    assert scaled.steps == 50
    seconds = {row.recipe: row.latency and round(row.latency.point, 2) for row in scaled.rows}
    assert seconds == {"cuda_graph": 1.8, "compile+cuda_graph": 0.9}
    (own_steps,) = committed_tables._of_own_steps("sd15", records)
    assert own_steps.steps == 25
    seconds = {row.recipe: row.latency and round(row.latency.point, 2) for row in own_steps.rows}
    assert seconds == {"cuda_graph": 1.0, "cuda_graph+steps(20)": 0.4}
    (line,) = [line for line in lines_of("sd15", records) if line.row.recipe == "cuda_graph+steps(20)"]
    assert round(line.latency.point, 2) == 0.4
    assert line.speedup is not None
    assert round(line.speedup.point, 1) == 4.5, "over 50 steps"


def test_an_edit_s_fastest_recipe_counts_beside_the_model_as_published() -> None:
    (table,) = [
        each
        for each in committed_tables.tables()
        if each.model == "flux-kontext" and "new-prompts" in each.place
    ]
    start, fused = table.rows
    assert (table.task, table.steps, start.timed_steps) == ("edit", 28, 8)
    assert fused.recipe.startswith("fused(fp8, attention=fp8")
    assert fused.gain is not None
    assert start.latency is not None
    assert fused.latency is not None
    assert fused.gain.point == pytest.approx(start.latency.point / fused.latency.point)
    assert "another run" in fused.note
