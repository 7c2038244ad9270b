"""The line of a finished round, and the title of a comparison."""

import pytest

from tests.make import make_round, make_trial
from vivace.cli.progress import PlainProgress, TerminalProgress, result, title
from vivace.spec.record import Outcome


def test_a_slow_load_is_shown() -> None:
    quick = make_round(0)
    assert result(quick) == "1.00 s an image, 3 samples"
    assert result(quick, batch=2) == "0.500 s an image, 3 samples"
    slow = quick.model_copy(update={"load_s": 61.5})
    assert result(slow) == "1.00 s an image, 3 samples, loaded in 61.5 s"


def test_a_failure_shows_its_reason() -> None:
    assert result(make_round(0, outcome=Outcome.CRASHED, reason="it did")) == "crashed: it did"


def test_the_title_has_the_batch_if_it_is_not_one() -> None:
    trial = make_trial("baseline", model="tiny-flux")
    assert title(trial) == "tiny-flux"
    batched = trial.model_copy(update={"workload": trial.workload.model_copy(update={"batch": 2})})
    assert title(batched) == "tiny-flux, batch 2"


def test_a_lost_place_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress().event({"lost": "node-1 on host\x1b[2J", "why": "its node ended"})
    told = capsys.readouterr().err
    assert "was lost: its node ended; its finished rounds are kept, the others are measured elsewhere" in told
    assert "\x1b" not in told
    shown = TerminalProgress()
    shown.event({"lost": "GPU 1", "why": "its worker ended"})
    assert "GPU 1 was lost" in " ".join(capsys.readouterr().err.split())
