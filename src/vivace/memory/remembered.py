"""Predictions that were made before, kept on disk: importing diffusers and building a pipeline takes seconds.

A prediction depends on nothing but what its key holds: the model's configuration and tokenizers, the recipe with the
content of its files, the size of the call, vivace's source, and the libraries. So does the answer that there is none:
no effect, unsupported, or an impossible size.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.contract.cache_folder import cache_folder
from vivace.errors import NoEffect, Unsupported, WorkloadError
from vivace.foreign.files import open_plain
from vivace.memory.predict import Prediction, predict
from vivace.memory.weightless import Weightless
from vivace.models.find import Found
from vivace.recipes.recipe import Recipe

_REFUSALS = (NoEffect, Unsupported, WorkloadError)
_READ = {".json", ".txt", ".jinja", ".model"}
MOST_KEPT = 2000
"""Files of about 3 KB; the oldest half goes when there are more."""


def predicted(model: Weightless, recipe: Recipe, **asked: Any) -> Prediction:
    """Return what `predict` returns, from disk if it was asked for before.

    Args:
        asked: the other arguments of `predict`, as JSON holds them: height, width, batch, text, task.

    Raises:
        VivaceError: see `predict`.
    """
    if any(
        technique.needs_prompts for technique in recipe
    ):  # what it found out on the real model may have changed
        return predict(model, recipe, **asked)
    path = cache_folder() / "plans" / f"{_key(model, recipe, asked)}.json"
    found = _read(path)
    if found is not None:
        return found
    try:
        found = predict(model, recipe, **asked)
    except _REFUSALS as error:
        if type(error) in _REFUSALS:
            already_so = getattr(error, "already_so", None)
            _keep(path, json.dumps([type(error).__name__, str(error), already_so]))
        raise
    _keep(path, found.model_dump_json())
    return found


def _key(model: Weightless, recipe: Recipe, asked: Mapping[str, Any]) -> str:
    told = {
        "model": [model.name, model.dtype, repr(sorted(model.defaults.items()))],
        "files": None if model.found is None else _files(model.found),
        "recipe": recipe.pinned().spec.model_dump(mode="json"),
        "asked": asked,
        "installed": _installed(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode(errors="surrogateescape")).hexdigest()


def _files(found: Found) -> str:
    """Return the digest of all files: of their contents, or of weights of the size and the time of the last change."""
    total = hashlib.sha256()
    tiny = {} if not isinstance(found.tiny_vae, Path) else {"tiny": found.tiny_vae / "config.json"}
    for name, path in (found.files | tiny).items():
        seen = path.stat()
        changed = 0 if path.suffix in _READ else seen.st_mtime_ns
        total.update(f"{name}\0{seen.st_size}\0{changed}\0".encode(errors="surrogateescape"))
        if path.suffix in _READ:
            with open_plain(path) as file:
                total.update(file.read())
    return total.hexdigest()


@functools.cache
def _installed() -> str:
    """Return the digest of vivace's source, and of the folders of packages, which change with what is installed."""
    own = Path(__file__).parents[1]
    seen = [(path.relative_to(own).as_posix(), path.stat()) for path in sorted(own.rglob("*.py"))]
    told: list[Any] = [sys.version, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in seen]]
    for library in ("torch", "diffusers", "transformers", "torchao"):
        found = importlib.util.find_spec(library)
        if found is not None and found.origin is not None:
            folder = Path(found.origin).parents[1]
            told.append((str(folder), folder.stat().st_mtime_ns))
    return hashlib.sha256(json.dumps(told).encode(errors="surrogateescape")).hexdigest()


def _read(path: Path) -> Prediction | None:
    """Return what was kept; None if nothing was, or it is damaged.

    Raises:
        NoEffect, Unsupported, WorkloadError: that was the answer.
    """
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            return Prediction.model_validate(content)
        name, said, already_so = content
        kind = {one.__name__: one for one in _REFUSALS}[name]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    raise NoEffect(said, already_so=already_so) if kind is NoEffect else kind(said)


def _keep(path: Path, found: str) -> None:
    """Write an answer as a whole. Where the cache cannot be written, the next call predicts again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(found.encode(errors="surrogateescape"))
        os.replace(file.name, path)
        kept = sorted(path.parent.glob("*.json"), key=lambda one: one.stat().st_mtime_ns)
        for old in kept[: len(kept) // 2] if len(kept) > MOST_KEPT else ():
            old.unlink(missing_ok=True)
    except OSError:
        return
