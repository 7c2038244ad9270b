"""The header of a GGUF file, by the optional package `gguf`: what it holds, and whether all of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel

SUFFIX = ".gguf"


def read_gguf_header(path: Path) -> dict[str, dict[str, Any]]:
    """Each tensor's dtype ("Q8_0"), shape (the last dimension contiguous) and data_offsets, by name.

    Raises:
        UnusableModel: the file is no GGUF file, or not whole.
        Unsupported: the package is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Unsupported(
            f"{path} is a GGUF file, and the package gguf, which reads them, is not installed: "
            "pip install 'vivace[gguf]'"
        ) from error
    try:
        tensors = GGUFReader(path).tensors
        # The reader maps the file, and does not say that a tensor's bytes are not there.
        found = {
            tensor.name: {
                "dtype": tensor.tensor_type.name,
                "shape": [int(length) for length in reversed(tensor.shape)],
                "data_offsets": [int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)],
            }
            for tensor in tensors
        }
        end = max(about["data_offsets"][1] for about in found.values())
        size = path.stat().st_size
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError, OverflowError):  # numpy's words on what it could not view
        raise UnusableModel(f"{path} is no GGUF file, or a damaged one; copy or download it again") from None
    if size < end:
        raise UnusableModel(f"{path} is cut short: {size:,} bytes, not {end:,}; copy or download it again")
    return found
