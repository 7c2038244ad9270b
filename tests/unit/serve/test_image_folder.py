"""The folder of a server's images: none is left of servers that were killed, and none is taken from one that runs."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.served import fake
from vivace.serve.queue.messages import ImageFolder, remove_abandoned, remove_images

KEEPS_ONE = """
import sys, time
from pathlib import Path
from vivace.serve.queue.messages import ImageFolder
folder = ImageFolder(Path(sys.argv[1]))
(folder.path / "img-1-image").write_bytes(b"x" * 100)
print(folder.path, flush=True)
time.sleep(60)
"""


def start_one(parent: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", KEEPS_ONE, str(parent)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_the_folder_of_a_killed_server_is_removed_by_the_next_start(tmp_path: Path) -> None:
    dead, left = start_one(tmp_path)
    living, used = start_one(tmp_path)
    end(dead)
    assert left.is_dir(), "SIGKILL lets nobody clean up"
    mine = ImageFolder(tmp_path)
    assert not left.exists()
    assert (used / "img-1-image").read_bytes() == b"x" * 100, "its server runs"
    end(living)
    remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path], "it is locked by this process"
    mine.cleanup()
    assert not list(tmp_path.iterdir())


def test_the_folder_of_a_server_without_locks_is_nobodys_to_remove(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as without_posix:
        without_posix.setenv("VIVACE_NO_FORK", "1")
        used = ImageFolder(tmp_path)
    remove_abandoned(tmp_path)
    assert used.path.is_dir()
    used.cleanup()
    assert not list(tmp_path.iterdir())


def test_what_is_no_folder_of_a_server_stays(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("x")
    others = tmp_path / "memory"
    others.mkdir()
    (others / "vivace-images-link").symlink_to(outside)
    (others / "vivace-images-file").write_text("x")
    (others / "another-program").mkdir()
    ImageFolder(others).cleanup()
    assert len(list(others.iterdir())) == 3
    assert (outside / "file").exists()


def test_images_of_other_jobs_stay(tmp_path: Path) -> None:
    for name in ("img-1-image", "img-1-partial-3", "img-10-image"):
        (tmp_path / name).touch()
    remove_images(tmp_path, ["img-1", "img-2"])
    assert [file.name for file in tmp_path.iterdir()] == ["img-10-image"]


@pytest.mark.parametrize(("prompt", "status"), [("die", 503), ("half", 500)])
def test_nothing_is_left_of_an_image_that_was_written_in_part(
    tmp_path: Path, prompt: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that dies after it wrote an image, and one whose memory is full before it has written all."""
    monkeypatch.setenv("VIVACE_TEST_LEAVES", "1")
    with fake(tmp_path) as server:
        folder = server.pool._folder.path
        answer = server.draw(prompt)
        assert answer.status == status
        assert server.draw(seed=3).images[0].getpixel((0, 0)) == (3, 0, 0)
        assert not list(folder.iterdir())
        assert os.path.exists(folder)
    assert not folder.exists()
