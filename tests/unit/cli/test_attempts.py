"""What `vivace plan` shows while it predicts."""

import io

import pytest
from rich.console import Console

from vivace.cli.display import terminal as attempts


@pytest.mark.parametrize("is_terminal", [True, False])
def test_each_prediction_is_told(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = io.StringIO()
    monkeypatch.setattr(
        attempts, "console", lambda stderr: Console(file=output, force_terminal=is_terminal, width=100)
    )
    with attempts.Attempts() as predictions:
        predictions.predicting("baseline")
        predictions.trying("offload(group)")
    plain = capsys.readouterr()
    assert plain.out == ""
    if is_terminal:
        assert "prediction 2: does offload(group) fit?" in output.getvalue()
        assert plain.err == ""
    else:
        assert plain.err == "predicting baseline\ntrying offload(group)\n"
