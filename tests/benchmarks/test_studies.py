"""The script that measures the published studies in pieces, and the pages of its records."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import studies as script
from benchmarks import study_groups, study_work
from benchmarks.command import MEASURED_IN_PART, run
from benchmarks.sittings import write_sittings
from benchmarks.study_groups import borrowed, own, record_file
from docgen import study_pages
from docgen.study_pages import page, printed
from tests import stub_worker
from tests.make import make_record, make_round
from tests.unit.report.test_limit import CEILINGS, WORK
from vivace.benchmark import Timing
from vivace.evidence.studies.sittings import Sitting, SittingRow
from vivace.evidence.studies.study_columns import FIGURES
from vivace.evidence.studies.study_file import published_studies, read_study
from vivace.evidence.studies.view import value_text
from vivace.foundation.processes.launcher import Launcher
from vivace.foundation.spec.ceilings import Work, identity_of
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.stats import Interval
from vivace.foundation.untrusted.streams import markdown_cell
from vivace.recipes.resolve import resolve
from vivace.report.rows import rows_of

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


@pytest.mark.long
def test_what_crashed_is_tried_once_more_and_what_cannot_run_is_not(call: Call, tmp_path: Path) -> None:
    assert call("002") == 0
    path = record_file("002", tmp_path / "results")
    content = json.loads(path.read_text())
    for row, outcome in zip(content[0]["rows"][-2:], ("crashed", "unsupported"), strict=True):
        row["round"] = {key: row["round"][key] for key in ("index", "started_at")}
        row["round"] |= {"outcome": outcome, "reason": "it did"}
    path.write_text(json.dumps(content))
    assert call("002", store="new") == 0
    assert len(rows(tmp_path)[1]) == 2, "the baseline and the one that crashed"
    text = page("002", "", tmp_path / "results")
    assert "**6 of 7 rows are measured**; 1 unsupported." in text
    assert "unsupported: it did" in text

    content[0]["rows"][-2]["round"]["outcome"] = "timed_out"
    path.write_text(json.dumps([content[0], content[0]]))
    assert call("002", store="new") == 0
    assert len(rows(tmp_path)) == 2, "it timed out twice"


def test_the_list_says_what_is_missing_and_measures_nothing(
    call: Call, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("--list") == 0
    out = capfd.readouterr().out
    counts = re.findall(r"^(\d{3}) synthetic:(\S+): (\d+) of (\d+) trials missing", out, re.MULTILINE)
    assert {study for study, *_ in counts} == set(published_studies())
    assert ("000", "flux-dev", "0", "10") in counts, "another script's record has them"
    assert not (tmp_path / "results").exists()


def test_wrong_names_are_named(call: Call, capfd: pytest.CaptureFixture[str]) -> None:
    assert call("006") == 2
    assert "no study '006'" in capfd.readouterr().err
    assert run(script.command, ["001", "--tiny"]) == 2
    assert "give --folder another folder" in capfd.readouterr().err


@pytest.mark.parametrize("model", ["sd15", "synthetic:sd15"])
def test_a_model_is_named_as_in_the_study_or_as_in_the_list(
    model: str, call: Call, capfd: pytest.CaptureFixture[str]
) -> None:
    assert call("001", "003", "--model", model, "--list") == 0
    listed = re.findall(r"^(\d{3} \S+):", capfd.readouterr().out, re.MULTILINE)
    assert sorted(listed) == ["001 synthetic:sd15", "003 synthetic:sd15"]
    assert call("003", "--model", "sd51", "--list") == 2
    assert "--model sd51: no such model; did you mean 'sd15'?" in capfd.readouterr().err


def test_groups_share_a_sitting_where_model_and_workload_are_the_same() -> None:
    timing = Timing(rounds=1, repeats=3)
    groups = {group.name: group for group in study_groups.groups_of("004", timing)}
    (group,) = groups.values()
    assert [part.part.name for part in group.parts] == ["techniques", "combined", "members"]
    cached = "first_block_cache(hits=0.8)+attention(flash)"
    assert group.baselines([cached]) == ["dtype(fp16)", "baseline"]
    assert group.missing([]) == sorted(group.missing([]), key=lambda recipe: group.known_s[recipe])


def test_code_that_is_compiled_makes_later_trials_cheaper(tmp_path: Path) -> None:
    """Four recipes of 001 share the UNet's code, three its code for half the batch: what is cached comes first."""
    (group,) = study_groups.groups_of("001", Timing(rounds=1, repeats=3, max_warmup=2))
    tuned = [recipe for recipe in group.known_s if "max-autotune" in recipe]
    # As before anything was measured: the records know what a first call took with the cache of the one before.
    group = replace(
        group,
        known_s={recipe: 617.0 if recipe in tuned else 22.0 for recipe in group.known_s},
    )
    running = script.Running(tmp_path, tmp_path / "s", "cpu", Timing(), limit_s=None)
    assert len(tuned) == 7
    assert min(running.cost_s(group, recipe) for recipe in tuned) > 150
    first = running.next_of(group, tuned)
    assert "cfg_cutoff" not in first
    running.compiled.add(script._code_of(group, first))
    cheap = [recipe for recipe in tuned if running.cost_s(group, recipe) < 60]
    assert len(cheap) == 4
    assert not any("cfg_cutoff" in recipe for recipe in cheap)
    assert running.next_of(group, tuned[::-1]) in cheap
    assert running.cost_s(group, "scheduler(euler_a)") == group.known_s["scheduler(euler_a)"]


