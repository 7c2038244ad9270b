"""The page of a search: the answer, its proof and its images, and nothing of other searches."""

import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.make import make_record, make_round
from tests.pages import Page
from tests.typed import run_vivace
from vivace.answers.answer import Answer, Bar, Bars, Facts
from vivace.benchmark.store import Store
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Gate
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.tuning.answer import Tuned, answer_of
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.settings import SearchSettings
from vivace.tuning.tuner import drop_unproven_interval

PICK, RIVAL = "tiny_vae+steps(8)", "steps(8)"


def result_of(recipe: str, times: float | None, rung: Rung = Rung.SCREENED, **fields: Any) -> Result:
    if times is None:
        return Result(resolve(recipe), Outcome.CRASHED, rung, **fields)
    measured: dict[str, Any] = {"seconds": 1 / times, "peak_bytes": 4.5e8, "first_call_s": 1.5, **fields}
    return Result(resolve(recipe), Outcome.MEASURED, rung, math.log(times), 0.02, **measured)


HISTORY = (
    result_of("baseline", 1.0, Rung.FINAL, gate=Gate.PASSED, peak_bytes=4.4e8),
    result_of(PICK, 2.5, Rung.FINAL, gate=Gate.PASSED),
    result_of(RIVAL, 2.0, Rung.FINAL, gate=Gate.PASSED),
    result_of("steps(20)", 1.2),
    result_of(
        "steps(4)", 5.0, Rung.JUDGED, gate=Gate.FAILED, reason="CLIP margin kept 61.0 %, the limit is 95 %"
    ),
    result_of("compile", None, reason="no C++ compiler <script>"),
)


def final(rounds: int = 2) -> tuple[Row, ...]:
    def measured(recipe: str, factor: float) -> Record:
        times = (1.0 * factor, 1.01 * factor, 0.99 * factor)
        return make_record(recipe, *(make_round(i, times) for i in range(rounds)))

    rows = rows_of([measured("baseline", 1.0), measured(RIVAL, 0.5), measured(PICK, 0.4)])
    return tuple(drop_unproven_interval(row) for row in rows)


def tuned(store: Path, **fields: Any) -> Tuned:
    with Store.create(store) as opened:
        for k, colour in enumerate(("red", "blue")):
            path = opened.image_path(f"{k:064x}")
            path.parent.mkdir(parents=True, exist_ok=True)
            png = io.BytesIO()
            Image.new("RGB", (8, 8), colour).save(png, "PNG")
            path.write_bytes(png.getvalue())
    values: dict[str, Any] = {
        "model": "tiny-sd",
        "device_name": "Test CPU",
        "objective": Objective(),
        "pick": HISTORY[1],
        "rows": final(),
        "history": HISTORY,
        "cut": {"cuda_graph": "needs a GPU", "fused": "needs a GPU", "steps(3)": "--without"},
        "notes": ("every recipe that promised a gain has been measured",),
        "store": store,
        "judges": True,
        "num_trials": 5,
        "seconds": 200.0,
        "command": "vivace tune tiny-sd --minutes 3",
    }
    return Tuned(**(values | fields))


def test_a_final_that_was_disturbed_does_not_say_that_nothing_helps(tmp_path: Path) -> None:
    rows = final()
    disturbed = tuple(replace(row, cpu_share=0.5) for row in rows)
    assert "kept the machine busy: measure again" in tuned(tmp_path, pick=None, rows=disturbed).headline
    assert "busy" not in tuned(tmp_path, pick=None, rows=rows).headline


def facts(answer: Answer) -> dict[str, tuple[str, str]]:
    assert answer.facts is not None
    return {fact.name: (fact.value, fact.text) for fact in answer.facts.facts}


def tried(answer: Answer) -> tuple[Bar, ...]:
    (bars,) = [
        b
        for s in answer.sections
        if s.title.startswith("What was tried")
        for b in s.blocks
        if isinstance(b, Bars)
    ]
    return bars.bars


