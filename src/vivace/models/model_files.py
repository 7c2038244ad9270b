"""The files of a model, which may be spread over several folders: names, sizes, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from vivace.foundation.untrusted.files import open_plain, read_object, user_path

_HASHED = {".json", ".safetensors", ".gguf", ".txt"}
_HASHED_WHOLE = 1_000_000  # bytes; of larger files the size and the first and last MB are hashed


def files_of(folder: Path, components: Iterable[Path] = ()) -> dict[str, Path]:
    """Return every file by its name in the model ("unet/config.json"), sorted by name."""
    replaced = {component.name: component for component in components}
    files = {
        name: path for name, path in _below(folder).items() if PurePosixPath(name).parts[0] not in replaced
    }
    for component in replaced.values():
        files |= {f"{component.name}/{name}": path for name, path in _below(component).items()}
    # Sorted as paths, not as strings: fingerprints depend on this order.
    return {name: files[name] for name in sorted(files, key=PurePosixPath)}


def exists_as(name: str) -> tuple[bool, bool]:
    """Return whether a user's name is that of a folder, and of a file."""
    try:
        path = user_path(name)
        return path.is_dir(), path.is_file()
    except (OSError, ValueError):  # too long, or a NUL byte
        return False, False


def num_bytes(files: Mapping[str, Path]) -> int:
    return sum(path.stat().st_size for path in files.values())


def fingerprint(files: Mapping[str, Path]) -> str:
    """Return the sha256 of the names and contents of configuration and weight files, 16 hex digits."""
    total = hashlib.sha256()
    for name, path in files.items():
        if path.suffix not in _HASHED:
            continue
        size = path.stat().st_size
        total.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
        with open_plain(path) as file:
            total.update(file.read(_HASHED_WHOLE))
            if size > _HASHED_WHOLE:
                file.seek(max(_HASHED_WHOLE, size - _HASHED_WHOLE))
                total.update(file.read())
    return total.hexdigest()[:16]


def component_class(folder: Path) -> str:
    """Return the class that a component's config.json names."""
    name = read_object(folder / "config.json").get("_class_name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'config.json'} names no class")
    return name


def _below(folder: Path) -> dict[str, Path]:
    return {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
