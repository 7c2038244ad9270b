"""Sittings: a study that was measured in pieces, on several days, read back as one run."""

from pathlib import Path

import pytest

from benchmarks.sittings import write_sittings
from tests.make import make_environment, make_round
from vivace.errors import StoreError
from vivace.evidence.studies import StudyFile, StudyRun
from vivace.evidence.studies.expand import ModelPart, expand
from vivace.evidence.studies.sittings import Sitting, SittingRow, read_sittings, run_of
from vivace.evidence.studies.study_answer import views
from vivace.evidence.studies.study_file import Claim, Labelled, Part
from vivace.foundation.spec.record import Outcome, Round
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.workloads import workload_of

FILE = StudyFile(
    name="x",
    title="T",
    part=(
        Part(
            name="p",
            models=("synthetic:sd15",),
            stack=(Labelled(recipe="tiny_vae", row="VAE"), Labelled(recipe="steps(9)", row="few")),
            recipes=(Labelled(recipe="bf16", row="bf16"),),
        ),
    ),
    claim=(Claim(says="The VAE is faster", kind="faster", rows=("VAE",), than="baseline"),),
)
PLANNED: tuple[ModelPart, ...] = expand(FILE)
VAE, FEW = "tiny_vae", "tiny_vae+steps(9)"


def lasting(seconds: float, **fields: object) -> Round:
    """A measured round of ten calls with little spread."""
    return make_round(0, tuple(seconds * (1 + 0.001 * k) for k in range(10))).model_copy(
        update={"pictures": (), **fields}
    )


def sitting(source: str = "", torch: str = "2.11", **rounds: Round) -> Sitting:
    """A sitting of synthetic:sd15, its rows by recipe: baseline=lasting(1.0)."""
    located = find_model("synthetic:sd15")
    environment = make_environment().model_copy(update={"libraries": {"torch": torch}})
    return Sitting(
        environment=environment,
        model=located.model,
        workload=workload_of(located, PLANNED[0].study.workload),
        device="cuda",
        rows=tuple(
            SittingRow(recipe=resolve(recipe).spec, round=round_) for recipe, round_ in rounds.items()
        ),
        source=source,
    )


def run(*sittings: Sitting) -> StudyRun:
    return run_of(FILE, PLANNED, sittings)


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    lost = make_round(0, outcome=Outcome.OUT_OF_MEMORY, reason="too large")
    stored = [
        sitting(baseline=lasting(1.0), **{VAE: lasting(0.5)}),
        sitting("other.json", baseline=lasting(2.0), bf16=lost),
    ]
    path = tmp_path / "deep" / "record.json"
    write_sittings(path, stored)
    assert read_sittings(path) == stored
    assert len(path.read_text().splitlines()) == 2 + 2 * 4, "a line for a row"
    write_sittings(path, [])
    assert read_sittings(path) == []


