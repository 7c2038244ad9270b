"""The headers of safetensors files, read without torch: what a file holds, and whether all of it is there. Those of
GGUF files are read by `gguf_file`.

Format: eight bytes of length, a JSON object of that length, then the tensors' bytes, up to the last offset that the
JSON names (github.com/huggingface/safetensors).
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
    """Each tensor's dtype ("F16"), shape and data_offsets, by name.

    Raises:
        UnusableModel: the file is no safetensors file, or not whole.
        Unsupported: it is a GGUF file, and the package that reads them is not installed.
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
                f"{path} is cut short: {size:,} bytes, less than its header; {_replace(path)}"
            )
        tensors = {name: about for name, about in json.loads(text).items() if name != "__metadata__"}
        end = 8 + length + max(about["data_offsets"][1] for about in tensors.values())
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError):
        what = "is empty" if size == 0 else "is no safetensors file, or a damaged one"
        raise UnusableModel(f"{path} {what}; {_replace(path)}") from None
    if size != end:
        what = "is cut short" if size < end else "has more in it than its header says"
        raise UnusableModel(f"{path} {what}: {size:,} bytes, not {end:,}; {_replace(path)}")
    return tensors


def check_whole(paths: Iterable[Path]) -> None:
    """Raises UnusableModel for the first file that is not whole. Reads headers only."""
    for path in paths:
        read_header(path)


def main_dtype(path: Path) -> str:
    """The dtype that most of the file's bytes have: "F32", "F16", "BF16", "F8_E4M3", ..."""
    num_bytes: dict[str, int] = {}
    for about in read_header(path).values():
        start, end = about["data_offsets"]
        num_bytes[about["dtype"]] = num_bytes.get(about["dtype"], 0) + end - start
    return max(num_bytes, key=lambda dtype: num_bytes[dtype])


def _replace(path: Path) -> str:
    # In the hub's cache names are links; the client trusts whatever they lead to, so that is what must go.
    if path.is_symlink():
        return f"delete {path.resolve()}, and it is fetched anew when you run this again"
    return "copy or download it again"
