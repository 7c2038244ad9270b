"""The tensors of a denoiser in its authors' layout: their names, and their origin in diffusers' tensors.

A tensor of the authors' layout has the rows of one or several of diffusers' tensors, one after the other. Where a layer
modulates (`AdaLayerNormContinuous`), its halves are swapped. Both directions are used: files are read and written by
the same table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported
from vivace.models.checkpoints.original_names import original_names

if TYPE_CHECKING:
    import torch

_UNET = "UNet2DConditionModel"
_SAME_ELSEWHERE = ("ZImageTransformer2DModel", "QwenImageTransformer2DModel")
"""Denoisers whose other tensors have the same names in both layouts."""
_SD3 = {
    "pos_embed.pos_embed": "pos_embed",
    "context_embedder.weight": "context_embedder.weight",
    "context_embedder.bias": "context_embedder.bias",
}
_FLUX_NORMS = ("query_norm", "key_norm")
"""Norms whose weight is called `scale`."""
_NOT_OF_MODELS = "_lora"
"""Parts of names that only LoRA trainers use."""


@dataclass(frozen=True)
class OriginalTensor:
    """A tensor of the authors' layout.

    Attributes:
        parts: names in diffusers' state dict, whose rows it has in this order.
        shapes: of the parts.
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


def original_layout(denoiser: Any) -> dict[str, OriginalTensor]:
    """Return the tensors of a denoiser in its authors' layout, by name. Values are not read.

    Raises:
        Unsupported: the authors' names of one of its tensors are not known.
    """
    kind = type(denoiser).__name__
    modules = {name: type(module).__name__ for name, module in denoiser.named_modules() if name}
    state = {name: tuple(tensor.shape) for name, tensor in denoiser.state_dict().items()}
    per_block = denoiser.config.layers_per_block if kind == _UNET else None
    if per_block is not None and not isinstance(per_block, int):
        raise Unsupported(f"the authors' names of a {kind} with levels of {per_block} layers are not known")
    layout: dict[str, OriginalTensor] = {}
    left = dict(state)
    for original, layers, is_swapped in original_names(kind, modules, per_block):
        if _NOT_OF_MODELS in original:
            continue
        for end in ("weight", "bias"):
            parts = tuple(f"{layer}.{end}" for layer in layers)
            if not all(part in left for part in parts):
                continue
            own = "scale" if end == "weight" and original.endswith(_FLUX_NORMS) else end
            shapes = tuple(left.pop(part) for part in parts)
            layout[f"{original}.{own}"] = OriginalTensor(parts, shapes, is_swapped)
    for name, shape in left.items():
        original = name if kind in _SAME_ELSEWHERE else _SD3.get(name, "") if "SD3" in kind else ""
        if not original:
            raise Unsupported(f"the authors' name of {name} in a {kind} is not known")
        layout[original] = OriginalTensor((name,), (shape,))
    return layout
