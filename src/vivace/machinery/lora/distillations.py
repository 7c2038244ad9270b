"""LoRAs merged into the weights, such as the few-step LoRAs of the catalogue."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.architectures.entry import FewSteps
from vivace.errors import UnusableModel
from vivace.machinery.lora.changes import LoraLayers, WeightChange
from vivace.machinery.lora.read_lora import read_lora
from vivace.machinery.technique import COMPONENTS, Component, component_of
from vivace.models.find import WEIGHTS
from vivace.models.hub import fetch_part

if TYPE_CHECKING:
    import torch


def few_steps_file(few_steps: FewSteps) -> Path:
    lora = few_steps.lora
    return WEIGHTS / lora if isinstance(lora, str) else fetch_part(lora)


# Merged, a LoRA adds no cost per step. The sum of all LoRAs is computed in fp32 and rounded once.
# Source: Hu et al., LoRA, arXiv 2106.09685.
def merge(pipe: Any, path: Path, amount: float = 1.0) -> int:
    """Merge the LoRA in `path`, scaled; return the number of changed layers. UnusableModel: it is not for this one."""
    lora = read_lora(pipe, path)
    if (problem := lora.problem(COMPONENTS)) is not None:
        raise UnusableModel(problem)
    if lora.unused:
        raise UnusableModel(f"{path}: {lora.unused}; give the LoRA of this model")
    return sum(merge_all(pipe, [(lora.layers, amount)]).values())


def merge_all(pipe: Any, loras: Sequence[tuple[LoraLayers, float]]) -> Counter[Component]:
    """Merge several LoRAs, each with its factor, rounding each weight once; return the changed layers by component."""
    changed: Counter[Component] = Counter()
    for component in COMPONENTS:
        parts = [(layers[component], amount) for layers, amount in loras if component in layers]
        modules = dict(component_of(pipe, component).named_modules()) if parts else {}
        for name in dict.fromkeys(name for layers, _ in parts for name in layers):
            for kind in ("weight", "bias"):  # which RMSNorms and embeddings lack
                own = [(getattr(layers[name], kind), amount) for layers, amount in parts if name in layers]
                if changes := [(change, amount) for change, amount in own if change is not None]:
                    _add(getattr(modules[name], kind), changes)
            changed[component] += 1
    return changed


def _add(tensor: torch.Tensor, changes: Sequence[tuple[WeightChange, float]]) -> None:
    import torch

    with torch.no_grad():
        total = tensor.float()
        for change, amount in changes:
            total = total + amount * change.values(tensor.device).reshape(tensor.shape)
        tensor.copy_(total.to(tensor.dtype))
