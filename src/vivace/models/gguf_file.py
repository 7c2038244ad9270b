"""The header of a GGUF file, by the optional package `gguf`: what it holds, and whether all of it is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel

SUFFIX = ".gguf"
_MOST_READS = 2_000_000
"""Of numbers and names in a header: a tensor takes about six, FLUX.1 has fewer than a thousand."""


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

    class Bounded(GGUFReader):  # type: ignore[misc]
        """Where a damaged file tells of more than it has, the library would go on for as long as the number says."""

        num_reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.num_reads += 1
            if int(offset) >= len(self.data) or self.num_reads > _MOST_READS:
                raise ValueError("the header goes beyond the file")
            return super()._get(offset, dtype, count, override_order)

    try:
        tensors = Bounded(path).tensors
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
