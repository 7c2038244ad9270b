"""Scales in a file that belong to its weights: a weight with such a companion is stored as a code.

Two conventions are read. ComfyUI's older files have `X.scale_weight` beside `X.weight` in fp8, `X.scale_input`, and a
tensor `scaled_fp8`. Its newer files, Black Forest Labs' and ModelOpt's have `X.weight_scale`, `X.input_scale`, and say
in `X.comfy_quant` or in the metadata `_quantization_metadata` which format each layer has: fp8, int8, nvfp4, mxfp8
(`Codes`). Scales of inputs are for products in few bits; vivace multiplies in 16 or 32 bits, which needs none.

Everything else beside a weight is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import parse_json
from vivace.models.checkpoints.headers import read_header, read_tensor
from vivace.models.checkpoints.signatures import DENOISER_PREFIXES

if TYPE_CHECKING:
    import torch

MARKER = "scaled_fp8"
DESCRIPTION = "comfy_quant"
METADATA = "_quantization_metadata"
FP8 = "float8_e4m3fn"
_SCALES = ("weight_scale", "scale_weight")
_SECOND = "weight_scale_2"
INPUT_SCALE = "input_scale"
_OF_INPUTS = (INPUT_SCALE, "scale_input")
_INT8 = "int8_tensorwise"
_KINDS: dict[str, Kind] = {
    FP8: "scaled",
    "float8_e5m2": "scaled",
    _INT8: "scaled",
    "nvfp4": "nvfp4",
    "mxfp8": "mxfp8",
}
_DTYPE_OF = {FP8: "F8_E4M3", "float8_e5m2": "F8_E5M2", _INT8: "I8"}
_SETTINGS = ("format", "full_precision_matrix_mult", "group_size", "orig_dtype", "orig_shape", "per_row")
"""Keys of a description that do not change what the codes stand for."""
_ROTATED, _BLOCK_OF_ROTATION = "convrot", "convrot_groupsize"
_ROTATIONS = [4**n for n in range(1, 9)]
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_WEIGHTS = (*_FLOATS, *_FP8)
_DTYPES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "nvfp4": (("U8",), ("F8_E4M3", "U8")),
    "mxfp8": (("F8_E4M3",), ("F8_E8M0", "U8")),
}
"""Dtypes of a weight's codes, and of the scales of its blocks."""
_OWN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_LONE = re.compile(
    r"(?:^|\.)(?:weight_scale\w*|scale_weight|weight_zero_point|qweight|qzeros|wscales|absmax|quant_map|SCB)$"
)
_MAX_DESCRIPTION = 4096  # bytes
_TAKE = "give the model in 16 bits"
_ADVICE = (
    "vivace reads plain fp8, fp8 with one scale for a weight, a row or a block (X.weight_scale or X.scale_weight), and "
    f"ComfyUI's int8_tensorwise (with convrot too), nvfp4 and mxfp8; {_TAKE}"
)
Kind = Literal["scaled", "nvfp4", "mxfp8"]
BLOCKS: dict[str, int] = {"nvfp4": 16, "mxfp8": 32}
"""Values that share a scale; rows and columns are padded to a multiple of it."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_TILE_ROWS, _TILE_BLOCKS = 128, 4
_BLOCK = 128
"""Side of the blocks of tools whose last block may be smaller."""


#     scaled  values times one scale, one for each row, or one for each block; the last of blocks may be smaller
#             (int8_tensorwise: values in I8, one scale or one for each row, and perhaps a rotation, ConvRot's)
#     nvfp4   two values of four bits (E2M1) to a byte, the first in the high half; blocks of 16 in a row have a scale
#             in E4M3 (`X.weight_scale`), and all have one more in fp32 (`X.weight_scale_2`)
#     mxfp8   values in E4M3; blocks of 32 in a row have a power of two (`X.weight_scale`, E8M0)
#
# The last two are ComfyUI's (the package comfy-kitchen): rows and columns are padded to multiples of 16 or 32, and the
# scales of blocks lie in tiles of 128 rows by 4 blocks, in the order that cuBLAS reads (docs.nvidia.com/cuda/cublas,
# "Block scaling factors layout").
#
# ConvRot (arXiv 2512.03673) in ComfyUI (comfy/ops.py and comfy/quant_ops.py; comfy_kitchen/tensor/int8.py;
# docs/int8_convrot.md of leejet/stable-diffusion.cpp): {"format": "int8_tensorwise", "convrot": true,
# "convrot_groupsize": 256}, the last two also in "params"; 256 where it is not said, a power of four that divides the
# columns. The file has W R instead of W, R the regular Hadamard matrix for each block of columns; R is its own inverse.
@dataclass(frozen=True)
class Codes:
    """How a weight is stored: names of the tensors with its scales.

    rotation: columns that were rotated together; 0: none were.
    """

    kind: Kind
    scale: str
    scale_of_scales: str = ""
    rotation: int = 0


class _Format(NamedTuple):
    """What a description says of a weight."""

    name: str
    rotation: int = 0


@dataclass
class _Scales:
    """The tensors beside one weight."""

    scale: str = ""
    second: str = ""


def codes_of(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, Codes]:
    """Return the storage of each weight that is not stored plainly."""
    formats = _formats_in_metadata(path, tensors, metadata)
    beside: dict[str, _Scales] = {}
    for name, weight in _companions(tensors):
        kind = name.removeprefix(weight.removesuffix("weight"))
        scales = beside.setdefault(weight, _Scales())
        if kind in _SCALES:
            if scales.scale:
                raise _refusal(path, name, weight, f"beside {scales.scale}")
            scales.scale = name
        elif kind == _SECOND:
            scales.second = name
        elif kind == DESCRIPTION:
            formats[weight] = _described(path, name, read_tensor(path, name, _MAX_DESCRIPTION))
        elif kind not in _OF_INPUTS:
            raise _refusal(path, name, weight)
    codes = _checked(path, tensors, beside, formats)
    _check_alone(path, tensors, codes)
    return codes


def check_plain(path: Path) -> None:
    """Refuse a file of a folder that has codes in place of weights: libraries would read them as weights."""
    for name, about in read_header(path).items():
        if _LONE.search(name) or name.rpartition(".")[2] in (*_SCALES, _SECOND, DESCRIPTION):
            what = "which is a scale of weights that are stored as codes"
        elif name.endswith(".weight") and about["dtype"] not in _WEIGHTS:
            what = f"as {about['dtype']}, which is a code"
        else:
            continue
        raise UnusableModel(
            f"{path} has {name}, {what}; in folders vivace reads plain weights alone; {_TAKE}"
        )


def is_marker(name: str) -> bool:
    """Return whether a tensor only describes how weights are stored."""
    leaf = name.rpartition(".")[2]
    return leaf in (MARKER, DESCRIPTION, _SECOND, *_OF_INPUTS, *_SCALES)


def _companions(tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every tensor that belongs to a weight, with the weight."""
    for name in tensors:
        module, _, leaf = name.rpartition(".")
        weight = f"{module}.weight" if module else "weight"
        if leaf not in _OWN and weight in tensors:
            yield name, weight
            continue
        for match in re.finditer("weight(?=[._])", name):  # X.weight.absmax, X.in_proj_weight_scale
            if name[: match.end()] in tensors:
                yield name, name[: match.end()]
                break