@pytest.mark.parametrize(("study", "codes"), [("002", 5), ("001", 0)])
def test_each_code_is_compiled_once_before(
    study: str, codes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What times kernels is left to its round."""
    (group,) = study_groups.groups_of(study, Timing(rounds=1))
    begun: list[list[str]] = []

    class Done:
        returncode = 0

        def __init__(self, command: list[str], **_: object) -> None:
            begun.append(command)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("subprocess.Popen", Done)
    running = script.Running(tmp_path, tmp_path / "s", "cpu", Timing(), limit_s=None)
    running.compile(group, 1, at_once=9)
    assert len(begun) == codes
    running.compile(group, 1, at_once=9)
    assert len(begun) == codes, "the cache has them"


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


def test_borrowed_rows_are_marked_and_linked() -> None:
    assert {sitting.source for sitting in borrowed()} == {"every-model.json", "techniques-flux-dev.json"}
    text = page("000", "", Path("no such folder"))
    assert "[techniques-flux-dev.json](../../results/techniques-flux-dev.json)" in text
    (line,) = [
        line for line in text.splitlines() if line.startswith("| Config 3 | `compile@denoiser,text_en")
    ][:1]
    assert "\\* |" in line


@pytest.mark.soak
def test_an_embedded_model_is_measured_and_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    places = ["--folder", str(tmp_path), "--store", str(tmp_path / "s")]
    arguments = [
        "003",
        "--tiny",
        "--part",
        "remedies",
        "--only",
        "channels_last",
        "--repeats",
        "3",
        "--warmup",
        "1",
    ]
    assert run(script.command, [*arguments, *places]) == 0
    (sitting,) = own("003", tmp_path)
    assert [row.round.outcome for row in sitting.rows] == [Outcome.MEASURED] * 2
    # The same through a store of `vivace study`: its rounds are not added twice.
    shutil.copy(record_file("003", tmp_path), tmp_path / "copy.json")
    from_store = [*arguments[:2], "--from-store", str(tmp_path / "s"), "--folder", str(tmp_path)]
    assert run(script.command, from_store) == 0
    assert "003: 0 rounds" in capfd.readouterr().out
    write_sittings(record_file("003", tmp_path), [])
    assert run(script.command, from_store) == 0
    assert "003: 2 rounds" in capfd.readouterr().out
    assert {row.recipe.text for part in own("003", tmp_path) for row in part.rows} == {
        "baseline",
        "channels_last",
    }


def test_the_page_tells_what_the_card_did() -> None:
    use = {
        "calls": 3,
        "seconds": 3.0,
        "num_readings": 30,
        "energy_j": 1500.0,
        "energy_from": "counter",
        "power_w": 500.0,
        "sm_clock_mhz": 1785.0,
        "throttled": ["power cap"],
    }
    measured = make_round(0, (1.0, 1.0, 1.0)).model_dump() | {"gpu": use, "gpu_busy_s": 0.85}
    rows = [
        SimpleNamespace(row=row, labelled=[(label, row)] if row is not None else [])
        for label, row in (
            ("fast", rows_of([make_record("baseline", Round.model_validate(measured))])[0]),
            ("without", rows_of([make_record("baseline")])[0]),
            ("not measured", None),
        )
    ]
    view: Any = SimpleNamespace(rows=rows)
    lines = list(study_pages._card(view))
    assert "| fast | 85 % | 500 J | 500 W | 1785 MHz | 0.278 | power cap |" in lines
    assert "| without | – | – | – | – | 0.278 | nothing |" in lines
    assert not any("not measured" in line for line in lines)
    view.rows = rows[1:]
    assert list(study_pages._card(view)) == []


def test_the_work_of_measured_rows_is_counted_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = SittingRow(recipe=resolve("baseline").spec, round=make_round(0))
    lost = SittingRow(recipe=resolve("bf16").spec, round=make_round(0, outcome=Outcome.CRASHED, reason="x"))
    record = make_record("baseline")
    trial, facts = record.trial, record.environment
    sitting = Sitting(
        environment=facts,
        model=trial.model,
        workload=trial.workload,
        device=trial.device,
        rows=(measured, lost),
    )
    write_sittings(record_file("002", tmp_path), [sitting])
    ceilings = CEILINGS.model_copy(update=identity_of(facts).model_dump())
    (tmp_path / "ceilings.json").write_text(f"[{ceilings.model_dump_json()}]")
    counted_recipes: list[str] = []

    def counted(record: Record, round_: Round, launcher: object) -> Work:
        counted_recipes.append(record.trial.recipe.text)
        return WORK

    monkeypatch.setattr(study_work, "work_of", counted)
    for _ in range(2):
        assert run(study_work.command, ["002", "--folder", str(tmp_path)]) == 0
    assert counted_recipes == ["baseline"]
    assert "baseline: 0.251 TFLOP" in capfd.readouterr().out
    (grown,) = own("002", tmp_path)
    assert [row.round.work for row in grown.rows] == [WORK, None]
    assert grown.ceilings == ceilings
    assert run(study_work.command, ["02"]) == 2
    assert "no study '02'; did you mean '002'" in capfd.readouterr().err
