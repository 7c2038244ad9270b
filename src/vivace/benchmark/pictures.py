"""Images of a store: PNG files named by the hash of their content."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path


def picture_path(pictures: Path, sha256: str) -> Path:
    """Return the path of an image with that content hash below the folder `pictures`."""
    return pictures / sha256[:2] / f"{sha256}.png"


def save_picture(pictures: Path, png: bytes) -> str:
    """Write a PNG file named by its sha256, atomically and durably; return the sha256."""
    sha256 = hashlib.sha256(png).hexdigest()
    path = picture_path(pictures, sha256)
    if path.exists():
        return sha256
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
    return sha256
