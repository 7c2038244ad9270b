"""While a worker reads a model of somebody else, it is held to limits on time and memory."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tinyworld import clip
from vivace.benchmark.rounds.quality_pass import compute_figures
from vivace.benchmark.rounds.worker_requests import GpusRequest, Scorer, ask
from vivace.errors import UnusableModel
from vivace.foundation.processes.launcher import Launcher
from vivace.models.find import WEIGHTS

_WORKER = """
import json, os, sys, time
def say(**event):
    print(json.dumps(event), flush=True)
say(event="ready", forks=False)
sys.stdin.readline()
say(event="started", pid=os.getpid())
say(event="phase", phase="load", limits={limits})
{work}
say(event="phase", phase="apply")
time.sleep(0.6)
say(event="result", value=dict(held=1))
say(event="ended", status=0)
sys.stdin.readline()
"""


def _launcher(work: str, seconds: float, num_bytes: float) -> Launcher:
    limits = {"seconds": seconds, "num_bytes": num_bytes}
    return Launcher([sys.executable, "-c", _WORKER.format(limits=limits, work=work)], tries_gpu=False)


@pytest.mark.parametrize(
    ("work", "seconds", "says"),
    [
        ("time.sleep(60)", 0.5, "more than 0 s to read"),
        ("held = os.urandom(1) * 4 * 10**8; time.sleep(60)", 30.0, "more than 0.1 GB of memory to read"),
    ],
    ids=["hangs", "allocates"],
)
@pytest.mark.timeout(30)
def test_reading_a_model_has_limits(work: str, seconds: float, says: str) -> None:
    with _launcher(work, seconds, 1e8) as launcher:
        ending = launcher.run(GpusRequest(), 60.0)
        assert ending.value is None
        assert not ending.timed_out
        with pytest.raises(UnusableModel, match=says):
            ask(launcher, GpusRequest(), 60.0)


@pytest.mark.timeout(30)
def test_what_comes_after_reading_has_none() -> None:
    with _launcher("held = os.urandom(1) * 10**6", 0.3, 1e9) as launcher:
        ending = launcher.run(GpusRequest(), 60.0)
        assert (ending.value, ending.excess) == ({"held": 1}, None)


def test_the_message_names_what_was_read() -> None:
    with (
        _launcher("time.sleep(60)", 0.5, 1e8) as launcher,
        pytest.raises(UnusableModel, match="the scorer my-clip took more than 0 s to read"),
    ):
        ask(launcher, GpusRequest(), 60.0, reads="the scorer my-clip")


def test_a_scorer_of_somebody_else_is_read_under_limits(tmp_path: Path) -> None:
    """The event that the launcher waits for comes before the model is read, and one that ends the limits after it."""
    folder = tmp_path / "clip"
    clip.save(folder, clip.build())
    for scorer_folder, limited in ((folder, True), (WEIGHTS / "tiny-clip", False)):
        events: list[dict[str, Any]] = []
        scorer = Scorer(folder=str(scorer_folder), others="tinyworld")
        assert compute_figures(tmp_path, [], scorer, "cpu", report=events.append) == []
        reading, scoring = events
        assert (reading["limits"] is not None) is limited
        assert "limits" not in scoring
        if limited:
            assert reading["limits"]["seconds"] > 60
            weights = folder / "model.safetensors"
            assert reading["limits"]["num_bytes"] > weights.stat().st_size


_IN_TURN = """
import json, subprocess, sys
def say(**event):
    print(json.dumps(event), flush=True)
say(event="ready", forks=True)
for number, _ in enumerate(sys.stdin):
    child = subprocess.Popen(["sleep", "60" if number == 0 else "0"], start_new_session=True)
    say(event="started", pid=child.pid)
    say(event="phase", phase="warm-up", done=1)
    status = child.wait()
    if status == 0:
        say(event="result", value=dict(number=number))
    say(event="ended", status=status)
"""


@pytest.mark.timeout(30)
def test_the_request_after_one_that_was_given_up_gets_its_own_answer() -> None:
    def give_up(event: dict[str, Any]) -> None:
        if event["event"] == "phase":
            raise UnusableModel("the first image tells that the time does not suffice")

    with Launcher([sys.executable, "-c", _IN_TURN], tries_gpu=False) as launcher:
        with pytest.raises(UnusableModel, match="does not suffice"):
            launcher.run(GpusRequest(), 60.0, give_up)
        assert ask(launcher, GpusRequest(), 60.0) == {"number": 1}
        assert ask(launcher, GpusRequest(), 60.0) == {"number": 2}