@pytest.mark.parametrize("text", ["{}", "[{}]", "nothing", "[1]"])
def test_another_file_is_no_record(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(StoreError, match=r"x\.json.*`python -m benchmarks\.studies` wrote"):
        read_sittings(tmp_path / "x.json")


def test_a_row_is_compared_with_the_baseline_beside_it() -> None:
    """The second day's host is half as fast. That must not look like a slower recipe."""
    study_run = run(
        sitting(baseline=lasting(1.0), **{VAE: lasting(0.5)}),
        sitting(baseline=lasting(2.0), **{FEW: lasting(0.5)}),
    )
    (part,) = study_run.parts
    gains = {label: row.speedup.point for label, row in part.rows.items() if row.speedup is not None}
    assert gains == {"VAE": pytest.approx(2.0, rel=0.01), "few": pytest.approx(4.0, rel=0.01)}
    steps = dict(part.gains())["steps(9)"]
    assert steps is not None, "compared by way of both baselines"
    assert steps.ratio.point == pytest.approx(2.0, rel=0.01)


def test_rounds_of_two_days_are_two_rounds_of_one_row() -> None:
    study_run = run(
        sitting(baseline=lasting(1.0), bf16=lasting(0.8), **{VAE: lasting(0.5)}),
        sitting(baseline=lasting(2.0), **{VAE: lasting(1.0)}),
    )
    rows = study_run.parts[0].rows
    assert [len(rows[label].record.rounds) for label in ("VAE", "bf16", "baseline")] == [2, 1, 2]
    assert rows["VAE"].speedup is not None
    assert rows["VAE"].speedup.point == pytest.approx(2.0, rel=0.01)
    assert rows["bf16"].speedup is not None
    assert rows["bf16"].speedup.point == pytest.approx(1.25, rel=0.01), "with the first day's baseline alone"


def test_a_later_success_replaces_a_failure_and_not_the_reverse() -> None:
    crash = make_round(0, outcome=Outcome.CRASHED, reason="signal 11")
    ways = [
        [sitting(baseline=lasting(1.0), **{VAE: first}), sitting(baseline=lasting(1.0), **{VAE: other})]
        for first, other in ((crash, lasting(0.5)), (lasting(0.5), crash))
    ]
    for way in ways:
        assert run(*way).parts[0].rows["VAE"].record.outcome is Outcome.MEASURED
    lost = run(sitting(baseline=lasting(1.0), **{VAE: crash}), sitting(baseline=lasting(1.0), **{VAE: crash}))
    row = lost.parts[0].rows["VAE"]
    assert (row.outcome, row.reason) == (Outcome.CRASHED, "signal 11")


def test_rounds_of_other_libraries_are_not_mixed() -> None:
    later = {"started_at": "2026-02-01T00:00:00+00:00"}
    study_run = run(
        sitting(torch="2.12", baseline=lasting(1.0, **later), **{VAE: lasting(0.25, **later)}),
        sitting(torch="2.11", baseline=lasting(1.0), **{VAE: lasting(0.5)}),
    )
    record = study_run.parts[0].rows["VAE"].record
    assert record.environment.libraries == {"torch": "2.12"}, "the latest, wherever it stands in the file"
    assert len(record.rounds) == 1


def test_what_is_missing_is_a_typed_cell_with_its_reason() -> None:
    study_run = run(sitting(baseline=lasting(1.0), **{VAE: lasting(0.5)}))
    assert not study_run.is_complete
    (view,) = views(study_run)
    cells = {row.case.label: row.cells["latency"][0].cell for row in view.rows}
    assert cells["VAE"].outcome == "measured"
    assert (cells["few"].outcome, cells["bf16"].outcome) == ("not_measured", "not_measured")
    assert "no round" in cells["few"].note
    ((_, (judgement,)),) = study_run.claims()
    assert judgement.verdict.value == "agrees"
    assert "data:image" not in study_run.page(), "a record has no images"
    assert "vivace study x --synthetic" in study_run.page(), "the command that measures it"


def test_rows_of_two_gpus_stand_in_two_columns() -> None:
    """Each beside its own baseline, whichever was measured last."""
    later = {"started_at": "2026-02-01T00:00:00+00:00"}
    first = sitting(baseline=lasting(1.0), bf16=lasting(0.8), **{VAE: lasting(0.5)})
    other = sitting(baseline=lasting(2.0, **later), **{VAE: lasting(0.5, **later)})
    environment = other.environment.model_copy(update={"device_name": "H200"})
    whole = run(first, other.model_copy(update={"environment": environment}))
    (part,) = whole.parts
    here = first.environment.device_name
    assert list(part.on_devices) == [here, "H200"], "the one with more rows first"
    assert {name: sorted(rows) for name, rows in part.on_devices.items()} == {
        here: ["VAE", "baseline", "bf16"],
        "H200": ["VAE", "baseline"],
    }
    assert [len(rows["baseline"].record.rounds) for rows in part.on_devices.values()] == [1, 1]
    (view,) = views(whole)
    by_label = {row.case.label: row for row in view.rows}
    times = [cell.cell.value and cell.cell.value.point for cell in by_label["VAE"].cells["latency"]]
    assert times == [pytest.approx(0.5, rel=0.01)] * 2
    speedups = [cell.relative and cell.relative.point for cell in by_label["VAE"].cells["latency"]]
    assert speedups == [pytest.approx(2.0, rel=0.01), pytest.approx(4.0, rel=0.01)]
    assert [cell.cell.outcome for cell in by_label["bf16"].cells["latency"]] == ["measured", "not_measured"]
    assert [label for label, _ in by_label["VAE"].labelled] == ["VAE", "VAE (H200)"]
