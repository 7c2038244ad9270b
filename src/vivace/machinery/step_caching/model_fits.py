"""The store of fits measured once per model: TeaCache's polynomials, MagCache's ratios.

Each file holds one fit as JSON, named by the model and its architecture, in a folder per kind inside vivace's cache. A
file may be deleted; the fit is then to be made again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder

_VERSION = 1
_FLUX_DEV = {
    "num_layers": 19,
    "num_single_layers": 38,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "guidance_embeds": True,
}


def is_flux_dev(transformer: Any) -> bool:
    """Return whether it has the architecture of FLUX.1 [dev], for which fits are published."""
    return all(transformer.config.get(name) == value for name, value in _FLUX_DEV.items())


def find(kind: str, denoiser: Any, model: str) -> dict[str, Any] | None:
    """Return the fit that `keep` wrote, or None.

    Args:
        kind: "teacache", ...
        model: NAME@REVISION; "" for a pipeline of unknown origin, which gets the latest fit of its architecture.
    """
    architecture = _architecture(denoiser)
    if model:
        return _read(_file(kind, architecture, model))
    try:
        files = sorted(_folder(kind).glob(f"{architecture}-*.json"), key=lambda file: file.stat().st_mtime)
    except OSError:
        return None
    return next((fit for file in reversed(files) if (fit := _read(file)) is not None), None)


def keep(kind: str, denoiser: Any, model: str, fit: Mapping[str, Any]) -> Path:
    """Write a fit atomically, where `find` looks for it.

    Raises:
        OutputError: it cannot be written.
    """
    file = _file(kind, _architecture(denoiser), model)
    replace(file, json.dumps({"version": _VERSION, "model": model, "fit": dict(fit)}).encode())
    return file


def _architecture(denoiser: Any) -> str:
    """Return a hash of a configuration, without the path and the version that it was loaded from."""
    config = {name: value for name, value in denoiser.config.items() if not name.startswith("_")}
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _folder(kind: str) -> Path:
    return cache_folder() / kind


def _file(kind: str, architecture: str, model: str) -> Path:
    return _folder(kind) / f"{architecture}-{hashlib.sha256(model.encode()).hexdigest()[:16]}.json"


def _read(file: Path) -> dict[str, Any] | None:
    """Return the fit, or None where the file is missing, damaged or of another version."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return dict(content["fit"]) if content["version"] == _VERSION else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
