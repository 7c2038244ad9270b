"""Predictions of catalogue models that ship with vivace: building a pipeline and running its call takes seconds.

They are the models as they are published, and what `vivace plan --card` predicts of them for usual sizes of memory.
`python -m benchmarks.shipped_answers` writes the file. A prediction counts only with the libraries that it was made
with, up to their last number; PyTorch is not among them, since the rules of its allocator are vivace's own.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.runtime.memory.footprints import footprints

FILE = Path(__file__).with_name("shipped_answers.jsonl")
LIBRARIES = ("diffusers", "transformers", "torchao")
_OWN = {"batch": 1, "text": "prompts"}


def shipped_answer(
    model: str, defaults: Mapping[str, Any], recipe: str, request: Mapping[str, Any]
) -> Any | None:
    """Return the answer to a question as `remembered` keeps it, as JSON holds it; None if none is shipped.

    Args:
        defaults: of the model's call.
        request: height, width, batch, text, task; what it lacks, or has as None, is the model's own.
    """
    published = footprints().get(model)
    if published is None or _versions() != versions():
        return None
    own = _OWN | {"height": defaults["height"], "width": defaults["width"], "task": published.task}
    if any(value is not None and value != own[name] for name, value in request.items()):
        return None
    if recipe == BASELINE:
        return published.model_dump(mode="json")
    return _answers().get((model, recipe))


def versions() -> dict[str, str]:
    """Return the versions of the installed libraries, without the last number; "" of those that are not there."""
    return {name: _version(name) for name in LIBRARIES}


def _version(name: str) -> str:
    try:
        return ".".join(importlib.metadata.version(name).split(".")[:2])
    except importlib.metadata.PackageNotFoundError:
        return ""


@cache
def _lines() -> tuple[Any, ...]:
    return tuple(json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines())


def _versions() -> dict[str, str]:
    """Return the versions with which the shipped answers were made."""
    made_with: dict[str, str] = _lines()[0]
    return made_with


@cache
def _answers() -> dict[tuple[str, str], Any]:
    """Return the shipped answers, by model and recipe."""
    return {(model, recipe): answer for model, recipe, answer in _lines()[1:]}
