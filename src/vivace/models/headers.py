"""Read the headers of safetensors files without torch, and check that the files are complete.

GGUF headers are read by `gguf_file`. The safetensors format is eight bytes of length, a JSON object of that length,
then the tensors' bytes up to the last offset in the JSON (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.gguf_file import SUFFIX, read_gguf_header

_MAX_HEADER = 100_000_000  # bytes; the format's own limit


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("F16"), shape and data_offsets, by name.

    Raises:
        UnusableModel: the file is not a safetensors file, or incomplete.
        Unsupported: it is a GGUF file, and the package gguf is not installed.
    """
    if path.suffix == SUFFIX:
        return read_gguf_header(path)
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _MAX_HEADER else b""
        if size < 8 + length <= 8 + _MAX_HEADER and size > 8:
            raise UnusableModel(
                f"{path} is truncated: {size:,} bytes, less than its header; {_replace(path)}"
            )
        tensors = {name: about for name, about in json.loads(text).items() if name != "__metadata__"}
        end = 8 + length + max(about["data_offsets"][1] for about in tensors.values())
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError):
        what = "is empty" if size == 0 else "is not a safetensors file, or is damaged"
        raise UnusableModel(f"{path} {what}; {_replace(path)}") from None
    if size != end:
        what = "is truncated" if size < end else "is longer than its header says"
        raise UnusableModel(f"{path} {what}: {size:,} bytes, not {end:,}; {_replace(path)}")
    return tensors


def check_whole(paths: Iterable[Path]) -> None:
    """Raise UnusableModel for the first incomplete file. Reads only headers."""
    for path in paths:
        read_header(path)


def main_dtype(path: Path) -> str:
    """Return the dtype of most of the file's bytes: "F32", "F16", "BF16", "F8_E4M3", ..."""
    num_bytes: dict[str, int] = {}
    for about in read_header(path).values():
        start, end = about["data_offsets"]
        num_bytes[about["dtype"]] = num_bytes.get(about["dtype"], 0) + end - start
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _replace(path: Path) -> str:
    # In the hub's cache file names are links, and the client trusts the files behind them, so those must be deleted.
    if path.is_symlink():
        return f"delete {path.resolve()}; the next run downloads it again"
    return "copy or download it again"
