"""What `vivace tune` prints while it searches."""

import pytest

from vivace.cli.tune import Shown
from vivace.recipes.resolve import resolve
from vivace.spec.record import Outcome
from vivace.tuning.seen import Rung, Seen


def test_results_are_counted_without_what_was_refused(capsys: pytest.CaptureFixture[str]) -> None:
    shown = Shown(None, 9)
    baseline = Seen(resolve("baseline"), Outcome.MEASURED, Rung.SCREENED, 0.0)
    refused = Seen(resolve("cuda_graph"), Outcome.UNSUPPORTED, Rung.SCREENED, reason="no GPU")
    first = Seen(resolve("tiny_vae"), Outcome.MEASURED, Rung.SCREENED, 0.1)
    second = Seen(resolve("compile"), Outcome.CRASHED, Rung.SCREENED, reason="no compiler")
    history = [baseline, refused]
    for one in (first, second, first):
        history.append(one)
        shown.measured(one, history)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert [line.split()[0] for line in lines] == ["[1]", "[2]", "[2]"]
    assert "crashed" in lines[1]