def _checked(
    path: Path, tensors: Mapping[str, Any], beside: Mapping[str, _Scales], formats: Mapping[str, _Format]
) -> dict[str, Codes]:
    """Return the codes of weights with scales, whose dtypes and shapes fit."""
    codes: dict[str, Codes] = {}
    for weight in dict.fromkeys((*beside, *formats)):
        scales, (about, rotation) = beside.get(weight, _Scales()), formats.get(weight, _Format(""))
        if not scales.scale and about:
            raise UnusableModel(
                f"{path}: {weight} is {about} by its description, but has no scale; {_ADVICE}"
            )
        if not scales.scale and not scales.second:
            continue
        kind: Kind = _KINDS.get(about, "scaled")
        if (kind == "nvfp4") != bool(scales.second):
            name = scales.second or scales.scale
            why = "and no weight_scale_2" if kind == "nvfp4" else f"and no {DESCRIPTION} that says nvfp4"
            raise _refusal(path, name, weight, why)
        if kind == "scaled":
            _check_scale(path, tensors, scales.scale, weight, (*_WEIGHTS, _DTYPE_OF.get(about, "")))
            if tensors[weight]["dtype"] != _DTYPE_OF.get(about, tensors[weight]["dtype"]):
                raise UnusableModel(
                    f"{path}: {weight} is {about} by its description, and {tensors[weight]['dtype']}; {_ADVICE}"
                )
            if rotation and (len(tensors[weight]["shape"]) != 2 or tensors[weight]["shape"][1] % rotation):
                raise UnusableModel(
                    f"{path}: {weight} has the shape {list(tensors[weight]['shape'])}, whose columns are no multiple "
                    f"of its {_BLOCK_OF_ROTATION}, {rotation}; the file is damaged, or was not made right"
                )
        else:
            _check_blocks(path, tensors, kind, scales, weight)
        codes[weight] = Codes(kind, scales.scale, scales.second, rotation)
    return codes


