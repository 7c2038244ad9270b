"""`vivace.json` in a folder: what `vivace save` wrote, or the settings of a model that `vivace models` exported."""

from __future__ import annotations

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

NAME = "vivace.json"
_MAX_BYTES = 20_000_000
_AGAIN = "save the model again with `vivace save`"
_KEYS = ("height", "width", "num_inference_steps", "guidance_scale", "threads")
_BLOCK = 1 << 22  # bytes that are read at a time
_PIECE = 1 << 26
"""Bytes of a file that one thread hashes: a single one takes 6 s and more for 12 GB."""
_READERS = 32


class FolderDefaults(Spec):
    """The content of `vivace.json` in an exported folder."""

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
    advice = "correct it, or delete it"
    with reading(path, advice=advice):
        own = FolderDefaults.model_validate(read_object(path, _MAX_BYTES))
    entry = _entry(own.model, pipeline, str(path), advice)
    return entry.model_copy(update={key: getattr(own, key) for key in _KEYS})


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
    entry = _entry(saved.entry, pipeline, f"{folder / NAME}: the key 'entry'", _AGAIN)
    return entry.model_copy(update=saved.defaults.model_dump())


def _entry(name: str, pipeline: str, where: str, advice: str) -> Entry:
    """Return the catalogue's entry that a file names for a folder with a pipeline, or refuse it."""
    entry = CATALOGUE.get(name)
    if entry is None:
        raise UnusableModel(
            f"{where} names {name[:80]!r}, which this vivace does not have{nearest(name, CATALOGUE)}; {advice}"
        )
    if entry.pipeline != pipeline:
        raise UnusableModel(
            f"{where} names {entry.name}, a {entry.pipeline}, but the folder holds a {pipeline}; {advice}"
        )
    return entry


def check_contents(folder: Path, saved: SavedModel) -> None:
    """Raise UnusableModel for the first file of a saved folder that is missing, new, or changed. Every file is read as
    a whole."""
    files = saved_files(folder)
    for name in sorted(saved.files.keys() - files.keys()):
        raise UnusableModel(
            f"{folder / NAME}: the key 'files' names {name[:200]!r}, which is not there; copy it again"
        )
    for name in sorted(files.keys() - saved.files.keys()):
        raise UnusableModel(f"{files[name]} is not among the files that were saved; remove it")
    for name, digest in digests(files, in_pieces=saved.format > 1).items():
        if digest != saved.files[name]:
            raise UnusableModel(
                f"{files[name]} is not the file that was saved: its digest begins with {digest[:12]}, and {NAME} has "
                f"{saved.files[name][:12]} under 'files'; copy it again, or {_AGAIN}"
            )


def saved_files(folder: Path) -> dict[str, Path]:
    """Return the files of a saved folder that `vivace.json` lists."""
    return {name: path for name, path in files_of(folder).items() if name != NAME}


def digests(files: Mapping[str, Path], *, in_pieces: bool) -> dict[str, str]:
    """Return the digests of files by their names; several are read at once, since a core hashes slower than disks
    read."""
    parts = [
        (name, start)
        for name in sorted(files, key=PurePosixPath)
        for start in (range(0, max(1, _size(files[name])), _PIECE) if in_pieces else (0,))
    ]

    def digest(part: tuple[str, int]) -> bytes:
        path, start = files[part[0]], part[1]
        with reading(path), open_plain(path) as file:
            file.seek(start)
            total, left = hashlib.sha256(), _PIECE if in_pieces else _size(path)
            while left > 0 and (block := file.read(min(_BLOCK, left))):
                total.update(block)
                left -= len(block)
            return total.digest()

    by_name: dict[str, list[bytes]] = {}
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        for (name, _), piece in zip(parts, readers.map(digest, parts), strict=True):
            by_name.setdefault(name, []).append(piece)
    return {
        name: (hashlib.sha256(b"".join(pieces)).digest() if in_pieces else pieces[0]).hex()
        for name, pieces in by_name.items()
    }


def _size(path: Path) -> int:
    with reading(path):
        return path.stat().st_size
