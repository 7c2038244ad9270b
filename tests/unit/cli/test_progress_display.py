"""What is told while rounds run: places that are lost, and rounds that are measured again."""

import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.make import make_environment, make_round, make_trial
from vivace.benchmark import Store, Timing
from vivace.benchmark.places.spread_trials import SpreadTrials
from vivace.benchmark.places.trial_jobs import Done
from vivace.benchmark.run_settings import RunSettings
from vivace.cli.display.progress_display import PlainProgress, TerminalProgress
from vivace.foundation.spec.environment import Place


def test_a_lost_place_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    PlainProgress().event({"lost": "node-1 on host\x1b[2J", "why": "its node ended"})
    output = capsys.readouterr().err
    assert (
        "was lost: its node ended; its finished rounds are kept, the others are measured elsewhere" in output
    )
    assert "\x1b" not in output
    live = TerminalProgress()
    live.event({"lost": "GPU 1", "why": "its worker ended"})
    assert "GPU 1 was lost" in " ".join(capsys.readouterr().err.split())


def test_a_round_that_is_measured_again_is_counted_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trials = [make_trial(recipe) for recipe in ("baseline", "steps(1)", "tiny_vae")]
    with Store.create(tmp_path / "store") as store:
        settings = RunSettings(progress=PlainProgress(), canaries=False)
        spread = SpreadTrials(
            trials, Timing(rounds=2, repeats=1), store, [make_environment()], None, settings
        )
        for number, stop_after in enumerate([3, None, 1, None]):
            place = make_environment().at(Place(uuid=f"cpu-{number}", index=number))
            ticket = spread.take(place)
            assert ticket is not None
            for trial, index in ticket.job.rounds[:stop_after]:
                started = datetime.now(UTC).isoformat(timespec="seconds")
                round_ = make_round(index).model_copy(update={"started_at": started})
                spread.deliver(ticket, Done(trial, round_))
            spread.finish(ticket) if stop_after is None else spread.lose(ticket, "its node ended")
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    counts = [re.match(r"\[(\d+)/(\d+)\] (\S+).*round (\d+)/(\d+)", line) for line in lines]
    assert [int(count[1]) for count in counts if count] == [1, 2, 3, 1, 2, 3, 4, 5, 5, 6, 7, 8]
    assert {count[2] for count in counts if count} == {"8"}
    assert all(int(count[4]) <= int(count[5]) for count in counts if count)
    assert len([count for count in counts if count]) == len(lines)
