"""Folders that `vivace save` wrote: the content of `vivace.json`, and whether their files are unchanged."""

from __future__ import annotations

import filecmp
import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from pydantic import Field, ValidationError

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Entry
from vivace.errors import UnusableModel, nearest
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.input_errors import expectation_of
from vivace.foundation.spec.saved import FORMAT, SavedModel
from vivace.foundation.untrusted.files import open_plain, read_object, reading
from vivace.models.model_files import files_of
from vivace.models.pipeline_defaults import read_config

_MAX_BYTES = 20_000_000
_AGAIN = "save the model again with `vivace save`"
_BLOCK = 1 << 22  # bytes that are read at a time
_READERS = 8
"""Number of files that are hashed at once."""
_PIECE = 1 << 26
"""Bytes of a file that one thread hashes: a single one takes 6 s and more for 12 GB."""
_PIECE_READERS = 32


def read_saved(folder: Path) -> SavedModel | None:
    """Return the description of a folder; None for one that `vivace save` did not write."""
    path = folder / NAME
    if not path.exists():
        return None
    with reading(path, advice=f"correct it, or {_AGAIN}"):
        content = read_object(path, _MAX_BYTES)
        if "format" not in content:
            return None
        number = content["format"]
        if isinstance(number, int) and number > FORMAT:
            raise UnusableModel(
                f"{path}: the key 'format' is {number}, and this version of vivace reads up to {FORMAT}; update "
                f"vivace, or {_AGAIN} in this version"
            )
        try:
            return SavedModel.model_validate(content)
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise ValueError(f"the key {key[:80]!r} {expectation_of(error)}") from None


def entry_of(folder: Path, saved: SavedModel, pipeline: str) -> Entry | None:
    """Return the catalogue's entry that a saved folder names, with the folder's own defaults; None if it names none."""
    if saved.entry is None:
        return None
    entry = CATALOGUE.get(saved.entry)
    if entry is None:
        raise UnusableModel(
            f"{folder / NAME}: the key 'entry' names {saved.entry[:80]!r}, which this vivace does not have"
            f"{nearest(saved.entry, CATALOGUE)}; {_AGAIN}"
        )
    if entry.pipeline != pipeline:
        raise UnusableModel(
            f"{folder / NAME}: the key 'entry' names {entry.name}, a {entry.pipeline}, but the folder holds a "
            f"{pipeline}; {_AGAIN}"
        )
    return entry.model_copy(update=saved.defaults.model_dump())


def check_contents(folder: Path, saved: SavedModel) -> None:
    """Raise UnusableModel for the first file of a saved folder that is missing, new, or changed.

    Every file is read as a whole.
    """
    files = {name: path for name, path in files_of(folder).items() if name != NAME}
    for name in sorted(saved.files.keys() - files.keys()):
        raise UnusableModel(
            f"{folder / NAME}: the key 'files' names {name[:200]!r}, which is not there; copy it again"
        )
    for name in sorted(files.keys() - saved.files.keys()):
        raise UnusableModel(f"{files[name]} is not among the files that were saved; remove it")
    for name, digest in (digests if saved.format == 1 else piecewise_digests)(files).items():
        if digest != saved.files[name]:
            raise UnusableModel(
                f"{files[name]} is not the file that was saved: its digest begins with {digest[:12]}, and {NAME} has "
                f"{saved.files[name][:12]} under 'files'; copy it again, or {_AGAIN}"
            )


def sha256(path: Path) -> str:
    """Return the sha256 of a regular file, in hex."""
    with open_plain(path) as file:
        total = hashlib.sha256()
        while block := file.read(_BLOCK):
            total.update(block)
    return total.hexdigest()


def digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the sha256 of files, by their names."""
    names = sorted(files, key=PurePosixPath)

    def digest(name: str) -> str:
        with reading(files[name]):
            return sha256(files[name])

    with ThreadPoolExecutor(_READERS) as readers:
        return dict(zip(names, readers.map(digest, names), strict=True))


def piecewise_digests(files: Mapping[str, Path]) -> dict[str, str]:
    """Return the digest of files, by their names: the sha256 of the sha256s of their pieces of 64 MiB."""
    starts = [
        (name, start)
        for name in sorted(files, key=PurePosixPath)
        for start in range(0, max(1, _size(files[name])), _PIECE)
    ]

    def digest(at: tuple[str, int]) -> bytes:
        name, start = at
        with reading(files[name]), open_plain(files[name]) as file:
            file.seek(start)
            total, left = hashlib.sha256(), _PIECE
            while left and (block := file.read(min(_BLOCK, left))):
                total.update(block)
                left -= len(block)
            return total.digest()

    totals = {name: hashlib.sha256() for name, _ in starts}
    with ThreadPoolExecutor(min(_PIECE_READERS, os.cpu_count() or 1)) as readers:
        for (name, _), piece in zip(starts, readers.map(digest, starts), strict=True):
            totals[name].update(piece)
    return {name: total.hexdigest() for name, total in totals.items()}


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size


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
    """Return the catalogue's entry of an exported model, with the folder's own defaults; None without `vivace.json`."""
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
