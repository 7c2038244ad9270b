"""Read the headers of safetensors files without torch, and check that the files are complete.

GGUF headers are read by `gguf_file`. The safetensors format is eight bytes of length, a JSON object of that length,
then the tensors' bytes up to the last offset in the JSON (github.com/huggingface/safetensors).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from vivace.errors import UnusableModel
from vivace.foreign.files import open_plain, parse_json
from vivace.foreign.reading import reading
from vivace.models.gguf_file import SUFFIX, read_gguf_header

_MAX_HEADER = 16_000_000
"""Bytes. Published headers have less than 1 MB; the format's own limit is 100 MB."""
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("F16"), shape and data_offsets, by name.

    Raises:
        UnusableModel: the file is not a safetensors file, incomplete, or its header contradicts itself.
        Unsupported: it is a GGUF file, and the package gguf is not installed.
    """
    if path.suffix == SUFFIX:
        return read_gguf_header(path)
    with reading(path), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        text = file.read(length) if length <= _MAX_HEADER else b""
    if 8 < size < 8 + length <= 8 + _MAX_HEADER:
        raise UnusableModel(f"{path} is truncated: {size:,} bytes, less than its header; {_replace(path)}")
    try:
        tensors = parse_json(text, unique=True)
        if not isinstance(tensors, dict):
            raise ValueError("its header is no object")
        tensors.pop("__metadata__", None)
        end = 8 + length + _data_end(tensors)
    except ValueError as error:
        what = "is empty" if size == 0 else f"is not a safetensors file, or is damaged ({error})"
        raise UnusableModel(f"{path} {what}; {_replace(path)}") from None
    if size != end:
        what = "is truncated" if size < end else "is longer than its header says"
        raise UnusableModel(f"{path} {what}: {size:,} bytes, not {end:,}; {_replace(path)}")
    return tensors


def _data_end(tensors: dict[str, Any]) -> int:
    """Return where the last tensor ends; together they must fill the file without gaps and overlaps.

    Raises:
        ValueError: they do not.
    """
    spans = []
    for name, about in tensors.items():
        given = about if isinstance(about, dict) else {}
        dtype, shape, span = str(given.get("dtype")), given.get("shape"), given.get("data_offsets")
        if dtype not in _BITS:
            raise ValueError(f"{name[:80]!r} has no known dtype")
        if not _are_sizes(shape) or not _are_sizes(span) or len(span) != 2:
            raise ValueError(f"{name[:80]!r} has no valid shape or offsets")
        if math.prod(shape) * _BITS[dtype] != 8 * (span[1] - span[0]):
            raise ValueError(f"{name[:80]!r} has a shape that does not fit its offsets")
        spans.append((span[0], span[1]))
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError("its tensors overlap, or leave gaps")
        end = stop
    if not spans:
        raise ValueError("it has no tensors")
    return end


def _are_sizes(values: Any) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


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
