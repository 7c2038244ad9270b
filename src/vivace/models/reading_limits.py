"""Limits on reading a foreign model: vivace cannot foresee everything that libraries do with a checked configuration,
so another process watches the one that reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures import CATALOGUE
from vivace.foundation.processes.launcher import ProcessLimits
from vivace.models.find import LocatedModel
from vivace.models.model_files import num_bytes

_LEAST_S = 120.0  # importing the libraries takes up to 20 s on a busy machine
_BYTES_PER_S = 20e6  # of a slow disk
_LEAST_BYTES = 6e9  # libraries, and the host's part of CUDA
_COPIES = 6  # of the weights: the file's pages, fp16 as fp32, and what conversions need for a moment


@dataclass(frozen=True)
class ReadingLimits(ProcessLimits):
    """Limits until a model is read."""

    @classmethod
    def of(cls, located: LocatedModel) -> ReadingLimits:
        """Return the limits for a model of this size."""
        return cls.of_bytes(num_bytes({path.name: path for path in located.weights if path.is_file()}))

    @classmethod
    def of_weights_in(cls, folder: Path) -> ReadingLimits:
        """Return the limits for a folder whose weights are beside its configuration."""
        return cls.of_bytes(num_bytes({path.name: path for path in folder.glob("*.safetensors")}))

    @classmethod
    def of_bytes(cls, size: int) -> ReadingLimits:
        return cls(_LEAST_S + size / _BYTES_PER_S, _LEAST_BYTES + _COPIES * size)


def is_trusted(located: LocatedModel) -> bool:
    """Whether the model's configuration is vivace's own, or pinned in the catalogue."""
    # An entry is also lent to files, folders and repositories that are not the catalogue's own.
    return located.model.is_synthetic or located.model.name in CATALOGUE


def complaint(name: str, excess: str) -> str:
    return f"{name} took more than {excess} to read, which its size does not explain; check its configuration files"


_MOST = 0.5
"""Of the free memory; files beyond it would drive out what is needed sooner."""
_CHUNK = 1 << 24


def read_ahead(files: Sequence[Path]) -> threading.Thread | None:
    """Ask the system to read files, in a thread that ends with this process."""
    if not hasattr(os, "posix_fadvise") or not files:
        return None
    import psutil

    try:
        total = sum(file.stat().st_size for file in files)
    except OSError:
        return None  # who loads them says so
    if total > _MOST * psutil.virtual_memory().available:
        return None
    thread = threading.Thread(target=_request, args=(files,), name="read-ahead", daemon=True)
    thread.start()
    return thread


def _request(files: Sequence[Path]) -> None:
    for file in files:
        try:
            number = os.open(file, os.O_RDONLY)
        except OSError:
            continue  # who loads it says so
        try:
            for offset in range(0, os.fstat(number).st_size, _CHUNK):
                os.posix_fadvise(number, offset, _CHUNK, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(number)
