"""Write a safetensors file tensor by tensor, so that the whole is never in memory beside the model.

The format is eight bytes of length, a JSON object of that length, then the tensors' bytes in the order of the object
(github.com/huggingface/safetensors). Tensors of wide types come first: readers map them where they lie, and want their
addresses to be multiples of their size.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    import torch

_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}
_ALIGNED = 8  # bytes


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor to be written: `make` computes it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * int(self.dtype.itemsize)


def write_tensors(file: BinaryIO, tensors: Sequence[WrittenTensor], metadata: Mapping[str, str]) -> None:
    """Write a whole file."""
    import torch

    ordered = sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for tensor in ordered:
        start, end = end, end + tensor.num_bytes
        dtype = _NAMES[str(tensor.dtype).removeprefix("torch.")]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    file.write(len(text).to_bytes(8, "little"))
    file.write(text)
    for tensor in ordered:
        values = tensor.make().detach().to("cpu", tensor.dtype).contiguous()
        assert tuple(values.shape) == tensor.shape, f"{tensor.name} is {tuple(values.shape)}"
        file.write(values.reshape(-1).view(torch.uint8).numpy().data)
