"""The state of this machine and of the hub's connection, determined in a second and without torch."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import sys
import threading
import time
import urllib.parse
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from vivace.foundation.hardware import present_gpu

_PATIENCE_S = 0.8
"""Seconds after which a silent hub is reported."""
_LATE_S = 10.0
"""Seconds after which vivace stops waiting for a silent hub."""
_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True)
class Surroundings:
    """The state of this machine.

    Attributes:
        gpu: name of the NVIDIA GPU that PyTorch can use; None without one.
        may_have_gpu: another maker's GPU may be there, which only PyTorch can tell.
        is_offline: whether HF_HUB_OFFLINE forbids the network.
    """

    gpu: str | None
    gpu_bytes: float | None
    may_have_gpu: bool
    why_no_gpu: str
    memory_bytes: float
    num_cores: int
    hub: str
    hub_cache: Path
    is_offline: bool
    has_token: bool

    @cached_property
    def _hub(self) -> Connecting:
        return Connecting(self.hub)

    @property
    def has_no_gpu(self) -> bool:
        """Whether PyTorch certainly cannot use a GPU."""
        return self.gpu is None and not self.may_have_gpu

    def why_no_hub(self) -> str | None:
        """Describe why nothing can be downloaded; None if the hub accepts connections."""
        if self.is_offline:
            return "HF_HUB_OFFLINE forbids the network; unset it"
        reached = self._hub.within(_PATIENCE_S)
        if reached is None:
            return f"{self.hub} does not answer; check the network"
        return None if reached else f"{self.hub} cannot be reached; check the network"

    def is_hub_silent(self) -> bool:
        """Whether the hub has neither accepted nor refused a connection so far: the network may be slow."""
        return not self.is_offline and self._hub.within(_PATIENCE_S) is None

    def hub_answers_late(self) -> bool:
        """Wait longer for a silent hub, and return whether it accepts a connection."""
        return bool(self._hub.within(_LATE_S))

    def is_hub_empty(self, repository: str) -> bool:
        """Whether nothing of a repository is in the cache, so that all of it has to be downloaded."""
        return not (self.hub_cache / f"models--{repository.replace('/', '--')}").exists()


def surroundings() -> Surroundings:
    """Return the state of this machine."""
    import psutil
    from huggingface_hub import constants, get_token

    build = _torch_build()
    present = present_gpu()
    gpu = None if build == "cpu" else present
    other = build in ("xpu", "rocm") or sys.platform == "darwin" or sys.platform == "win32"
    if build == "rocm" and not Path("/dev/kfd").exists():
        other = False
    why = "no GPU was found on this machine"
    if build == "cpu" and present is not None:
        why = f"PyTorch is installed without support for the {present.name}; install a build with CUDA"
    return Surroundings(
        gpu=None if gpu is None else gpu.name,
        gpu_bytes=None if gpu is None else gpu.memory_bytes,
        may_have_gpu=gpu is None and other and build != "cpu",
        why_no_gpu=why,
        memory_bytes=machine_bytes(),
        num_cores=psutil.cpu_count(logical=False) or os.cpu_count() or 1,
        hub=constants.ENDPOINT,
        hub_cache=Path(constants.HF_HUB_CACHE),
        is_offline=bool(constants.HF_HUB_OFFLINE),
        has_token=get_token() is not None,
    )


def machine_bytes() -> float:
    """Return the memory of this machine, or of the container that this process runs in."""
    import psutil

    return min(float(psutil.virtual_memory().total), _cgroup_limit())


class Connecting:
    """A connection attempt to the host of an address, or to the proxy on the way to it.

    Looking up a name may take half a minute without a network, so a thread does it and is left running.
    """

    def __init__(self, address: str) -> None:
        parts = urllib.parse.urlsplit(_proxy_for(address) or address)
        self._place = parts.hostname, parts.port or (80 if parts.scheme == "http" else 443)
        self._began = time.monotonic()
        self._done = threading.Event()
        self._reached = False
        threading.Thread(target=self._connect, daemon=True).start()

    def within(self, seconds: float) -> bool | None:
        """Return whether it took a connection within some seconds of the first try; None if it is still trying."""
        is_done = self._done.wait(max(0.0, self._began + seconds - time.monotonic()))
        return self._reached if is_done else None

    def _connect(self) -> None:
        with suppress(OSError), socket.create_connection(self._place, timeout=_LATE_S):
            self._reached = True
        self._done.set()


def _proxy_for(address: str) -> str | None:
    parts = urllib.parse.urlsplit(address)
    if urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _torch_build() -> str:
    """Return what the installed PyTorch is built for: "cpu", "cu126", "rocm", "xpu"; "" if its version does not say."""
    with suppress(importlib.metadata.PackageNotFoundError):
        local = importlib.metadata.version("torch").partition("+")[2]
        return "rocm" if local.startswith("rocm") else local
    return ""


def _cgroup_limit() -> float:
    with suppress(OSError, ValueError):
        return float(_CGROUP_LIMIT.read_text(encoding="utf-8"))
    return float("inf")
