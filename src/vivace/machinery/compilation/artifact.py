"""Compiled code as one file that another machine of the same kind can use.

The file is a zip: the files of the cache folder that one recipe's compilation filled, and `vivace.json`, which says
what they were compiled for. Compilers look code up by its source and options, so code that does not fit is
never run; the manifest lets vivace say so before anything is copied.

It contains machine code, and PyTorch's cache entries, which execute code when they are read. It is as trustworthy as
whoever made it, like a wheel.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import Field, ValidationError

from vivace.errors import OutputError, Unsupported, UnusableModel
from vivace.foundation.spec.base import Spec
from vivace.foundation.untrusted.files import reason

MANIFEST = "vivace.json"
_FORMAT = 1
_MOST_FILES, _MOST_BYTES, _MOST_MANIFEST_BYTES = 100_000, 8 * 10**9, 10**7
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip; fixed, so that the same code gives the same file
_UNUSED = (".lock", ".tmp", ".part")


class CompiledFor(Spec):
    """The conditions that compiled code depends on besides its source.

    Attributes:
        platform: system, architecture and Python, e.g. "Linux x86_64, Python 3.12".
        device: the GPU's name, or the CPU's, whose instructions the code uses.
        libraries: versions by name: torch, triton, cuda.
        folder: where PyTorch is installed: code for CPUs is looked up with its paths; "" on GPUs, where it is not.
    """

    platform: str
    device: str
    libraries: dict[str, str]
    folder: str = ""

    def differences(self, other: CompiledFor) -> list[str]:
        """Describe the differences between what the code needs and what this machine has."""
        differences = [
            f"{name}: compiled for {compiled}, here is {here}"
            for name, compiled, here in (
                ("platform", self.platform, other.platform),
                ("device", self.device, other.device),
                ("PyTorch's folder", self.folder, other.folder),
            )
            if compiled != here
        ]
        for name in sorted({*self.libraries, *other.libraries}):
            compiled, here = self.libraries.get(name, "none"), other.libraries.get(name, "none")
            if compiled != here:
                differences.append(f"{name}: compiled with {compiled}, here is {here}")
        return differences


class Manifest(Spec):
    """The content of an artifact. `files` are SHA-256 by path below the cache folder; `first_call_s` is the cold
    one."""

    format: Literal[1]
    vivace: str
    model: str
    recipe: str
    workload: str
    compiled_for: CompiledFor
    first_call_s: float
    files: dict[str, str] = Field(max_length=_MOST_FILES)


def pack(folder: Path, manifest: Manifest) -> bytes:
    """Return the artifact of a cache folder; `manifest.files` is filled in.

    Raises:
        Unsupported: the folder has no files, so nothing was compiled.
    """
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix not in _UNUSED
    }
    if not contents:
        raise Unsupported("nothing was compiled: the recipe has no technique that compiles; add compile")
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    listed = manifest.model_copy(update={"files": files})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {MANIFEST: listed.model_dump_json(indent=1).encode(), **contents}.items():
            info = zipfile.ZipInfo(name, _EARLIEST)
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, content)
    return buffer.getvalue()


def unpack(path: Path, folder: Path, here: CompiledFor) -> int:
    """Put an artifact's files into a cache folder; return the number of new files. Existing files are kept.

    Raises:
        UnusableModel: the file is no artifact of vivace, or is damaged.
        Unsupported: it was compiled for another environment.
        OutputError: the folder cannot be written.
    """
    with _opened(path) as file:
        manifest = _manifest(path, file)
        if differences := manifest.compiled_for.differences(here):
            raise Unsupported(
                f"{path} does not fit this environment ({'; '.join(differences)}); make one here: "
                f"vivace warm {manifest.model} --recipe {manifest.recipe!r} -o {path.name}"
            )
        contents: dict[str, bytes] = {}
        for name, sha256 in manifest.files.items():
            try:
                content = file.read(name)
            except (KeyError, zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError) as error:
                raise _damaged(path, f"{name}: {error}") from error
            if hashlib.sha256(content).hexdigest() != sha256:
                raise _damaged(path, f"{name} is not what the manifest says")
            contents[name] = content
    return sum(_write_new(folder / name, content) for name, content in contents.items())


def _opened(path: Path) -> zipfile.ZipFile:
    if not path.is_file():
        raise UnusableModel(f"there is no file {path}; `vivace warm MODEL --recipe R -o FILE` makes one")
    try:
        file = zipfile.ZipFile(path)
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    entries = file.infolist()
    if len(entries) > _MOST_FILES + 1 or sum(entry.file_size for entry in entries) > _MOST_BYTES:
        file.close()
        raise _damaged(path, "it is larger than compiled code can be")
    return file


def _manifest(path: Path, file: zipfile.ZipFile) -> Manifest:
    try:
        info = file.getinfo(MANIFEST)
        if info.file_size > _MOST_MANIFEST_BYTES:
            raise ValueError("its manifest is too large")
        fields = json.loads(file.read(info))
        if isinstance(fields, dict) and fields.get("format") not in (_FORMAT, None):
            raise _damaged(path, f"it has format {fields['format']}, which another version of vivace wrote")
        manifest = Manifest.model_validate(fields)
    except ValidationError as error:
        raise _damaged(path, f"its manifest lacks {error.errors()[0]['loc']}") from error
    except (KeyError, ValueError, RecursionError, zipfile.BadZipFile, RuntimeError) as error:
        raise _damaged(path, reason(error)) from error
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise _damaged(path, f"it names a file outside of the cache folder ({name!r})")
    return manifest


def _damaged(path: Path, why: str) -> UnusableModel:
    return UnusableModel(f"{path} is not compiled code that vivace packed, or is damaged: {why}")


def _write_new(path: Path, content: bytes) -> bool:
    """Write a file at once, unless it exists; compilers may be reading the folder meanwhile."""
    if path.exists():
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(name, 0o755 if path.suffix == ".so" else 0o644)
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise OutputError(
            f"{path} cannot be written: {error.strerror}; free space, or set VIVACE_CACHE"
        ) from error
    return True
