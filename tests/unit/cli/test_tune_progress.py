"""What `vivace tune` prints while it searches."""

import pytest

from vivace.cli.measuring.tune import SearchDisplay
from vivace.foundation.spec.record import Outcome
from vivace.recipes.resolve import resolve
from vivace.tuning.search.results import Result, Rung


def test_results_are_counted_without_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    display = SearchDisplay(None, 9)
    baseline = Result(resolve("baseline"), Outcome.MEASURED, Rung.SCREENED, 0.0)
    refused = Result(resolve("cuda_graph"), Outcome.UNSUPPORTED, Rung.SCREENED, reason="no GPU")
    first = Result(resolve("tiny_vae"), Outcome.MEASURED, Rung.SCREENED, 0.1)
    second = Result(resolve("compile"), Outcome.CRASHED, Rung.SCREENED, reason="no compiler")
    history = [baseline, refused]
    for result in (first, second, first):
        history.append(result)
        display.measured(result, history)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert [line.split()[0] for line in lines] == ["[1]", "[2]", "[2]"]
    assert "crashed" in lines[1]
