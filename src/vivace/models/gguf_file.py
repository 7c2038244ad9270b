"""Read a GGUF file with the optional package `gguf`, and check that the file is complete."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import open_plain, reading, reason

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
KEPT_TYPES = (
    "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that diffusers keeps in memory unchanged, and dequantises in each call."""
FLOAT_TYPES = ("F32", "F16")
_TYPE = 4
"""Place of a tensor's type among the parts of its entry in the header."""
_MOST_TEXT = 10_000_000
_TEXT, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of values in the header, as `struct` calls them."""
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 26: ("I32", 1, 4), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 39: ("MXFP4", 32, 17),
}  # fmt: skip
"""GGML's types of tensors: name, values of a block, and its bytes (ggml.h)."""
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


def read_gguf_sizes(path: Path) -> dict[str, dict[str, Any]]:
    """Return what `read_gguf_header` does, without the package, for files that are not loaded.

    Raises:
        UnusableModel: the file is not a GGUF file, is damaged, or has a type that is not known here.
    """
    with reading(path, problem="is not a GGUF file, or is damaged"), open_plain(path) as file:

        def read(layout: str) -> Any:
            return struct.unpack(f"<{layout}", file.read(struct.calcsize(f"<{layout}")))[0]

        def read_text() -> str:
            length = read("Q")
            if length > _MOST_TEXT:
                raise ValueError("a name or value is too long")
            return str(file.read(length), "utf-8", "replace")

        def read_value(kind: int) -> Any:
            if kind == _ARRAY:
                kind, number = read("I"), read("Q")
                if number > _MAX_READS:
                    raise ValueError("the header goes beyond the file")
                return [read_value(kind) for _ in range(number)]
            return read_text() if kind == _TEXT else read(_SCALARS[kind])

        if file.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it does not start with GGUF")
        version, num_tensors, num_values = read("I"), read("Q"), read("Q")
        if version not in (2, 3) or max(num_tensors, num_values) > _MAX_READS:
            raise ValueError(f"version {version}, {num_tensors} tensors")
        values = {read_text(): read_value(read("I")) for _ in range(num_values)}
        header = {}
        for _ in range(num_tensors):
            name, num_dimensions = read_text(), read("I")
            shape = [read("Q") for _ in range(min(num_dimensions, 8))][::-1]
            kind, start = _TYPES[read("I")], read("Q")
            num_bytes = math.prod(shape) // kind[1] * kind[2]
            shape = values.get(f"{_ORIGINAL_SHAPE}{name}", shape)
            header[name] = {"dtype": kind[0], "shape": shape, "data_offsets": [start, start + num_bytes]}
        if not header:
            raise ValueError("it has no tensors")
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
