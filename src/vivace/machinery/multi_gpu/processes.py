"""The peer processes of this one, each with one GPU: started, spoken to, watched, ended.

They are started with `subprocess`, not forked, since CUDA does not survive a fork, and not by torchrun, since a call in
a notebook or a server cannot be executed again under it (docs/adr/0006). Short messages go through pipes, so that peers
that wait for the next one neither occupy their GPU nor run into the timeout of a collective. Tensors go through
torch.distributed: NCCL between GPUs, gloo on a CPU.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

from vivace.errors import Unsupported, WorkerError
from vivace.foundation.processes.launcher import ended_by, wait_for_an_end

COMMAND = (sys.executable, "-m", "vivace.runtime.peer")
TIMEOUT = timedelta(minutes=30)
"""Limit of a collective: one GPU may wait while another compiles. A dead process is noticed at once, by its pipe."""
_NOTICE_S = 5.0  # between a broken connection and the end of its process being visible
_GRACE_S = 5.0
_LEAVING = threading.Lock()


def send(stream: IO[bytes], message: Any) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(len(data).to_bytes(8, "little") + data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """Return the next message; EOFError where the other end is closed."""
    size = stream.read(8)
    data = stream.read(int.from_bytes(size, "little")) if len(size) == 8 else b""
    if len(size) < 8 or len(data) < int.from_bytes(size, "little"):
        raise EOFError("the other process closed its end")
    return pickle.loads(data)  # noqa: S301  from our own child or parent


def visible_gpus(first: int) -> list[str]:
    """Return the names of this process's GPUs for CUDA_VISIBLE_DEVICES, rotated to begin with `first`."""
    import torch

    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = named or [str(k) for k in range(torch.cuda.device_count())]
    return names[first:] + names[:first]


class Peers:
    """`num` - 1 peer processes, of rank 1 and up; this process, the primary, is rank 0 of the group.

    `when_lost` is called as soon as a peer has ended, from another thread, and `before_leaving` before this process
    leaves the group; neither may keep this object alive. Unsupported where this process belongs to a group already.
    """

    def __init__(self, num: int, device: str) -> None:
        import torch
        import torch.distributed as dist

        if dist.is_initialized():
            gc.collect()  # pipelines are reference cycles, so a session without references may still exist
        if dist.is_initialized():
            raise Unsupported(
                "this process is part of a torch.distributed group already; close the session that uses several GPUs "
                "(session.close()), or start without torchrun"
            )
        self.num = num
        self.device = device
        self._folder = tempfile.TemporaryDirectory(prefix="vivace-peers-")
        self._processes: list[subprocess.Popen[bytes]] = []
        self._failure: str | None = None
        self._closing = threading.Event()
        self.when_lost: list[Callable[[], Any]] = []
        self.before_leaving: list[Callable[[], Any]] = []
        leaving = (self.when_lost, self.before_leaving)
        self._end = weakref.finalize(
            self, _end, self._processes, self._closing, self._folder, device, leaving
        )
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        try:
            for rank in range(1, num):
                self._processes.append(self._start(rank))
            about = {"num": num, "device": device, "port": store.port, "threads": torch.get_num_threads()}
            for rank in range(1, num):
                self.send(rank, about | {"rank": rank})
            for rank in range(1, num):
                self.receive(rank)
            threading.Thread(target=_watch, args=(weakref.ref(self), self._processes), daemon=True).start()
            with self.explained():
                join(store, 0, num, device)
        except BaseException:
            self.close()
            raise

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        env = dict(os.environ)
        if self.device == "cuda":
            # Each peer sees its own GPU as the first, as this process does, and the others after it.
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(rank))
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env
            )

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"{rank}.log"

    def send(self, rank: int, message: Any) -> None:
        stream = self._processes[rank - 1].stdin
        assert stream is not None
        with self.explained():
            send(stream, message)

    def receive(self, rank: int) -> Any:
        stream = self._processes[rank - 1].stdout
        assert stream is not None
        with self.explained():
            return receive(stream)

    @property
    def is_open(self) -> bool:
        return self._failure is None and bool(self._end.alive)

    def check(self) -> None:
        if self._failure is None and not self._end.alive:
            raise WorkerError("this session with several GPUs is closed; load the model anew")
        if self._failure is not None:
            raise WorkerError(self._failure)

    def raise_if_failed(self, error: Exception) -> None:
        """Raise WorkerError if one of the peers has ended, which is why there was an error."""
        self._note_failure()
        if self._failure is not None and not isinstance(error, WorkerError):
            raise WorkerError(self._failure) from error

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Turn errors caused by the end of a peer into ones that say so."""
        import torch

        try:
            yield
        except (RuntimeError, OSError, EOFError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise  # this process's own
            deadline = time.monotonic() + _NOTICE_S
            while self._failure is None and time.monotonic() < deadline and not self._closing.is_set():
                self._note_failure()
                time.sleep(0.05)
            if self._failure is None:
                raise
            raise WorkerError(self._failure) from error

    def _note_failure(self) -> None:
        if self._failure is not None or self._closing.is_set():
            return
        for rank, process in enumerate(self._processes, 1):
            if (status := process.poll()) is not None:
                by = ended_by(status)
                how = f"was killed ({by})" if by is not None else f"ended ({status})"
                lines = self._log(rank).read_text(errors="replace", encoding="utf-8").strip().splitlines()
                last_line = f": {lines[-1].strip()}" if lines else ""
                what = f"GPU {rank}" if self.device == "cuda" else f"shard {rank}"
                self._failure = (
                    f"the process (pid {process.pid}) that computed on {what} of {self.num} {how}{last_line}; "
                    "load the model anew"
                )
                return

    def on_exit(self) -> None:
        """Release what waits for a peer that has ended. Called by the watching thread."""
        self._note_failure()
        if self._closing.is_set():
            return
        if self.device == "cuda":
            # Kernels that wait for the dead GPU would wait until the timeout, and so would whatever waits for them.
            for call in self.when_lost:
                call()
            _leave("cuda")

    def close(self) -> None:
        self._end()


def join(store: Any, rank: int, num: int, device: str) -> None:
    import torch
    import torch.distributed as dist

    bound = {"device_id": torch.device("cuda", 0)} if device == "cuda" else {}
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=num,
        timeout=TIMEOUT,
        **bound,
    )


def _leave(device: str) -> None:
    import torch.distributed as dist
    from torch.distributed import distributed_c10d

    with _LEAVING:  # the watching thread may be leaving already
        if not dist.is_initialized():
            return
        if device == "cuda":  # the peers are gone, and pending collectives will never end by themselves
            distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()


def _watch(peers: weakref.ref[Peers], processes: list[subprocess.Popen[bytes]]) -> None:
    wait_for_an_end(processes)
    ended = peers()
    if ended is not None:
        ended.on_exit()


def _end(
    processes: list[subprocess.Popen[bytes]],
    closing: threading.Event,
    folder: tempfile.TemporaryDirectory[str],
    device: str,
    leaving: tuple[list[Callable[[], Any]], ...],
) -> None:
    """Close the pipes, upon which the processes end; kill those that do not. Then leave the group."""
    closing.set()
    for process in processes:
        with contextlib.suppress(OSError):
            assert process.stdin is not None
            process.stdin.close()
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        try:
            process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
    folder.cleanup()
    for calls in leaving:
        for call in calls:
            call()
    _leave(device)
