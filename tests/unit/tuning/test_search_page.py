"""The page of a search: the answer, its proof and its images, and nothing of other searches."""

import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.make import make_record, make_round
from tests.typed import run_vivace
from vivace.benchmark.store import Store
from vivace.foundation.spec.record import Outcome, Record
from vivace.foundation.stats import Gate
from vivace.recipes.resolve import resolve
from vivace.report.rows import Row, rows_of
from vivace.tuning.answer import Tuned
from vivace.tuning.answer_page import page_of
from vivace.tuning.answer_text import lines
from vivace.tuning.explanation import ExpectedGain, Explanation
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search_settings import SearchSettings
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


def test_the_page_has_the_answer_its_proof_and_its_images(tmp_path: Path) -> None:
    page = page_of(tuned(tmp_path))
    order = [
        "tiny-sd on Test CPU: 2.50 times as fast",
        "0.400 s",
        "instead of 1.00 s",
        'id="proof"',
        'id="images"',
        'id="front"',
        'id="tried"',
        'id="run"',
        "vivace generate &#34;a prompt&#34; --model tiny-sd --recipe",
        "vivace tune tiny-sd --minutes 3",
        'id="conditions"',
    ]
    places = [page.index(text) for text in order]
    assert places == sorted(places)
    assert page.count('<img class="picture"') == 2 * 3  # two prompts of three recipes
    assert "baseline</small>" in page
    assert "src=" not in page.replace('src="data:', "")  # nothing is fetched
    assert '<pre class="answer"' not in page
    assert "No recipe was faster" not in page


def test_what_was_tried_says_why_it_lost(tmp_path: Path) -> None:
    page = page_of(tuned(tmp_path))
    tried = page[page.index('id="tried"') : page.index('id="run"')]
    assert tried.index(PICK.split("+")[0]) < tried.index("steps(20)") < tried.index("Crashed")
    assert "Its quality fails: CLIP margin kept 61.0 %, the limit is 95 %." in tried
    assert "no C++ compiler &lt;script&gt;" in tried
    assert "3 options left out before anything was timed" in tried
    assert tried.index("needs a GPU") < tried.index("--without")


def test_the_page_is_about_this_search_alone(tmp_path: Path) -> None:
    with Store.create(tmp_path) as store:
        record = make_record("guidance(1.0)")
        other = record.trial.model_copy(
            update={"model": record.trial.model.model_copy(update={"name": "other-model"})}
        )
        run = store.start_run("vivace bench --model other-model", [other], record.environment)
        store.append(run.keys[0], record.rounds[0])
    page = page_of(tuned(tmp_path))
    assert "other-model" not in page
    assert "guidance(1.0)" not in page


@pytest.mark.parametrize("rounds", [1, 2])
def test_one_round_proves_nothing_and_has_no_interval(tmp_path: Path, rounds: int) -> None:
    answer = tuned(tmp_path, rows=final(rounds))
    page, text = page_of(answer), str(answer)
    speed = next(line for line in text.splitlines() if line.startswith("speed"))
    has_interval = rounds == 2
    assert ("[2." in speed) is has_interval
    assert ("not proved" in text.replace("\n         ", " ")) is not has_interval
    assert ("95 % interval</small>" in page) is has_interval
    assert ("2.50 times as fast in one round, not proved" in page) is not has_interval
    assert (answer.to_json()["final"][2]["speedup"]["ci95"] is not None) is has_interval


def test_a_search_without_an_answer_has_a_page(tmp_path: Path) -> None:
    history = (HISTORY[0], HISTORY[4], result_of("steps(8)", 2.0))
    page = page_of(tuned(tmp_path, pick=None, rows=(), history=history, notes=("the time ended",)))
    assert "no recipe was shown to be better than the baseline" in page
    assert "Better; there was no time to judge its quality." in page
    assert "The time ended." in page
    assert 'id="proof"' not in page
    assert 'id="run"' not in page


def test_a_command_in_a_note_can_be_copied(tmp_path: Path) -> None:
    page = page_of(tuned(tmp_path, notes=("a judge adds much: vivace tune tiny-sd --scorer x", "it ended")))
    assert "A judge adds much: vivace tune tiny-sd --scorer x</li>" in page
    assert "It ended.</li>" in page


def test_less_memory_is_the_headline_where_it_is_the_goal(tmp_path: Path) -> None:
    rows = final()
    memory = rows[2].memory
    assert memory is not None
    less = rows[2].__class__(
        **{**rows[2].__dict__, "memory": memory.model_copy(update={"peak_bytes": 225_000_000})}
    )
    page = page_of(tuned(tmp_path, objective=Objective("memory"), rows=(*rows[:2], less)))
    assert "tiny-sd on Test CPU: 50 % less memory" in page


def test_what_nothing_is_known_of_is_counted_and_not_listed() -> None:
    gain = ExpectedGain("tiny_vae", 1.3, 1.2, 1.4, was_tried=True)
    explanation = Explanation((gain,), 31, (("this store", 7),), 12)
    assert explanation.lines() == [
        "tiny_vae  1.30x [1.20, 1.40]",
        "31 more options were not tried, and nothing tells whether they help here",
        "from this store: 7 figures",
        "12 options were left out before timing (--format json says why)",
    ]


def test_beliefs_are_printed_only_if_they_are_asked_for(tmp_path: Path) -> None:
    explanation = Explanation((ExpectedGain("tiny_vae", 1.3, 1.2, 1.4, was_tried=True),))
    answer = tuned(tmp_path, explanation=explanation)
    assert any("1.30x [1.20, 1.40]" in line for line in lines(answer, explain=True))
    assert not any("1.30x" in line for line in lines(answer, explain=False))


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
    assert "page with the proof and the images: s/tune-tiny-sd.html" in done.stderr
    assert 'id="proof"' in (tmp_path / "s" / "tune-tiny-sd.html").read_text()
    assert json.loads(done.stdout)["recipe"] == PICK
    run_vivace(tmp_path, "tune", "tiny-sd", "--store", "s", "-o", "own.html")
    assert calls[-1].scorer == "auto"
    assert (tmp_path / "own.html").read_text().startswith("<!doctype html>")
