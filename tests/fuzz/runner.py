"""Run `vivace` in a child that was forked from a process with the libraries imported, and see what it did."""

import contextlib
import faulthandler
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import transformers

LIMIT_S = 10.0
"""A case that computes for longer hangs."""
_WALL_S = 40.0
"""So does one that waits, or computes, for longer than this; other work on the machine slows a case down."""
_LIMIT_BYTES = 4e9
MARKER = "EXECUTED"
"""The file that planted code writes into the folder of the case."""
OUTSIDE = "outside"
"""A folder beside the model, whose files must not be read."""
_ALLOWED = ("git",)
"""`doctor` asks it for the revision of vivace's source."""
EXIT_CODES = (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Run:
    """What a run did: its exit code (negative for a signal), what it printed, and what is wrong with that."""

    code: int
    output: str
    seconds: float
    wrong: tuple[str, ...]


def warm() -> None:
    """Import what children need, once, with the settings of the command line."""
    transformers.utils.logging.set_verbosity_error()
    import torchmetrics.functional.image
    from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import AutoImageProcessor, AutoTokenizer, CLIPModel, CLIPTextModel, CLIPTokenizer

    import vivace.runtime.export
    import vivace.runtime.memory.fit
    import vivace.runtime.memory.predict

    assert all(
        (AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel, AutoImageProcessor)
    )
    assert all(
        (
            AutoTokenizer,
            CLIPModel,
            CLIPTextModel,
            CLIPTokenizer,
            torchmetrics,
            vivace.runtime.export,
            vivace.runtime.memory,
        )
    )


def run(folder: Path, arguments: Sequence[str]) -> Run:
    """Run `vivace ARGUMENTS` in a folder."""
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _serve(folder, arguments, log.fileno())
        code, computed = _wait(pid)
        waited = time.monotonic() - started
        seconds = waited if waited > _WALL_S else computed
        log.seek(0)
        output = log.read().decode(errors="replace")
    return Run(code, output, seconds, tuple(_faults(folder, code, output, seconds)))


def _faults(folder: Path, code: int, output: str, seconds: float) -> list[str]:
    faults = []
    if seconds > LIMIT_S:
        faults.append(f"took {seconds:.0f} s")
    elif code not in EXIT_CODES:
        faults.append(f"ended with {code}")
    if "Traceback" in output or "a mistake in vivace" in output:
        faults.append("printed a traceback")
    if any(c in output for c in "\x1b\x07\x9b"):
        faults.append("printed an escape sequence")
    if (folder / MARKER).exists():
        faults.append(f"executed {(folder / MARKER).read_text()}")
    return faults


def _serve(folder: Path, arguments: Sequence[str], log: int) -> None:
    """Run the command line in this child, and end it."""
    faulthandler.disable()  # pytest's, which would print a traceback of this process
    try:
        os.setpgid(0, 0)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(folder)
        for name in ("stdout", "stderr"):
            setattr(sys, name, os.fdopen(os.dup(log), "w", buffering=1, errors="strict", encoding="utf-8"))
        sys.__stdout__, sys.__stderr__ = sys.stdout, sys.stderr
        _watch_execution(folder)
        import torch

        torch.set_num_threads(1)
        from vivace.cli import main
        from vivace.cli.watched import guarded

        # Files are read in this process, which is watched, instead of in a fresh one.
        guarded.__dict__["has_command_line"] = lambda _: False
        sys.argv = ["vivace", *arguments]
        main()
    except SystemExit as error:
        os._exit(error.code if isinstance(error.code, int) else 0)
    except BaseException:  # noqa: BLE001  the process boundary
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(99)


def _watch_execution(folder: Path) -> None:
    """Write the marker if this process starts another program, unpickles, or opens a file outside of the model."""
    starts = {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "pty.spawn", "pickle.find_class"}
    outside = os.path.realpath(folder / OUTSIDE)

    def see(event: str, details: tuple[object, ...]) -> None:
        what = None
        if event in starts and details[0] not in _ALLOWED:
            what = f"{event} {details!r}"
        elif event == "open" and isinstance(details[0], str | bytes):
            path = os.fsdecode(details[0])
            is_near = OUTSIDE in path or os.path.islink(path)
            if is_near and os.path.realpath(path).startswith(outside):
                what = f"open {path!r}"
        if what is not None:
            handle = os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(handle, what[:500].encode(errors="replace"))
            os.close(handle)

    sys.addaudithook(see)


def _wait(pid: int) -> tuple[int, float]:
    """Return a child's exit code and CPU seconds; end its process group after too long or with too much memory."""
    end = time.monotonic() + _WALL_S
    handle = os.pidfd_open(pid)
    try:
        while not select.select([handle], [], [], 0.1)[0]:
            if time.monotonic() > end or _held(pid) > _LIMIT_BYTES:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
                break
        _, status, used = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
    finally:
        os.close(handle)


def _held(pid: int) -> int:
    """Return the resident memory of a process and its children."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))
    return 0
