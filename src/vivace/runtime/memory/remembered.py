"""Earlier predictions, and refusals, kept on disk by all that they depend on: importing diffusers and building a
pipeline takes seconds."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from vivace.errors import NoEffect, OutputError, Unpredictable, Unsupported, WorkloadError
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder, open_plain
from vivace.models.find import LocatedModel
from vivace.recipes.recipe import Recipe
from vivace.runtime.memory.predict import ComponentBytes, Prediction, predict
from vivace.runtime.memory.weightless import Weightless

_REFUSALS = (NoEffect, Unpredictable, Unsupported, WorkloadError)
_READ = {".json", ".txt", ".jinja", ".model"}
MOST_KEPT = 2000
"""Number of files, of about 3 KB each; beyond it the oldest half is deleted."""


def predicted(model: Weightless, recipe: Recipe, **request: Any) -> Prediction:
    """Return the result of `predict`, from disk if it was computed before."""
    if any(
        technique.facts.needs_prompts for technique in recipe
    ):  # what it found on the real model may have changed
        return predict(model, recipe, **request)
    if model.located is None:
        shipped = shipped_answer(model.name, model.defaults, recipe.text, request)
        if shipped is not None:
            return _answer_of(shipped)
    path = cache_folder() / "plans" / f"{_key(model, recipe, request)}.json"
    content = _read(path)
    if content is None:
        content = predict_or_refuse(model, recipe, request)
        _keep(path, content)
    return _answer_of(content)


def predict_or_refuse(model: Weightless, recipe: Recipe, request: Mapping[str, Any]) -> Any:
    """Return the prediction, or the refusal, as JSON holds it."""
    try:
        return predict(model, recipe, **request).model_dump(mode="json")
    except _REFUSALS as error:
        if type(error) not in _REFUSALS:
            raise
        return [type(error).__name__, str(error), getattr(error, "already_so", None)]


def _key(model: Weightless, recipe: Recipe, request: Mapping[str, Any]) -> str:
    parts = {
        "model": [model.name, model.dtype, model.gguf_bytes, repr(sorted(model.defaults.items()))],
        "files": None if model.located is None else _files(model.located),
        "recipe": recipe.pinned().spec.model_dump(mode="json"),
        "asked": request,
        "installed": _installed(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode(errors="surrogateescape")).hexdigest()


def _files(located: LocatedModel) -> str:
    """Return the digest of all files: of their contents, or of weights of the size and the time of the last change."""
    total = hashlib.sha256()
    tiny = {} if not isinstance(located.tiny_vae, Path) else {"tiny": located.tiny_vae / "config.json"}
    for name, path in (located.files | tiny).items():
        stat = path.stat()
        changed = 0 if path.suffix in _READ else stat.st_mtime_ns
        total.update(f"{name}\0{stat.st_size}\0{changed}\0".encode(errors="surrogateescape"))
        if path.suffix in _READ:
            with open_plain(path) as file:
                total.update(file.read())
    return total.hexdigest()


@cache
def _installed() -> str:
    """Return the digest of vivace's source, and of the folders of packages, which change with what is installed."""
    own = Path(__file__).parents[2]
    stats = [(path.relative_to(own).as_posix(), path.stat()) for path in sorted(own.rglob("*.py"))]
    parts: list[Any] = [sys.version, [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]]
    for library in ("torch", "diffusers", "transformers", "torchao"):
        spec = importlib.util.find_spec(library)
        if spec is not None and spec.origin is not None:
            folder = Path(spec.origin).parents[2]
            parts.append((str(folder), folder.stat().st_mtime_ns))
    return hashlib.sha256(json.dumps(parts).encode(errors="surrogateescape")).hexdigest()


def _read(path: Path) -> Any | None:
    try:
        content = json.loads(path.read_bytes())
        if isinstance(content, dict):
            Prediction.model_validate(content)
            return content
        name, _, _ = content
        return content if name in {refusal.__name__ for refusal in _REFUSALS} else None
    except (OSError, ValueError, TypeError):
        return None


def _answer_of(content: Any) -> Prediction:
    if isinstance(content, dict):
        return Prediction.model_validate(content)
    name, reason, already_so = content
    kind = {refusal.__name__: refusal for refusal in _REFUSALS}[name]
    raise NoEffect(reason, already_so=already_so) if kind is NoEffect else kind(reason)


def _keep(path: Path, content: Any) -> None:
    """Write an answer as a whole. Where the cache cannot be written, the next call predicts again."""
    try:
        replace(path, json.dumps(content).encode(errors="surrogateescape"))
        kept = sorted(path.parent.glob("*.json"), key=lambda kept_path: kept_path.stat().st_mtime_ns)
        for old in kept[: len(kept) // 2] if len(kept) > MOST_KEPT else ():
            old.unlink(missing_ok=True)
    except (OSError, OutputError):
        return


FILE = Path(__file__).with_name("shipped_answers.jsonl")
LIBRARIES = ("diffusers", "transformers", "torchao")
_OWN = {"batch": 1, "text": "prompts"}


def shipped_answer(
    model: str, defaults: Mapping[str, Any], recipe: str, request: Mapping[str, Any]
) -> Any | None:
    """Return the answer to a question as `remembered` keeps it, as JSON holds it; None if none is shipped."""
    published = footprints().get(model)
    made_with, answers = _shipped_answers()
    if published is None or made_with != versions():
        return None
    own = _OWN | {"height": defaults["height"], "width": defaults["width"], "task": published.task}
    if any(value is not None and value != own[name] for name, value in request.items()):
        return None
    if recipe == BASELINE:
        return published.model_dump(mode="json")
    return answers.get((model, recipe))


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries, without the last number; "" of those that are not there."""
    found = dict.fromkeys(LIBRARIES, "")
    for name in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = ".".join(importlib.metadata.version(name).split(".")[:2])
    return found


@cache
def _shipped_answers() -> tuple[dict[str, str], dict[tuple[str, str], Any]]:
    """Return the versions with which the shipped answers were made, and the answers by model and recipe."""
    made_with, *answers = map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
    return made_with, {(model, recipe): answer for model, recipe, answer in answers}


FOOTPRINTS = Path(__file__).with_name("footprints.json")
Scheme = Literal["int8", "nf4"]


class Quantised(Spec):
    """A network with its Linear layers quantised.

    Attributes:
        share: of its bytes that are left; embeddings, convolutions and norms stay.
        beside_bytes: what it needs more than before while it computes: the dequantised weights of a layer.
        loading_bytes: what quantising it needs beside all weights: its largest layer.
    """

    share: float
    beside_bytes: int
    loading_bytes: int


class Footprints(Spec):
    """Predictions of the catalogue's models, each at its own size, and of their networks quantised, by `network`."""

    models: dict[str, Prediction] = Field(default_factory=dict)
    quantised: dict[str, dict[Scheme, Quantised]] = Field(default_factory=dict)


@cache
def shipped() -> Footprints:
    """Return the predictions that ship with vivace."""
    return Footprints.model_validate_json(FOOTPRINTS.read_bytes())


def footprints() -> dict[str, Prediction]:
    """Return the predictions of the models of the catalogue, by name."""
    return shipped().models


def network(part: ComponentBytes) -> str:
    """Return the identity of a network: its class and its number of parameters."""
    return f"{part.class_name} {part.num_parameters}"