def test_the_answer_has_its_proof_and_its_images(tmp_path: Path) -> None:
    answer = answer_of(tuned(tmp_path))
    assert answer.headline == "tiny-sd on Test CPU: 2.50 times as fast"
    assert answer.verdict == "proved"
    assert facts(answer)["use"][0] == PICK
    assert "0.400 s an image instead of 1.00 s" in facts(answer)["speed"][1]
    titles = [section.title for section in answer.sections]
    assert [title for title in ("Proof", "Images", "Trade-offs", "Conditions") if title in titles] == [
        "Proof", "Images", "Trade-offs", "Conditions",
    ]  # fmt: skip
    assert answer.commands[0].value.startswith('vivace generate "a prompt" --model tiny-sd --recipe')
    page = Page.of(answer)
    assert len(page.all("img", "picture")) == 2 * 3, "two prompts of three recipes"
    assert "vivace tune tiny-sd --minutes 3" in page.text
    assert "no C++ compiler <script>" in page.text


def test_what_was_tried_says_why_it_lost(tmp_path: Path) -> None:
    answer = answer_of(tuned(tmp_path))
    bars = tried(answer)
    assert [bar.name for bar in bars] == ["baseline", PICK, RIVAL, "steps(4)", "steps(20)", "compile"]
    assert (bars[1].badge, bars[1].parts[0].look, bars[3].parts[0].look) == ("the answer", "saving", "failed")
    assert bars[3].below == "its quality fails: CLIP margin kept 61.0 %, the limit is 95 %"
    (left_out,) = [s for s in answer.sections if "left out before" in s.title]
    assert left_out.title.startswith("3 options")
    assert isinstance(left_out.blocks[0], Facts)
    assert [fact.name for fact in left_out.blocks[0].facts] == ["needs a GPU", "--without"]


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_round_proves_nothing_and_has_no_interval(tmp_path: Path, rounds: int) -> None:
    answer = answer_of(tuned(tmp_path, rows=final(rounds)))
    has_interval = rounds == 2
    assert ("[2." in facts(answer)["speed"][0]) is has_interval
    assert ("not proved" in facts(answer)["speed"][1]) is not has_interval
    assert answer.verdict == ("proved" if has_interval else "not proved")
    assert (answer.data["final"][2]["speedup"]["ci95"] is not None) is has_interval


def test_a_search_without_an_answer_has_a_page(tmp_path: Path) -> None:
    history = (HISTORY[0], HISTORY[4], result_of("steps(8)", 2.0))
    answer = answer_of(tuned(tmp_path, pick=None, rows=(), history=history, notes=("the time ended",)))
    assert answer.verdict == "none"
    assert "better; there was no time to judge its quality" in {bar.below for bar in tried(answer)}
    assert not answer.commands
    assert "the time ended" in Page.of(answer).text


def test_the_command_passes_the_judges_on_and_writes_the_page_into_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[SearchSettings] = []

    def search(model: str, settings: SearchSettings) -> Tuned:
        calls.append(settings)
        return tuned(tmp_path / "s", model=model)

    monkeypatch.setattr("vivace.tuning.tuner.search_recipe", search)
    flags = ("--scorer", "none", "--witness", "org/blip", "--store", "s")
    done = run_vivace(tmp_path, "tune", "tiny-sd", *flags, "--format", "json")
    assert (calls[0].scorer, calls[0].witness) == (None, "org/blip")
    assert "page: s/tune-tiny-sd.html" in done.stderr
    assert "2.50 times as fast" in (tmp_path / "s" / "tune-tiny-sd.html").read_text()
    assert json.loads(done.stdout)["recipe"] == PICK
    run_vivace(tmp_path, "tune", "tiny-sd", "--store", "s", "-o", "own.html")
    assert calls[-1].scorer == "auto"
    assert (tmp_path / "own.html").read_text().startswith("<!doctype html>")