def _check_scale(
    path: Path, tensors: Mapping[str, Any], scale: str, weight: str, dtypes: Sequence[str]
) -> None:
    """Raise UnusableModel unless the weight can be multiplied by the scale."""
    shape, own = tensors[weight]["shape"], tensors[scale]["shape"]
    if tensors[weight]["dtype"] not in dtypes or tensors[scale]["dtype"] not in _FLOATS:
        kinds = f"{tensors[weight]['dtype']} with a scale in {tensors[scale]['dtype']}"
        raise _refusal(path, scale, weight, f"which is {kinds}")
    if not fits(own, shape):
        raise _refusal(path, scale, weight, f"whose shape {list(shape)} it does not divide: {list(own)}")


def fits(scale: Sequence[int], weight: Sequence[int]) -> bool:
    """Return whether a scale of such a shape has one number for a weight, a row or a block."""
    if all(length == 1 for length in scale):
        return True
    if len(scale) == 1:
        return bool(weight) and scale[0] == weight[0]
    return len(scale) == len(weight) and all(
        block_length(length, own) for own, length in zip(scale, weight, strict=True)
    )


def _check_blocks(path: Path, tensors: Mapping[str, Any], kind: Kind, scales: _Scales, weight: str) -> None:
    """Raise UnusableModel unless a weight of nvfp4 or mxfp8 has the dtypes and shapes of the format."""
    shape = tensors[weight]["shape"]
    of_codes, of_scales = _DTYPES[kind]
    if tensors[weight]["dtype"] not in of_codes or tensors[scales.scale]["dtype"] not in of_scales:
        kinds = f"{tensors[weight]['dtype']} with scales in {tensors[scales.scale]['dtype']}"
        raise _refusal(path, scales.scale, weight, f"which is {kinds}, not {kind}")
    packed = 2 if kind == "nvfp4" else 1
    if len(shape) != 2 or any(n % BLOCKS[kind] for n in (shape[0], shape[1] * packed)):
        raise _refusal(path, scales.scale, weight, f"whose shape {list(shape)} is none of {kind}")
    expected = scales_shape(kind, shape[0], shape[1] * packed)
    if tuple(tensors[scales.scale]["shape"]) != expected:
        own = f"{list(tensors[scales.scale]['shape'])}, not {list(expected)}"
        raise _refusal(path, scales.scale, weight, f"whose scales have the shape {own}")
    if scales.second:
        second = tensors[scales.second]
        if second["dtype"] not in _FLOATS or any(length != 1 for length in second["shape"]):
            raise _refusal(path, scales.second, weight, f"which is {second['dtype']} {list(second['shape'])}")


def _check_alone(path: Path, tensors: Mapping[str, Any], codes: Mapping[str, Codes]) -> None:
    """Raise UnusableModel for scales without a weight, codes without scales, and a marker without either."""
    for name, layer in tensors.items():
        module = name.rpartition(".")[0]
        if _LONE.search(name) and f"{module}.weight" not in tensors:
            raise UnusableModel(f"{path} has {name} without a weight beside it; {_ADVICE}")
        if name.endswith("weight") and layer["dtype"] not in _WEIGHTS and name not in codes:
            raise UnusableModel(f"{path} has its {name} as {layer['dtype']}, which is a code; {_ADVICE}")
    if any(name.rpartition(".")[2] == MARKER for name in tensors) and not codes:
        raise UnusableModel(
            f"{path} says that it has scaled fp8 weights ({MARKER}), but has no scale beside any of them; {_ADVICE}"
        )


def _described(path: Path, name: str, content: bytes) -> _Format:
    """Return the format that a layer's description names."""
    try:
        description = parse_json(content)
    except ValueError as error:
        raise UnusableModel(f"{path}: {name} cannot be read: {error}") from None
    return _format_of(description, f"{path}: {name} says")


def _format_of(description: Any, where: str) -> _Format:
    """Return the format in a description."""
    settings = dict(description) if isinstance(description, dict) else {"format": description}
    kind = settings.get("format")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise UnusableModel(f"{where} {str(kind)[:80]!r}; {_ADVICE}")
    rotation = 0
    if kind == _INT8:
        inner = settings.pop("params", None)
        settings = (inner if isinstance(inner, dict) else {}) | settings
        size = settings.pop(_BLOCK_OF_ROTATION, 256)
        if settings.pop(_ROTATED, False):
            if type(size) is not int or size not in _ROTATIONS:
                raise UnusableModel(
                    f"{where} {_BLOCK_OF_ROTATION} {str(size)[:80]!r}, which is no power of four; {_ADVICE}"
                )
            rotation = size
    if more := [key for key, value in settings.items() if key not in _SETTINGS and value]:
        raise UnusableModel(f"{where} {more[0][:80]!r}, which vivace does not know; {_ADVICE}")
    return _Format(kind, rotation)


