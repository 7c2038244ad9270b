"""Defaults that diffusers' format has no place for: the intended settings of vivace's own models.

An export writes it beside the model as `vivace.json`. Without that file a folder is recognised by its weights, or, if
it was trained further, by its denoiser's configuration.
"""

from __future__ import annotations

import filecmp
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from pydantic import Field

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Entry
from vivace.errors import UnusableModel, nearest
from vivace.foundation.spec.base import Spec
from vivace.foundation.untrusted.files import read_object, reading
from vivace.models.pipeline_defaults import read_config

NAME = "vivace.json"
_MAX_BYTES = 100_000
_KEYS = ("height", "width", "num_inference_steps", "guidance_scale", "threads")


class FolderDefaults(Spec):
    """The content of `vivace.json`.

    model: the catalogue's name of the model that was exported.
    """

    model: str
    height: int = Field(ge=8, le=8192)
    width: int = Field(ge=8, le=8192)
    num_inference_steps: int = Field(ge=1, le=1000)
    guidance_scale: float = Field(ge=0, le=100)
    threads: int | None = Field(default=None, ge=1, le=1024)


def text_of(entry: Entry) -> str:
    """Return the content of `vivace.json` for an exported model."""
    own = FolderDefaults.model_validate({"model": entry.name} | {key: getattr(entry, key) for key in _KEYS})
    return own.model_dump_json(indent=2) + "\n"


def read_defaults(folder: Path, pipeline: str) -> Entry | None:
    """Return the catalogue's entry of an exported model, with the folder's own defaults; None without `vivace.json`.

    Raises:
        UnusableModel: the file is not what an export writes, or is about another kind of model.
    """
    path = folder / NAME
    if not path.exists():
        return None
    with reading(path, advice="correct it, or delete it"):
        own = FolderDefaults.model_validate(read_object(path, _MAX_BYTES))
    entry = CATALOGUE.get(own.model)
    if entry is None:
        raise UnusableModel(
            f"{path} names a model {own.model[:80]!r} that this vivace does not have{nearest(own.model, CATALOGUE)}; "
            "correct it, or delete it"
        )
    if entry.pipeline != pipeline:
        raise UnusableModel(
            f"{path} names {entry.name}, a {entry.pipeline}, but the folder holds a {pipeline}; correct or delete it"
        )
    return entry.model_copy(update={key: getattr(own, key) for key in _KEYS})


def has_same_weights(own: Mapping[str, Path], other: Mapping[str, Path]) -> bool:
    """Return whether two models have the same weights: as many .safetensors files, of the same names and contents."""
    pairs = [(name, path) for name, path in other.items() if PurePosixPath(name).suffix == ".safetensors"]
    return (
        bool(pairs)
        and len(pairs) == sum(PurePosixPath(name).suffix == ".safetensors" for name in own)
        and all(name in own and own[name].stat().st_size == path.stat().st_size for name, path in pairs)
        and all(filecmp.cmp(own[name], path, shallow=False) for name, path in pairs)
    )


def has_same_denoiser(own: Mapping[str, Path], other: Mapping[str, Path]) -> bool:
    """Return whether a folder's denoiser has the architecture of another model's, by its configuration."""
    name = next((name for name in ("unet/config.json", "transformer/config.json") if name in other), None)
    if name is None or name not in own:
        return False
    mine, theirs = read_config(own[name]), read_config(other[name])
    return all(key in mine and mine[key] == value for key, value in theirs.items() if not key.startswith("_"))
