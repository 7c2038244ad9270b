"""What a finished round is in a line."""

from tests.make import make_round
from vivace.cli.progress import result
from vivace.spec.record import Outcome


def test_loading_that_takes_long_is_told() -> None:
    quick = make_round(0)
    assert result(quick) == "1.00 s an image, 3 samples"
    assert result(quick, batch=2) == "0.500 s an image, 3 samples"
    slow = quick.model_copy(update={"load_s": 61.5})
    assert result(slow) == "1.00 s an image, 3 samples, loaded in 61.5 s"


def test_a_failure_is_its_reason() -> None:
    assert result(make_round(0, outcome=Outcome.CRASHED, reason="it did")) == "crashed: it did"
