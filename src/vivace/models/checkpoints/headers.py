"""Read the headers of safetensors files without torch, and check that the files are complete: eight bytes of length, a
JSON object of that length, then the tensors' bytes up to the last offset in the JSON
(github.com/huggingface/safetensors)."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import open_plain, parse_json, reading
from vivace.models.checkpoints.gguf_file import SUFFIX, read_gguf_header

_MAX_HEADER = 16_000_000
"""Most bytes of a header. Published headers have less than 1 MB; the format's own limit is 100 MB."""
_HUBS_FILES = "blobs"
"""The folder of the hub's cache with the files' contents."""
_START = 64  # bytes that tell a file's format
_FORMATS = (
    (b"PK\x03\x04", "a zip archive, as PyTorch's pickles are"),
    (b"\x80\x02", "a pickle"),
    (b"\x80\x03", "a pickle"),
    (b"\x80\x04", "a pickle"),
    (b"GGUF", "a GGUF file; its name must end in .gguf"),
    (b"version https://git-lfs", "a pointer of Git LFS, not the file itself"),
    (b"<", "a web page, not the file itself"),
    (b"\x89HDF", "an HDF5 file"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x1f\x8b", "a gzip archive"),
)
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def read_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("F16"), shape and data_offsets, by name."""
    if path.suffix == SUFFIX:
        return read_gguf_header(path)
    return _read(path)[0]


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata that the writer of a safetensors file put into its header; empty for a GGUF file."""
    if path.suffix == SUFFIX:
        return {}
    metadata = _read(path)[1]
    return {name: value for name, value in metadata.items() if isinstance(value, str)}


def read_tensor(path: Path, name: str, limit: int) -> bytes:
    """Return the bytes of one tensor of a safetensors file, of at most `limit` bytes."""
    tensors, _, start = _read(path)
    begin, end = tensors[name]["data_offsets"]
    if end - begin > limit:
        raise UnusableModel(f"{path} has a tensor {name[:80]!r} of {end - begin:,} bytes; {limit:,} are read")
    with reading(path), open_plain(path) as file:
        file.seek(start + begin)
        return file.read(end - begin)


def _read(path: Path) -> tuple[dict[str, dict[str, Any]], dict[str, Any], int]:
    """Return the tensors of a safetensors file, its metadata, and where its data starts."""
    with reading(path), open_plain(path) as file:
        size = os.fstat(file.fileno()).st_size
        beginning = file.read(8)
        length = int.from_bytes(beginning, "little")
        text = file.read(length if length <= _MAX_HEADER else _START - 8)
    if 8 < size < 8 + length <= 8 + _MAX_HEADER:
        raise UnusableModel(f"{path} is truncated: {size:,} bytes, less than its header; {_replace(path)}")
    try:
        if length > _MAX_HEADER:
            raise ValueError(f"it starts like {_format_of(beginning + text)}")
        tensors = parse_json(text, unique=True)
        if not isinstance(tensors, dict):
            raise ValueError("its header is no object")
        metadata = tensors.pop("__metadata__", None)
        end = 8 + length + _data_end(tensors)
    except ValueError as error:
        what = "is empty" if size == 0 else f"is not a safetensors file, or is damaged ({error})"
        raise UnusableModel(f"{path} {what}; {_replace(path)}") from None
    if size != end:
        what = "is truncated" if size < end else "is longer than its header says"
        raise UnusableModel(f"{path} {what}: {size:,} bytes, not {end:,}; {_replace(path)}")
    return tensors, metadata if isinstance(metadata, dict) else {}, 8 + length


def _format_of(beginning: bytes) -> str:
    """Name the format of a file that is not a safetensors file by its first bytes."""
    return next((name for magic, name in _FORMATS if beginning.startswith(magic)), "no file of weights")


def _data_end(tensors: dict[str, Any]) -> int:
    """Return where the last tensor ends; together they must fill the file without gaps and overlaps."""
    spans = []
    for name, about in tensors.items():
        entry = about if isinstance(about, dict) else {}
        dtype, shape, span = str(entry.get("dtype")), entry.get("shape"), entry.get("data_offsets")
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
    # Other links are the user's, to files that nothing downloads again.
    if path.is_symlink() and path.resolve().parent.name == _HUBS_FILES:
        return f"delete {path.resolve()}; the next run downloads it again"
    return "copy or download it again"
