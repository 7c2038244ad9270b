"""`vivace serve` as a user starts and ends it."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.served import PATH, Answer, Served
from tests.typed import run_vivace

SERVE = (sys.executable, "-m", "vivace", "serve")


HIDES_POSIX = """
import os

for name in ("fork", "killpg", "setpgid", "getpgid", "pread", "pwrite", "posix_fadvise", "pidfd_open", "fchmod",
             "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "sched_getaffinity"):
    if hasattr(os, name):
        delattr(os, name)
"""
"""Read by each Python process as it starts: what only POSIX has, as far as libraries work without it."""


@pytest.fixture(params=["", pytest.param("without POSIX", marks=pytest.mark.long)])
def command(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[subprocess.Popen[str], Served, list[str]]]:
    environment = dict(os.environ)
    if request.param:
        (tmp_path / "sitecustomize.py").write_text(HIDES_POSIX)
        path = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"VIVACE_NO_FORK": "1", "PYTHONPATH": os.pathsep.join(path)}
        has_fork = [sys.executable, "-c", "import os; print(hasattr(os, 'fork'))"]
        printed = subprocess.run(has_fork, env=environment, capture_output=True, text=True, check=True).stdout
        assert printed == "False\n", "the names are hidden"
    arguments = ("tiny-sd", "--recipe", "tiny_vae", "--device", "cpu", "--threads", "1", "--port", "0")
    process = subprocess.Popen(
        [*SERVE, *arguments],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        # A shell starts what it runs in the background with the signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first == "tiny-sd with tiny_vae (as given)\n"
    place = re.search(r"http://127\.0\.0\.1:(\d+)/v1 the API", process.stderr.readline())
    assert place is not None
    log: list[str] = []
    reading = threading.Thread(target=log.extend, args=(process.stderr,))
    reading.start()
    yield process, Served(int(place[1]), None), log
    process.kill()
    process.wait()
    reading.join()
    process.stderr.close()


def ready(server: Served) -> Answer:
    until = time.monotonic() + 120
    while (answer := server.send("/readyz")).status != 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    return answer


def test_accepted_images_end_after_sigterm(
    command: tuple[subprocess.Popen[str], Served, list[str]],
) -> None:
    process, server, log = command
    early = server.send("/readyz")
    assert early.status == 503
    assert early.json["workers"][0]["phase"] == "starting"
    assert server.send(PATH, {"prompt": "x"}).status == 503, "the model is being loaded"
    assert ready(server).json["status"] == "ready"
    long = server.draw("a circle, " * 40, negative_prompt="a circle, " * 40, num_inference_steps=1)
    assert "the rest is cut off" in long.json["notes"][0]
    answers: list[Answer] = []
    drawing = threading.Thread(target=lambda: answers.append(server.draw(num_inference_steps=12)))
    drawing.start()
    server.wait_for("running", 1)
    process.send_signal(signal.SIGTERM)
    drawing.join(timeout=60)
    assert [answer.status for answer in answers] == [200]
    assert process.wait(timeout=30) in (0, -signal.SIGTERM)
    assert any("ready after" in line for line in log)
    assert not any("circle" in line for line in log), "prompts are not logged"


@pytest.mark.timeout(60)
@pytest.mark.long
def test_a_recipe_that_has_no_room_for_loras_is_refused_at_start(tmp_path: Path) -> None:
    loras = str(Path("tinyworld/loras").absolute())
    arguments = ("serve", "tiny-sd", "--recipe", "fuse_qkv", "--loras", loras, "--port", "0")
    assert "does not go with fuse_qkv" in run_vivace(tmp_path, *arguments, code=3).stderr


@pytest.mark.long
def test_a_second_ctrl_c_ends_at_once_and_in_words(
    command: tuple[subprocess.Popen[str], Served, list[str]],
) -> None:
    process, server, log = command
    ready(server)
    answers: list[Answer] = []
    drawing = threading.Thread(target=lambda: answers.append(server.draw(num_inference_steps=100)))
    drawing.start()
    server.wait_for("running", 1)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    assert process.wait(timeout=30) == 130
    drawing.join(timeout=10)
    assert [(answer.status, answer.message) for answer in answers] == [
        (503, "the server ends before this request has its answer")
    ]
    assert not any("Traceback" in line for line in log)