def _formats_in_metadata(
    path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]
) -> dict[str, _Format]:
    """Return each weight's format by the metadata."""
    if METADATA not in metadata:
        return {}
    try:
        content = parse_json(metadata[METADATA])
        layers = content["layers"] if isinstance(content, dict) else None
        if not isinstance(layers, dict):
            raise ValueError("it has no layers")
    except (ValueError, KeyError) as error:
        raise UnusableModel(f"{path}: its {METADATA} cannot be read: {error}") from None
    formats: dict[str, _Format] = {}
    for layer, description in layers.items():
        kind = _format_of(description, f"{path}: its {METADATA} says of {layer[:200]}")
        # Names of layers often lack the denoiser's prefix.
        names = (f"{prefix}{layer}.weight" for prefix in ("", *DENOISER_PREFIXES))
        if (weight := next((name for name in names if name in tensors), None)) is not None:
            formats[weight] = kind
    return formats


def _refusal(path: Path, name: str, weight: str, why: str = "") -> UnusableModel:
    middle = f", {why}" if why else ""
    return UnusableModel(
        f"{path} has {name} beside {weight}{middle}, so that is not the weight itself; {_ADVICE}"
    )


def padded_shape(kind: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns that a weight of this shape has in the file, before values are packed."""
    rows, columns = shape
    block = BLOCKS[kind]
    return _up(rows, block), _up(columns, block)


def scales_shape(kind: str, rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of the scales of a padded weight's blocks."""
    return _up(rows, _TILE_ROWS), _up(columns // BLOCKS[kind], _TILE_BLOCKS)


def block_length(length: int, num_scales: int) -> int:
    """Return how many values along a dimension share a scale; 0 where that cannot be told. A number for all, one for
    each, or one for each power of two. A length that those do not divide has blocks of 128, the last of them smaller:
    of 192 values and two scales, the second is of 64."""
    if num_scales < 1:
        return 0
    block = length // num_scales
    if length % num_scales == 0 and (num_scales == 1 or block & (block - 1) == 0):
        return block
    return _BLOCK if num_scales == -(-length // _BLOCK) else 0


def multiplied(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the product of a weight and its scale: one number, one for each row, or one for each block."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if scale.dim() == 1:
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    for axis, length in enumerate(weight.shape):
        block = block_length(length, scale.shape[axis])
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, length)
    return weight * scale


def from_nvfp4(packed: torch.Tensor, scale: torch.Tensor, scale_of_scales: torch.Tensor) -> torch.Tensor:
    """Return the padded weight in fp32."""
    import torch

    codes = packed.view(torch.uint8)
    halves = torch.stack([codes >> 4, codes & 15], dim=-1).flatten(-2).long()
    values = torch.tensor([*_E2M1, *(-value for value in _E2M1)])[halves]
    rows, columns = values.shape
    scales = _in_rows(scale.view(torch.float8_e4m3fn).float(), rows, columns // BLOCKS["nvfp4"])
    blocks = values.reshape(rows, -1, BLOCKS["nvfp4"])
    return (blocks * (scales * scale_of_scales.float().reshape(())).unsqueeze(-1)).reshape(rows, columns)


def from_mxfp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the padded weight in fp32."""
    import torch

    rows, columns = weight.shape
    exponents = _in_rows(scale.view(torch.uint8), rows, columns // BLOCKS["mxfp8"]).int()
    # ComfyUI writes 0 for a block of zeros.
    scales = torch.where(exponents == 0, 0.0, torch.exp2((exponents - 127).float()))
    blocks = weight.float().reshape(rows, -1, BLOCKS["mxfp8"])
    return (blocks * scales.unsqueeze(-1)).reshape(rows, columns)


def _in_rows(tiled: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return scales in rows: a tile's four groups of 32 rows lie beside each other."""
    tiles = tiled.reshape(-1, _up(columns, _TILE_BLOCKS) // _TILE_BLOCKS, 32, 4, _TILE_BLOCKS)
    by_row = tiles.permute(0, 3, 2, 1, 4).reshape(_up(rows, _TILE_ROWS), -1)
    return by_row[:rows, :columns]


def _up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
