"""Images of a store: PNG files named by the hash of their content, and the images that workloads start from."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import VivaceError
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.image_files import open_image
from vivace.models.sources import sha_of

if TYPE_CHECKING:
    from PIL.Image import Image


def image_path(images: Path, sha256: str) -> Path:
    return images / sha256[:2] / f"{sha256}.png"


def save_image(images: Path, png: bytes) -> str:
    """Write a PNG file named by its sha256, atomically and durably; return the sha256."""
    sha256 = hashlib.sha256(png).hexdigest()
    _write(image_path(images, sha256), png)
    return sha256


def save_sources(folder: Path, by_sha: Mapping[str, Image]) -> str:
    """Write the images that a workload starts from, named by the sha256 of their pixels; return the folder.

    So a run can be resumed from the store, and shown, when the user's own files are gone.
    """
    for sha256, image in by_sha.items():
        png = io.BytesIO()
        image.save(png, format="PNG")
        _write(image_path(folder, sha256), png.getvalue())
    return str(folder.absolute())


def read_sources(folder: Path, workload: Workload) -> dict[str, Any]:
    """Return a workload's images by the sha256 of their pixels."""
    images: dict[str, Any] = {}
    for source in workload.sources:
        for sha256 in source.hashes:
            path = image_path(folder, sha256)
            image = open_image(path)
            if sha256 == source.mask:
                image = image.convert("L")
            if sha_of(image) != sha256:
                raise VivaceError(f"{path} was changed; give the files again, which writes it anew")
            images[sha256] = image
    return images


def _write(path: Path, png: bytes) -> None:
    if path.exists():
        return
    replace(path, png)
