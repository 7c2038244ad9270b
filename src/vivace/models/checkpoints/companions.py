"""Scales that a file has beside its weights. With such a companion a weight is not the weight: it is a code.

Two conventions are read, both of fp8 and both products of weight and scale. ComfyUI's older files have
`X.scale_weight` beside `X.weight`, `X.scale_input`, and an empty tensor `scaled_fp8`. Its newer files, Black Forest
Labs' and ModelOpt's have `X.weight_scale`, `X.input_scale`, and say in `X.comfy_quant` or in the metadata
`_quantization_metadata` which format each layer has. A scale is one number, one for each row, or one for each block.
Scales of inputs are for products in fp8; vivace multiplies in 16 or 32 bits, which needs none.

Everything else beside a weight is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.headers import read_tensor
from vivace.untrusted.files import parse_json

MARKER = "scaled_fp8"
_SCALES = ("weight_scale", "scale_weight")
_OF_INPUTS = ("input_scale", "scale_input")
_DESCRIPTION = "comfy_quant"
_METADATA = "_quantization_metadata"
_FORMATS = ("float8_e4m3fn", "float8_e5m2")
_FLOATS = ("F64", "F32", "F16", "BF16")
_FP8 = ("F8_E4M3", "F8_E5M2")
_WEIGHTS = (*_FLOATS, *_FP8)
_OWN = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_LONE = re.compile(
    r"(?:^|\.)(?:weight_scale\w*|scale_weight|weight_zero_point|qweight|qzeros|wscales|absmax|quant_map|SCB)$"
)
_MAX_DESCRIPTION = 4096  # bytes
_ADVICE = (
    "vivace reads plain fp8, and fp8 with one scale for a weight, a row or a block (X.weight_scale or X.scale_weight); "
    "give the model in 16 bits"
)


def scales_of(path: Path, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> dict[str, str]:
    """Return the name of the scale of each weight that has one.

    Args:
        path: of a safetensors file.
        tensors: dtype and shape by name, as `read_header` returns them.
        metadata: of the file's header.

    Raises:
        UnusableModel: a weight has a companion that vivace does not read; names both.
    """
    scales: dict[str, str] = {}
    for name, weight in _companions(tensors):
        kind = name.removeprefix(weight.removesuffix("weight"))
        if kind in _SCALES:
            if weight in scales:
                raise _refusal(path, name, weight, f"beside {scales[weight]}")
            _check_scale(path, tensors, name, weight)
            scales[weight] = name
        elif kind == _DESCRIPTION:
            _check_format(path, name, read_tensor(path, name, _MAX_DESCRIPTION))
        elif kind not in _OF_INPUTS:
            raise _refusal(path, name, weight)
    for name, layer in tensors.items():
        module = name.rpartition(".")[0]
        if _LONE.search(name) and f"{module}.weight" not in tensors:
            raise UnusableModel(f"{path} has {name} without a weight beside it; {_ADVICE}")
        if name.endswith("weight") and layer["dtype"] not in _WEIGHTS:
            raise UnusableModel(f"{path} has its {name} as {layer['dtype']}, which is a code; {_ADVICE}")
    _check_metadata(path, tensors, scales, metadata)
    if any(name.rpartition(".")[2] == MARKER for name in tensors) and not scales:
        raise UnusableModel(
            f"{path} says that it has scaled fp8 weights ({MARKER}), but has no scale beside any of them; {_ADVICE}"
        )
    return scales


def is_marker(name: str) -> bool:
    """Return whether a tensor only describes how weights are stored."""
    leaf = name.rpartition(".")[2]
    return leaf in (MARKER, _DESCRIPTION, *_OF_INPUTS, *_SCALES)


def _companions(tensors: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Return every tensor that belongs to a weight, with the weight."""
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


def _check_scale(path: Path, tensors: Mapping[str, Any], scale: str, weight: str) -> None:
    """Raise UnusableModel unless the weight can be multiplied by the scale."""
    shape, own = tensors[weight]["shape"], tensors[scale]["shape"]
    if tensors[weight]["dtype"] not in _WEIGHTS or tensors[scale]["dtype"] not in _FLOATS:
        kinds = f"{tensors[weight]['dtype']} with a scale in {tensors[scale]['dtype']}"
        raise _refusal(path, scale, weight, f"which is {kinds}")
    if not fits(own, shape):
        raise _refusal(path, scale, weight, f"whose shape {list(shape)} it does not divide: {list(own)}")


def fits(scale: Sequence[int], weight: Sequence[int]) -> bool:
    """Return whether a scale of such a shape has one number for a weight, a row or a block of equal size."""
    if all(length == 1 for length in scale):
        return True
    if len(scale) == 1:
        return bool(weight) and scale[0] == weight[0]
    return len(scale) == len(weight) and all(
        own > 0 and length % own == 0 for own, length in zip(scale, weight, strict=True)
    )


def _check_format(path: Path, name: str, content: bytes) -> None:
    """Raise UnusableModel unless a layer's description names a format that is read."""
    try:
        description = parse_json(content)
    except ValueError as error:
        raise UnusableModel(f"{path}: {name} cannot be read: {error}") from None
    if not isinstance(description, dict) or description.get("format") not in _FORMATS:
        kind = description.get("format") if isinstance(description, dict) else description
        raise UnusableModel(f"{path}: {name} says {str(kind)[:80]!r}; {_ADVICE}")


def _check_metadata(
    path: Path, tensors: Mapping[str, Any], scales: Mapping[str, str], metadata: Mapping[str, str]
) -> None:
    """Raise UnusableModel if the metadata tells of a layer's format that is not read, or of scales that are missing."""
    if _METADATA not in metadata:
        return
    try:
        content = parse_json(metadata[_METADATA])
        layers = content["layers"] if isinstance(content, dict) else None
        if not isinstance(layers, dict):
            raise ValueError("it has no layers")
    except (ValueError, KeyError) as error:
        raise UnusableModel(f"{path}: its {_METADATA} cannot be read: {error}") from None
    for layer, description in layers.items():
        kind = description.get("format") if isinstance(description, dict) else None
        if kind not in _FORMATS:
            raise UnusableModel(f"{path}: {layer[:200]} has the format {str(kind)[:80]!r}; {_ADVICE}")
        weight = next((name for name in tensors if name.endswith(f"{layer}.weight")), None)
        if weight is not None and weight not in scales:
            raise UnusableModel(f"{path}: {weight} is {kind} by its metadata, but has no scale; {_ADVICE}")


def _refusal(path: Path, name: str, weight: str, why: str = "") -> UnusableModel:
    middle = f", {why}" if why else ""
    return UnusableModel(
        f"{path} has {name} beside {weight}{middle}, so that is not the weight itself; {_ADVICE}"
    )
