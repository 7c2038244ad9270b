"""Read a denoiser's weights from a single file in its authors' layout, as diffusers' state dict, where diffusers does
not read it as it is. Names, shapes and the whole list are checked against the model's configuration before a value is
read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.architectures import family_of
from vivace.architectures.family import OriginalNames
from vivace.errors import Unsupported, UnusableModel
from vivace.models.checkpoints.gguf_file import SUFFIX, read_gguf_tensors
from vivace.models.checkpoints.headers import read_header
from vivace.models.checkpoints.weight_scales import (
    Codes,
    from_mxfp8,
    from_nvfp4,
    is_marker,
    multiplied,
    padded_shape,
)

if TYPE_CHECKING:
    import torch

_SCALES = re.compile(r"(?:query_norm|key_norm|norms\.\d+)$")
"""Black Forest Labs' norms, whose weight is called `scale`."""
_SWAPPED = "AdaLayerNormContinuous"
"""A class of diffusers that has scale before shift, where the original has shift before scale."""
_NOT_OF_MODELS = "_lora"
"""Parts of names that only LoRA trainers use."""


# A tensor of the authors' layout has the rows of one or several of diffusers' tensors, one after the other. Where a
# layer modulates (`AdaLayerNormContinuous`), its halves are swapped. Both directions are used: files are read and
# written by the same table.
@dataclass(frozen=True)
class OriginalTensor:
    """A tensor of the authors' layout.

    Attributes:
        parts: names in diffusers' state dict, whose rows it has in this order.
        is_swapped: whether the halves of its rows are exchanged.
    """

    parts: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    is_swapped: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        if len(self.shapes) == 1:
            return self.shapes[0]
        return sum(shape[0] for shape in self.shapes), *self.shapes[0][1:]

    def join(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor, from diffusers' state dict."""
        import torch

        parts = [tensors[name] for name in self.parts]
        return self._exchanged(parts[0] if len(parts) == 1 else torch.cat(parts))

    def split(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return diffusers' tensors by name; also of a tensor whose rows are packed."""
        rows = self._exchanged(tensor)
        if len(self.parts) == 1:
            return {self.parts[0]: rows}
        sizes = [shape[0] for shape in self.shapes]
        return dict(zip(self.parts, rows.split(sizes), strict=True))

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self.is_swapped:
            return tensor
        first, second = tensor.chunk(2)
        import torch

        return torch.cat([second, first])


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
    """
    layout = original_layout(skeleton)
    family = family_of(skeleton)
    unused = family.files.unused if family is not None and family.files is not None else ()
    files = {own: name for name, own in names.items() if not is_marker(name) and own not in unused}
    check_tensors(path, files, layout, codes)
    if path.suffix == SUFFIX:
        return _of_gguf(path, files, layout, skeleton, dtype)
    return _of_safetensors(path, files, layout, codes, dtype)


def check_tensors(
    path: Path, files: Mapping[str, str], layout: Mapping[str, OriginalTensor], codes: Mapping[str, Codes]
) -> None:
    """Raise UnusableModel unless a file has the tensors of a layout, no others, and each in its shape."""
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
    """Return a weight in fp32, with its padding."""
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
        if codes.rotation:
            from vivace.machinery.kernels.reference import rotate

            values = rotate(values, codes.rotation)
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


def original_names(denoiser: Any, modules: Mapping[str, str]) -> Iterator[tuple[str, tuple[str, ...], bool]]:
    """Return original names, the layers of diffusers that each is, and whether its halves are swapped."""
    known = _known(denoiser)
    if known is None:
        return
    if known.of_layer is not None:
        for name in modules:
            original = known.of_layer(name, modules, getattr(denoiser, "config", {}))
            if original is not None:
                yield original, (name,), False
    numbers = {int(number) for name in modules for number in re.findall(r"\.(\d+)\.", name)}
    for original, names in known.layers.items():
        for number in sorted(numbers) if "#" in original else (0,):
            layers = tuple(name.replace("#", str(number)) for name in names)
            if all(layer in modules for layer in layers):
                owner = modules.get(layers[0].rpartition(".")[0])
                yield original.replace("#", str(number)), layers, owner == _SWAPPED


def has_original_names(denoiser: Any) -> bool:
    """Whether the original names of a denoiser's layers are known here."""
    return _known(denoiser) is not None


def _known(denoiser: Any) -> OriginalNames | None:
    family = family_of(denoiser)
    return None if family is None else family.original


def original_layout(denoiser: Any) -> dict[str, OriginalTensor]:
    """Return the tensors of a denoiser in its authors' layout, by name. Values are not read."""
    known = _known(denoiser) or OriginalNames()
    modules = {name: type(module).__name__ for name, module in denoiser.named_modules() if name}
    state = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    layout: dict[str, OriginalTensor] = {}
    left = dict(state)
    for original, layers, is_swapped in original_names(denoiser, modules):
        if _NOT_OF_MODELS in original:
            continue
        for end in ("weight", "bias"):
            parts = tuple(f"{layer}.{end}" for layer in layers)
            if not all(part in left for part in parts):
                continue
            own = "scale" if end == "weight" and _SCALES.search(original) else end
            shapes = tuple(left.pop(part) for part in parts)
            layout[f"{original}.{own}"] = OriginalTensor(parts, shapes, is_swapped)
    for name, shape in left.items():
        original = name if known.keeps_others else known.tensors.get(name, "")
        if not original:
            raise Unsupported(f"the authors' name of {name} in a {type(denoiser).__name__} is not known")
        layout[original] = OriginalTensor((name,), (shape,))
    return layout
