"""Read the header of a GGUF file with the optional package `gguf`, and check that the file is complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel
from vivace.untrusted.files import open_plain
from vivace.untrusted.reading import reading, reason

SUFFIX = ".gguf"
_MAX_READS = 2_000_000
"""Limit on numbers and names read from a header: a tensor takes about six, FLUX.1 has fewer than a thousand tensors."""


def read_gguf_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("Q8_0"), shape (last dimension contiguous) and data_offsets, by name.

    Raises:
        UnusableModel: the file is not a GGUF file, or incomplete.
        Unsupported: the package is not installed.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise Unsupported(
            f"{path} is a GGUF file, which needs the package gguf: pip install 'vivace[gguf]'"
        ) from error

    class Bounded(GGUFReader):  # type: ignore[misc]
        """Stop where a damaged header claims more entries than the file has; the library would loop over them all."""

        num_reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.num_reads += 1
            if int(offset) >= len(self.data) or self.num_reads > _MAX_READS:
                raise ValueError("the header goes beyond the file")
            return super()._get(offset, dtype, count, override_order)

    with reading(path):
        open_plain(path).close()
    try:
        tensors = Bounded(path).tensors
        header = {
            tensor.name: {
                "dtype": tensor.tensor_type.name,
                "shape": [int(length) for length in reversed(tensor.shape)],
                "data_offsets": [int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)],
            }
            for tensor in tensors
        }
        end = max(about["data_offsets"][1] for about in header.values())
        size = path.stat().st_size
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise UnusableModel(
            f"{path} is not a GGUF file, or is damaged ({reason(error)}); copy or download it again"
        ) from error
    if size < end:
        raise UnusableModel(f"{path} is truncated: {size:,} bytes, not {end:,}; copy or download it again")
    return header
