"""Peer processes forked from one that has imported everything, because starting a new one takes seconds."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
from collections.abc import Iterator
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest

from vivace.machinery.multi_gpu.processes import Peers

_IMPORTED = [
    "tests.forked_peers",
    "diffusers.pipelines.flux.pipeline_flux",
    "diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion",
    "diffusers.pipelines.stable_diffusion_xl.pipeline_stable_diffusion_xl",
    "functorch.compile",
    "torch._functorch.aot_autograd",
    "torchao.quantization",
    "vivace.machinery.multi_gpu.flux_tokens",
    "vivace.runtime.peer",
    "vivace.runtime.opening",
    "vivace.runtime.session",
]


class _Fd:
    """A file descriptor that is duplicated into the process that unpickles it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _detached, (DupFd(self.number),)


def _detached(duplicate: Any) -> int:
    return int(duplicate.detach())


def _run(requests: int, answers: int, log: int, before: str) -> None:
    from vivace.runtime import peer

    for number, standard in ((requests, 0), (answers, 1), (log, 2)):
        os.dup2(number, standard)
        os.close(number)
    exec(before, {})  # noqa: S102
    peer.main()


class ForkedPeer:
    """The part of `subprocess.Popen` that `Peers` uses."""

    def __init__(self, log: Any, before: str) -> None:
        requests, to_it = os.pipe()
        from_it, answers = os.pipe()
        context = multiprocessing.get_context("forkserver")
        ends: Any = (_Fd(requests), _Fd(answers), _Fd(log.fileno()))
        self._process = context.Process(target=_run, args=(*ends, before))
        self._process.start()
        os.close(requests)
        os.close(answers)
        self.stdin, self.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("peer", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@contextlib.contextmanager
def forked_peers(before: str = "") -> Iterator[None]:
    """Start peers by forking.

    Args:
        before: code that each peer executes first.
    """

    def start(self: Peers, rank: int) -> Any:
        with self._log(rank).open("wb") as log:
            return ForkedPeer(log, before)

    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(Peers, "_start", start)
        yield


def pids(session: Any) -> list[int]:
    """Return the process ids of a session's peers."""
    (effect,) = [effect for label, effect in session._applied if label.startswith("parallel")]
    return [process.pid for process in effect.close.__self__._processes]


def lives(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
