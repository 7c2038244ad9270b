"""Read a denoiser's weights from a single file in its authors' layout, as diffusers' state dict.

The files that diffusers does not read as they are: those whose weights are codes with scales (`codes`), GGUF files of
types or layouts that it does not know, and transformers whose converters expect one width. Names, shapes and the whole
list are checked against the model's configuration before a value is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.errors import UnusableModel
from vivace.models.checkpoints.codes import Codes, from_mxfp8, from_nvfp4, multiplied, padded_shape
from vivace.models.checkpoints.layout import OriginalTensor, original_layout
from vivace.models.checkpoints.weight_scales import is_marker
from vivace.models.gguf_file import SUFFIX, read_gguf_tensors
from vivace.models.headers import read_header

_UNUSED = ("norm_final.weight",)
"""Tensors that files of Z-Image have and its authors' code does not use."""


def read_denoiser(
    path: Path, names: Mapping[str, str], codes: Mapping[str, Codes], skeleton: Any, dtype: Any
) -> dict[str, Any]:
    """Return a denoiser's tensors under diffusers' names.

    Products of weights and scales are computed in fp32 and rounded once. What diffusers can keep quantised (GGUF's
    usual types in linear layers) stays so.

    Args:
        names: the authors' name of each of the denoiser's tensors, without a prefix, by its name in the file.
        codes: of weights that are not stored as they are, by their name in the file.
        skeleton: the denoiser without values.
        dtype: of weights that are dequantised; other tensors keep theirs.

    Raises:
        UnusableModel: a tensor is missing, belongs to no layer or has another shape; names file and tensor.
    """
    layout = original_layout(skeleton)
    files = {own: name for name, own in names.items() if not is_marker(name) and own not in _UNUSED}
    check_tensors(path, files, layout, codes)
    if path.suffix == SUFFIX:
        return _of_gguf(path, files, layout, skeleton, dtype)
    return _of_safetensors(path, files, layout, codes, dtype)


def check_tensors(
    path: Path, files: Mapping[str, str], layout: Mapping[str, OriginalTensor], codes: Mapping[str, Codes]
) -> None:
    """Raise UnusableModel unless a file has the tensors of a layout, no others, and each in its shape.

    Args:
        files: the name in the file of each tensor, by the authors' name.
    """
    advice = "it is another model, or a part of one; give it as a folder in diffusers' format"
    if missing := [name for name in layout if name not in files]:
        raise UnusableModel(
            f"{path} lacks {len(missing)} of {len(layout)} tensors, such as {missing[0]}; {advice}"
        )
    if more := [name for own, name in files.items() if own not in layout]:
        raise UnusableModel(
            f"{path} has {len(more)} tensors more than the model, such as {more[0]}; {advice}"
        )
    header = read_header(path)
    for own, tensor in layout.items():
        shape, expected = tuple(header[files[own]]["shape"]), tensor.shape
        kind = codes[files[own]].kind if files[own] in codes else "scaled"
        if kind != "scaled":
            expected = padded_shape(kind, expected) if len(expected) == 2 else expected
            shape = (shape[0], shape[1] * 2) if kind == "nvfp4" else shape
        if shape != expected:
            raise UnusableModel(
                f"{path}: {files[own]} has the shape {list(shape)}, and the model {list(expected)}; {advice}"
            )


def _of_safetensors(
    path: Path,
    files: Mapping[str, str],
    layout: Mapping[str, OriginalTensor],
    codes: Mapping[str, Codes],
    dtype: Any,
) -> dict[str, Any]:
    from safetensors import safe_open

    state: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for own, tensor in layout.items():
            name = files[own]
            if name in codes:
                values = _decoded(path, file, name, codes[name])
                values = values[tuple(slice(length) for length in tensor.shape)].to(dtype)
            else:
                values = file.get_tensor(name)
            state |= tensor.split(values)
    return state


def _decoded(path: Path, file: Any, name: str, codes: Codes) -> Any:
    """Return a weight in fp32, with its padding.

    Raises:
        UnusableModel: a scale or a product is not a number, or a scale is 0 where values are not.
    """
    weight, scale = file.get_tensor(name), file.get_tensor(codes.scale)
    scales = {codes.scale: scale}
    if codes.kind == "nvfp4":
        scales[codes.scale_of_scales] = file.get_tensor(codes.scale_of_scales)
        values = from_nvfp4(weight, scale, scales[codes.scale_of_scales])
        is_lost = bool(weight.any()) and not values.any()
    elif codes.kind == "mxfp8":
        values = from_mxfp8(weight, scale)
        is_lost = False
    else:
        weight = weight.float()
        values = multiplied(weight, scale.float())
        is_lost = bool(((values == 0) & (weight != 0)).any())
    damaged = "; the file is damaged, or was not made right"
    for own, numbers in scales.items():
        if numbers.is_floating_point() and not numbers.float().isfinite().all():
            raise UnusableModel(f"{path}: {own} has values that are not finite{damaged}")
    if not values.isfinite().all():
        raise UnusableModel(f"{path}: {name} times {codes.scale} is not finite everywhere{damaged}")
    if is_lost:
        raise UnusableModel(f"{path}: {list(scales)[-1]} is 0 where {name} is not{damaged}")
    return values


def _of_gguf(
    path: Path, files: Mapping[str, str], layout: Mapping[str, OriginalTensor], skeleton: Any, dtype: Any
) -> dict[str, Any]:
    import torch
    from diffusers.quantizers.gguf.utils import GGUFParameter

    linear = {
        f"{name}.weight" for name, layer in skeleton.named_modules() if isinstance(layer, torch.nn.Linear)
    }
    state: dict[str, Any] = {}
    stored = read_gguf_tensors(path)
    for own, tensor in layout.items():
        values = stored[files[own]]
        if values.is_kept and linear.issuperset(tensor.parts):
            packed = tensor.split(torch.from_numpy(values.packed()))
            state |= {
                name: GGUFParameter(rows, quant_type=values.quant_type) for name, rows in packed.items()
            }
        else:
            plain = torch.from_numpy(values.dequantized())
            state |= tensor.split(plain if values.is_float else plain.to(dtype))
    return state
