"""Read GGUF files: headers by themselves, and values with the optional package `gguf`."""

from __future__ import annotations

import importlib.util
import math
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import open_plain, reading

SUFFIX = ".gguf"
_MAGIC = b"GGUF"
KEPT_TYPES = (
    "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip
"""Types that diffusers keeps in memory unchanged, and dequantises in each call."""
FLOAT_TYPES = ("F32", "F16")
_MOST_TEXT = 10_000_000
_TEXT, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF's types of values in the header, as `struct` calls them."""
_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
}  # fmt: skip
"""GGML's types of tensors that gguf dequantises: name, values of a block, and its bytes (ggml.h)."""
_ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""Keys of ComfyUI-GGUF for tensors that were reshaped so that their rows have whole blocks."""
_ALIGNMENT = "general.alignment"
_MAX_READS = 2_000_000
"""Limit on the entries of a header. FLUX.1 has fewer than a thousand tensors."""


@dataclass(frozen=True)
class StoredValues:
    """A tensor of a GGUF file; its values stay in the file.

    Attributes:
        kind: GGML's type, "Q8_0".
        stored_shape: of the values in the file, whose rows have whole blocks.
    """

    path: Path
    kind: str
    shape: tuple[int, ...]
    stored_shape: tuple[int, ...]
    span: tuple[int, int]

    @property
    def is_float(self) -> bool:
        return self.kind in FLOAT_TYPES

    @property
    def is_kept(self) -> bool:
        """Whether diffusers can keep it quantised: a matrix stored row by row."""
        return self.kind in KEPT_TYPES and len(self.shape) == 2 and self.shape == self.stored_shape

    @property
    def quant_type(self) -> Any:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType[self.kind]

    def packed(self) -> Any:
        """Return the bytes of each row."""
        import numpy as np

        data = np.fromfile(self.path, np.uint8, self.span[1] - self.span[0], offset=self.span[0])
        return data.reshape(*self.stored_shape[:-1], -1)

    def dequantized(self) -> Any:
        from gguf.quants import dequantize

        data = self.packed()
        if self.is_float:
            return data.view("<f4" if self.kind == "F32" else "<f2").reshape(self.shape)
        return dequantize(data, self.quant_type).reshape(self.shape)


def check_installed(path: Path) -> None:
    """Raise Unsupported without the package that dequantises values."""
    if importlib.util.find_spec("gguf") is None:
        raise Unsupported(f"{path} is a GGUF file, which needs the package gguf: pip install gguf")


def read_gguf_header(path: Path, *, is_whole: bool = True) -> dict[str, dict[str, Any]]:
    """Return each tensor's dtype ("Q8_0"), shape (last dimension contiguous) and data_offsets, by name."""
    return {
        name: {"dtype": each.kind, "shape": list(each.shape), "data_offsets": list(each.span)}
        for name, each in read_gguf_tensors(path, is_whole=is_whole).items()
    }


def read_gguf_tensors(path: Path, *, is_whole: bool = True) -> dict[str, StoredValues]:
    """Return the tensors of a file by name; see `read_gguf_header`."""
    with (
        reading(path, advice="copy or download it again", problem="is not a GGUF file, or is damaged"),
        open_plain(path) as file,
    ):

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
        tensors: dict[str, StoredValues] = {}
        for _ in range(num_tensors):
            name, num_dimensions = read_text(), read("I")
            stored = tuple(read("Q") for _ in range(min(num_dimensions, 8)))[::-1]
            number, start = read("I"), read("Q")
            if number not in _TYPES:
                raise UnusableModel(
                    f"{path} has {name[:200]} in GGML's type {number}, which is not read; take a file of another "
                    "type, such as Q8_0"
                )
            kind, block, num_bytes = _TYPES[number]
            shape = tuple(values.get(f"{_ORIGINAL_SHAPE}{name}", stored))
            if math.prod(shape) != math.prod(stored) or 0 in shape or stored[-1:] == () or stored[-1] % block:
                raise ValueError(f"{name[:80]!r} has the shape {list(stored)}, which is not {list(shape)}")
            end = start + math.prod(stored) // block * num_bytes
            tensors[name] = StoredValues(path, kind, shape, stored, (start, end))
        if not tensors:
            raise ValueError("it has no tensors")
        alignment = int(values.get(_ALIGNMENT, 32))
        begin = -(-file.tell() // alignment) * alignment
        size = os.fstat(file.fileno()).st_size
    end = begin + max(each.span[1] for each in tensors.values())
    if is_whole and size < end:
        raise UnusableModel(f"{path} is truncated: {size:,} bytes, not {end:,}; copy or download it again")
    return {
        name: replace(each, span=(begin + each.span[0], begin + each.span[1]))
        for name, each in tensors.items()
    }
