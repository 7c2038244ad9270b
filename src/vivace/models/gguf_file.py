"""Read a GGUF file with the optional package `gguf`, and check that the file is complete."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import open_plain
from vivace.foundation.untrusted.reading import reading, reason

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
KEPT_TYPES = (
    "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that diffusers keeps in memory unchanged, and dequantises in each call."""
FLOAT_TYPES = ("F32", "F16")
_TYPE = 4
"""Place of a tensor's type among the parts of its entry in the header."""
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Keys of ComfyUI-GGUF for tensors that were reshaped so that their rows have whole blocks."""
_MAX_READS = 2_000_000
"""Limit on numbers and names read from a header: a tensor takes about six, FLUX.1 has fewer than a thousand tensors."""


@dataclass(frozen=True)
class StoredValues:
    """A tensor of a GGUF file.

    Attributes:
        data: as it lies in the file.
        quant_type: gguf's.
        shape: of the values.
    """

    data: Any
    quant_type: Any
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.quant_type.name in FLOAT_TYPES

    @property
    def is_kept(self) -> bool:
        """Whether diffusers can keep it quantised: a matrix stored row by row."""
        is_matrix = len(self.shape) == 2 == self.data.ndim and int(self.data.shape[0]) == self.shape[0]
        return self.quant_type.name in KEPT_TYPES and is_matrix

    def packed(self) -> Any:
        """Return the bytes of each row."""
        return self.data.copy()

    def dequantized(self) -> Any:
        """Return the values."""
        from gguf.quants import dequantize

        values = self.data if self.is_float else dequantize(self.data, self.quant_type)
        return values.reshape(self.shape).copy()


def read_gguf_header(path: Path) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("Q8_0"), shape (last dimension contiguous) and data_offsets, by name.

    Raises:
        UnusableModel: the file is not a GGUF file, or incomplete, or has a type that gguf does not dequantise.
        Unsupported: the package is not installed.
    """
    reader = _open(path)
    try:
        header = {
            tensor.name: {
                "dtype": tensor.tensor_type.name,
                "shape": list(_shape(reader, tensor)),
                "data_offsets": [int(tensor.data_offset), int(tensor.data_offset + tensor.n_bytes)],
            }
            for tensor in reader.tensors
        }
        if not header:
            raise ValueError("it has no tensors")
        end = max(about["data_offsets"][1] for about in header.values())
    except Exception as error:
        raise _damaged(path, error) from error
    size = path.stat().st_size
    if size < end:
        raise UnusableModel(f"{path} is truncated: {size:,} bytes, not {end:,}; copy or download it again")
    _check_types(path, reader)
    return header


def read_gguf_tensors(path: Path) -> dict[str, StoredValues]:
    """Return the tensors of a file whose header was checked, by name. Their values stay in the file."""
    reader = _open(path)
    return {
        tensor.name: StoredValues(tensor.data, tensor.tensor_type, _shape(reader, tensor))
        for tensor in reader.tensors
    }


def _open(path: Path) -> Any:
    """Return gguf's reader of a file."""
    with reading(path), open_plain(path) as file:
        beginning = file.read(len(_MAGIC))
    if beginning != _MAGIC:
        raise UnusableModel(
            f"{path} is not a GGUF file: it does not start with GGUF; copy or download it again"
        )
    try:
        from gguf import GGMLQuantizationType, GGUFReader
    except ImportError as error:
        raise Unsupported(f"{path} is a GGUF file, which needs the package gguf: pip install gguf") from error

    readable_types = {kind.value for kind in GGMLQuantizationType}

    class Bounded(GGUFReader):  # type: ignore[misc]
        """Stop where a damaged header claims more entries than the file has; the library would loop over them all."""

        num_reads = 0

        def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
            self.num_reads += 1
            if int(offset) >= len(self.data) or self.num_reads > _MAX_READS:
                raise ValueError("the header goes beyond the file")
            return super()._get(offset, dtype, count, override_order)

        def _build_tensors(self, start_offs: Any, fields: Any) -> None:
            for field in fields:
                number = int(field.parts[_TYPE][0])
                if number not in readable_types:
                    raise UnusableModel(
                        f"{path} has {field.name[:200]} in GGML's type {number}, which the installed gguf does not "
                        "know; take a file of another type, such as Q8_0, or a newer gguf"
                    )
            super()._build_tensors(start_offs, fields)

    try:
        return Bounded(path)
    except UnusableModel:
        raise
    except OSError as error:
        raise UnusableModel(f"{path} cannot be read: {error.strerror or error}") from error
    except Exception as error:
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> UnusableModel:
    return UnusableModel(
        f"{path} is not a GGUF file, or is damaged ({reason(error)}); copy or download it again"
    )


def _shape(reader: Any, tensor: Any) -> tuple[int, ...]:
    """Return the shape of a tensor's values, which is that of its model.

    Raises:
        ValueError: the file notes another number of values.
    """
    stored = tuple(int(length) for length in reversed(tensor.shape))
    field = reader.fields.get(f"{_ORIGINAL_SHAPE}{tensor.name}")
    if field is None:
        return stored
    shape = tuple(int(field.parts[index][0]) for index in field.data)
    num_values = 1
    for length in shape:
        num_values *= length
    if num_values != int(tensor.n_elements) or any(length < 1 for length in shape):
        raise ValueError(f"{tensor.name[:80]!r} has the shape {list(stored)}, which is not {list(shape)}")
    return shape


def _check_types(path: Path, reader: Any) -> None:
    """Raise UnusableModel for a type that neither diffusers nor gguf dequantises."""
    import numpy as np
    from gguf import GGML_QUANT_SIZES
    from gguf.quants import dequantize

    checked = set(FLOAT_TYPES + KEPT_TYPES)
    for tensor in reader.tensors:
        quant_type = tensor.tensor_type
        if quant_type.name in checked:
            continue
        checked.add(quant_type.name)
        try:
            dequantize(np.zeros((1, GGML_QUANT_SIZES[quant_type][1]), dtype=np.uint8), quant_type)
        except Exception as error:
            raise UnusableModel(
                f"{path} has {tensor.name} as {quant_type.name}, which the installed gguf does not dequantise; take a "
                "file of another type, such as Q8_0"
            ) from error
