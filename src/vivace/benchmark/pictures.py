"""Images of a store: PNG files named by the hash of their content, and the pictures that workloads start from."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError
from vivace.models.sources import sha_of
from vivace.spec.workload import Workload
from vivace.untrusted.pictures import open_picture

if TYPE_CHECKING:
    from PIL.Image import Image


def picture_path(pictures: Path, sha256: str) -> Path:
    """Return the path of an image with that content hash below the folder `pictures`."""
    return pictures / sha256[:2] / f"{sha256}.png"


def save_picture(pictures: Path, png: bytes) -> str:
    """Write a PNG file named by its sha256, atomically and durably; return the sha256."""
    sha256 = hashlib.sha256(png).hexdigest()
    _write(picture_path(pictures, sha256), png)
    return sha256


def save_sources(folder: Path, by_sha: Mapping[str, Image]) -> str:
    """Write the pictures that a workload starts from, named by the sha256 of their pixels; return the folder.

    So a run can be resumed from the store, and shown, when the user's own files are gone.
    """
    for sha256, picture in by_sha.items():
        png = io.BytesIO()
        picture.save(png, format="PNG")
        _write(picture_path(folder, sha256), png.getvalue())
    return str(folder.absolute())


def read_sources(folder: Path, workload: Workload) -> dict[str, Any]:
    """Return a workload's pictures by the sha256 of their pixels.

    Raises:
        VivaceError: one is missing, or was changed.
    """
    pictures: dict[str, Any] = {}
    for source in workload.sources:
        for sha256 in source.pictures:
            path = picture_path(folder, sha256)
            picture = open_picture(path)
            if sha256 == source.mask:
                picture = picture.convert("L")
            if sha_of(picture) != sha256:
                raise VivaceError(f"{path} was changed; give the files again, which writes it anew")
            pictures[sha256] = picture
    return pictures


def _write(path: Path, png: bytes) -> None:
    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(png)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
