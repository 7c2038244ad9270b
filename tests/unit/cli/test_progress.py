"""The line of a finished round, and the title of a comparison."""

from tests.make import make_round, make_trial
from vivace.cli.progress import result, title
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
