"""A denoiser as one file that ComfyUI reads: the authors' names, weights of linear layers in fp8 with a scale each.

Beside `X.weight` in float8_e4m3fn lies `X.weight_scale`, one number in fp32, and `X.comfy_quant`, JSON in bytes:
`{"format": "float8_e4m3fn"}`, with `"full_precision_matrix_mult": true` where ComfyUI is to multiply in 16 bits
(the package comfy-kitchen, and ComfyUI's comfy/ops.py). `X.input_scale`, one number in fp32, is the scale of a layer's
inputs where that was calibrated (ComfyUI's QUANTIZATION.md). All other tensors are as they are in the model. UNets'
names begin with `model.diffusion_model.`, transformers' with nothing, as in the files of ComfyUI's makers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vivace.models.checkpoints.metadata import MARKERS
from vivace.models.checkpoints.read_denoiser import OriginalTensor, check_tensors, original_layout
from vivace.models.checkpoints.weight_scales import DESCRIPTION, FP8, INPUT_SCALE, codes_of, is_marker
from vivace.models.headers import read_header, read_metadata

if TYPE_CHECKING:
    import torch

_PREFIX_OF_UNETS = "model.diffusion_model."
_LARGEST = 448.0
"""Largest number of float8_e4m3fn."""
_WEIGHT = ".weight"
_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
}
_ALIGNED = 8  # bytes


@dataclass(frozen=True)
class DenoiserFile:
    """The tensors of a denoiser's file.

    Attributes:
        layout: its tensors in the authors' names.
        quantised: the authors' names of weights that are written in fp8.
        divided: of weights that are not, because only some of the layers that they join are quantised.
        input_scales: by weight that is written in fp8, if its layer's inputs have one scale.
    """

    denoiser: Any
    layout: Mapping[str, OriginalTensor]
    quantised: tuple[str, ...]
    divided: tuple[str, ...]
    input_scales: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls, denoiser: Any, layers: Collection[str], input_scales: Mapping[str, torch.Tensor] | None = None
    ) -> DenoiserFile:
        """Return the file of a denoiser.

        Args:
            layers: diffusers' names of the layers that are quantised.
            input_scales: of the inputs of all these layers, by diffusers' name; None where they have none. Layers that
                one weight joins get the largest of theirs.

        Raises:
            Unsupported: the authors' names of one of its tensors are not known.
        """
        layout = original_layout(denoiser)
        quantised, divided = [], []
        for name, tensor in layout.items():
            if not name.endswith(_WEIGHT) or len(tensor.shape) != 2:
                continue
            chosen = [part.removesuffix(_WEIGHT) in layers for part in tensor.parts]
            if all(chosen):
                quantised.append(name)
            elif any(chosen):
                divided.append(name)
        scales = {
            name: _largest([input_scales[part.removesuffix(_WEIGHT)] for part in layout[name].parts])
            for name in quantised
            if input_scales is not None
        }
        return cls(denoiser, layout, tuple(quantised), tuple(divided), scales)

    @property
    def prefix(self) -> str:
        """The prefix of its tensors' names."""
        return _PREFIX_OF_UNETS if type(self.denoiser).__name__.startswith("UNet") else ""

    def write(
        self,
        file: BinaryIO,
        dtype: torch.dtype,
        *,
        in_sixteen_bits: bool,
        markers: Collection[str],
        metadata: Mapping[str, str],
    ) -> None:
        """Write the file.

        Args:
            dtype: of weights that are not quantised.
            in_sixteen_bits: whether ComfyUI is to multiply in 16 bits.
            markers: names of empty tensors, which say what a UNet predicts.
            metadata: of the header.
        """
        import torch

        assert set(markers) <= set(MARKERS)
        content = list(self._tensors(dtype, in_sixteen_bits))
        content += [WrittenTensor(name, torch.float32, (0,), partial(torch.zeros, 0)) for name in markers]
        write_tensors(file, content, {"format": "pt", **metadata})

    def _tensors(self, dtype: torch.dtype, in_sixteen_bits: bool) -> Iterator[WrittenTensor]:
        import torch

        state = self.denoiser.state_dict()
        description = {"format": FP8} | ({"full_precision_matrix_mult": True} if in_sixteen_bits else {})
        text = torch.tensor(list(json.dumps(description).encode()), dtype=torch.uint8)
        for name, tensor in self.layout.items():
            written = self.prefix + name
            join = partial(tensor.join, state)
            if name not in self.quantised:
                yield WrittenTensor(written, dtype, tensor.shape, join)
                continue
            scale = scale_of(join())
            layer = written.removesuffix(_WEIGHT)
            yield WrittenTensor(written, torch.float8_e4m3fn, tensor.shape, partial(_in_fp8, join, scale))
            yield WrittenTensor(f"{written}_scale", torch.float32, (), partial(_same, scale))
            if name in self.input_scales:
                of_inputs = partial(_same, self.input_scales[name])
                yield WrittenTensor(f"{layer}.{INPUT_SCALE}", torch.float32, (), of_inputs)
            yield WrittenTensor(
                f"{layer}.{DESCRIPTION}", torch.uint8, tuple(text.shape), partial(_same, text)
            )

    def check(self, path: Path) -> None:
        """Check the written file's header with the code that reads foreign files.

        Raises:
            UnusableModel: it is not what was to be written.
        """
        header = read_header(path)
        codes = codes_of(path, header, read_metadata(path))
        names = {name: name.removeprefix(self.prefix) for name in header if name not in MARKERS}
        check_tensors(
            path, {own: name for name, own in names.items() if not is_marker(name)}, self.layout, codes
        )
        assert len(codes) == len(self.quantised), f"{path} has {len(codes)} weights in fp8"
        num_scales = sum(name.endswith(f".{INPUT_SCALE}") for name in header)
        assert num_scales == len(self.input_scales), f"{path} has {num_scales} scales of inputs"


def scale_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of a weight in fp8: its largest value becomes the largest of the format.

    It is rounded to the weight's precision, as torchao and comfy-kitchen do, so that values are theirs bit by bit.
    """
    import torch

    # A weight of zeros would be divided by zero.
    largest = weight.abs().max().clamp(min=_LARGEST * torch.finfo(weight.dtype).tiny)
    return (largest / _LARGEST).float()


def _largest(scales: Sequence[torch.Tensor]) -> torch.Tensor:
    return max(scale.detach().float().cpu().reshape(()) for scale in scales)


def _in_fp8(join: Any, scale: torch.Tensor) -> torch.Tensor:
    import torch

    return (join().float() / scale).clamp(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn)


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


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
    """Write a safetensors file tensor by tensor, so that the whole is never in memory beside the model.

    The format is eight bytes of length, a JSON object of that length, then the tensors' bytes in the order of the
    object (github.com/huggingface/safetensors). Tensors of wide types come first: readers map them where they lie, and
    want their addresses to be multiples of their size.
    """
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
