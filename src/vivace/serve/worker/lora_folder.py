"""The LoRAs of a worker: those that fit the model, and the one beside its layers now."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UnusableModel, VivaceError
from vivace.machinery.lora.hot import denoiser_layers, hot_loras
from vivace.machinery.lora.lora_files import CONFIG, locate_lora
from vivace.machinery.lora.read_lora import read_lora
from vivace.techniques.lora import Lora

if TYPE_CHECKING:
    from vivace.runtime.session import Session

_KEPT_BYTES = 1_000_000_000
"""Bytes of parsed files that are kept, the last ones that were used."""
_NONE = 0.0
"""The factor of a LoRA that is beside the layers and adds nothing."""


@dataclass
class LoraFolder:
    """LoRA files that fit the model, with their ranks, why others do not, and the one that is loaded."""

    fitting: dict[str, int] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    _loaded: tuple[str | int, ...] | None = None
    _scale: float = _NONE
    """NaN while unknown, after a failed exchange."""

    @property
    def technique(self) -> str:
        """The technique that reserves every layer for the largest rank, in recipe notation."""
        first = next(iter(self.fitting))
        return f"lora({first!r}, hot=True, layers=all, max_rank={max(self.fitting.values())})"

    def check_loaded(self, session: Session) -> None:
        """Load each file once beside the layers of the session; what is refused is unfit."""
        for lora in hot_loras(session.pipe):
            lora.keep_bytes = _KEPT_BYTES
        for path in list(self.fitting):
            try:
                session.set_lora(path, scale=_NONE)
            except VivaceError as error:
                del self.fitting[path]
                self.unfit[path] = _without_folder(path, error)
        self._loaded, self._scale = None, _NONE

    def check_any(self) -> None:
        """Raise UnusableModel, with the reasons, if no file fits."""
        if not self.fitting:
            reasons = "; ".join(f"{Path(path).stem}: {reason}" for path, reason in self.unfit.items())
            raise UnusableModel(f"--loras: no file fits the model ({reasons})")

    def exchange(self, session: Session, lora: tuple[str, float] | None) -> float:
        """Load a LoRA with its factor, or none, unless it is loaded; return the seconds."""
        began = time.perf_counter()
        if lora is not None:
            self._load(session, *lora)
        elif self._scale != _NONE:
            session.set_lora(scale=_NONE)
            self._scale = _NONE
        return time.perf_counter() - began

    def _load(self, session: Session, path: str, scale: float) -> None:
        """Load a file with its factor, unless it is loaded."""
        try:
            identity = _identity(path)
            if identity != self._loaded:
                self._loaded, self._scale = None, math.nan  # unknown until it has worked
                session.set_lora(path, scale=scale)
            elif scale != self._scale:
                session.set_lora(scale=scale)
            after = _identity(path)
        except VivaceError as error:
            raise Unsupported(_without_folder(path, error)) from None
        except OSError as error:
            raise Unsupported(_unreadable(path, error)) from None
        if after != identity:  # what was read may be of both files
            self._loaded = None
            raise Unsupported(f"{Path(path).name} was written anew while it was read; send the request again")
        self._loaded, self._scale = identity, scale


def fitting_loras(pipe: Any, paths: Sequence[str]) -> LoraFolder:
    """Return the files that fit a pipeline that no technique has changed, and why others do not."""
    folder = LoraFolder()
    components = Lora.declared.default_targets
    for path in paths:
        try:
            _identity(path)
            layers = denoiser_layers(pipe, path, read_lora(pipe, locate_lora(path), path), components)
        except VivaceError as error:
            folder.unfit[path] = _without_folder(path, error)
        except OSError as error:
            folder.unfit[path] = _unreadable(path, error)
        else:
            folder.fitting[path] = max(layer.rank for layer in layers.values())
    return folder


def _without_folder(path: str, error: VivaceError) -> str:
    """Return the reason why a file is refused, without the place of the server's folder."""
    return str(error).replace(path, Path(path).name)


def _unreadable(path: str, error: OSError) -> str:
    return f"{Path(path).name} cannot be read any more: {error.strerror}"


def _identity(path: str) -> tuple[str | int, ...]:
    """Return what changes with a file's content: its times too, since an editor may keep that of its last change.

    The json with PEFT's settings beside it counts as well, since alpha is in it.
    """
    files = [Path(path)]
    if (settings := files[0].with_name(CONFIG)).exists():
        files.append(settings)
    stats = [file.stat() for file in files]
    return path, *(
        number
        for status in stats
        for number in (status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    )
