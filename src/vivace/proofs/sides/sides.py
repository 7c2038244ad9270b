"""The two sides of a proof, as written on the command line.

    MODEL:RECIPE                   tiny-sd:baseline, org/repo@main:bf16+fp8, synthetic:sd15:bf16; without a recipe: the
                                   baseline
    FOLDER                         a folder of images
    http://HOST:PORT/v1?model=M    an OpenAI images endpoint; further values of the query are fields of each request
    comfyui:http://HOST:PORT?workflow=FILE
                                   a ComfyUI server with a workflow in the API format (see `comfyui`)
    python:MODULE:FUNCTION         a function that takes prompt and seed, and returns an image

Names of catalogue models, of repositories and `synthetic:NAME` hold no further colon, so the recipe begins behind the
first. Of a path with colons, the longest beginning that exists is the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

from vivace.errors import RecipeError, UsageError
from vivace.foundation.spec.recipe_syntax import BASELINE
from vivace.foundation.untrusted.files import parse_json, user_path
from vivace.models.catalogue import CATALOGUE
from vivace.models.find import SYNTHETIC
from vivace.recipes.resolve import resolve

_PYTHON = "python:"
_COMFYUI = "comfyui:"
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_SECRET = re.compile(r"(?i)(^|[_-])(key|apikey|token|secret|password|authorization)$")
_OWN_FIELDS = ("prompt", "seed", "n", "size", "num_inference_steps", "guidance_scale", "response_format")


@dataclass(frozen=True)
class RecipeSide:
    """A model with a recipe, drawn in this process."""

    text: str
    model: str
    recipe: str


@dataclass(frozen=True)
class FolderSide:
    """A folder of images."""

    text: str


@dataclass(frozen=True)
class EndpointSide:
    """An OpenAI images endpoint. `url` ends before `/images/generations`; `fields` are added to each request."""

    text: str
    url: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FunctionSide:
    """A Python function."""

    text: str
    module: str
    function: str


@dataclass(frozen=True)
class ComfySide:
    """A ComfyUI server with a workflow, which is a file in the API format."""

    text: str
    url: str
    workflow: str


Side = RecipeSide | FolderSide | EndpointSide | FunctionSide | ComfySide


def parse_side(text: str) -> Side:
    """Parse a side of a proof.

    Raises:
        UsageError, RecipeError: it is none of the forms above.
    """
    text = text.strip()
    if not text:
        raise UsageError(
            "a side is empty; give MODEL:RECIPE, a folder, http://HOST:PORT/v1 or python:MODULE:FUNCTION"
        )
    if text.lower().startswith(("http://", "https://")):
        return _endpoint(text)
    if text.lower().startswith(_COMFYUI):
        return _comfyui(text)
    if text.lower().startswith(_PYTHON):
        target = text[len(_PYTHON) :]
        if not _FUNCTION.fullmatch(target):
            raise UsageError(f"{text[:200]}: give python:MODULE:FUNCTION, e.g. python:my_model:draw")
        module, _, function = target.partition(":")
        return FunctionSide(text, module, function)
    if text.lower() not in CATALOGUE and _is_folder_of_images(text):
        return FolderSide(text)
    model, recipe = split_model(text)
    _check_recipe(text, model, recipe)
    return RecipeSide(text, model, recipe)


def split_model(text: str) -> tuple[str, str]:
    """Return the model and the recipe of MODEL:RECIPE. Without a recipe it is the baseline."""
    colons = [place for place, letter in enumerate(text) if letter == ":"]
    if text.lower().startswith(SYNTHETIC) or re.match(r"[A-Za-z]:[\\/]", text):  # a drive of Windows
        colons = colons[1:]
    if not colons:
        return text, BASELINE
    if _exists(text):
        return text, BASELINE
    paths = [place for place in colons if "/" in text[:place] and _exists(text[:place])]
    split = paths[-1] if paths else colons[0]
    return text[:split], text[split + 1 :].strip() or BASELINE


def _check_recipe(text: str, model: str, recipe: str) -> None:
    """Raise RecipeError for a wrong recipe, and UsageError for a recipe without a model."""
    if model.lower() not in CATALOGUE and _is_recipe(text):
        raise UsageError(
            f"{text[:200]} is a recipe without a model; give MODEL:RECIPE, e.g. tiny-sd:{text[:100]}"
        )
    resolve(recipe)


def _is_recipe(text: str) -> bool:
    try:
        resolve(text)
    except RecipeError:
        return False
    return True


def _endpoint(text: str) -> EndpointSide:
    parts = urlsplit(text)
    try:
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_complete = False
    if parts.username is not None:
        raise UsageError(
            "an address has a user or a password in it, which every request and the page would show; leave them out, "
            "and give a key with --key-a FILE or --key-b FILE"
        )
    if not is_complete or parts.fragment:
        raise UsageError(f"{text[:200]}: give http://HOST:PORT/v1, optionally with ?model=NAME&FIELD=VALUE")
    path = parts.path.rstrip("/").removesuffix("/images/generations")
    fields: dict[str, Any] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if _SECRET.search(name):
            raise UsageError(
                f"the field {name[:40]} looks like a secret, which every request and the page would show; give a key "
                "with --key-a FILE or --key-b FILE"
            )
        if name in _OWN_FIELDS or name in fields:
            why = "is set by vivace" if name in _OWN_FIELDS else "is there twice"
            raise UsageError(
                f"{text[:200]}: the field {name} {why}; leave it out, and use vivace's own options"
            )
        fields[name] = _value(value) if name != "model" else value
    return EndpointSide(text, urlunsplit((parts.scheme, parts.netloc, path, "", "")), fields)


def _comfyui(text: str) -> ComfySide:
    parts = urlsplit(text[len(_COMFYUI) :])
    fields = dict(parse_qsl(parts.query))
    if parts.scheme not in ("http", "https") or not parts.hostname or set(fields) != {"workflow"}:
        raise UsageError(f"{text[:200]}: give comfyui:http://HOST:PORT?workflow=FILE")
    url = urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
    return ComfySide(text, url, fields["workflow"])


def _value(text: str) -> Any:
    """Return a value of a query, parsed as JSON where possible: 4, true, {"scale": 1}; else as text."""
    try:
        return parse_json(text)
    except ValueError:
        return text


def _is_folder_of_images(text: str) -> bool:
    path = user_path(text)
    try:
        return path.is_dir() and not (path / "model_index.json").is_file()
    except (OSError, ValueError):
        return False


def _exists(text: str) -> bool:
    try:
        return user_path(text).exists()
    except (OSError, ValueError):
        return False
