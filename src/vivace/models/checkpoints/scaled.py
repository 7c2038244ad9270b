"""Read a checkpoint whose weights have scales: each weight times its scale, in the precision of the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vivace.models.checkpoints.companions import is_marker


def read_scaled(
    path: Path, scales: Mapping[str, str], names: Mapping[str, str], dtype: Any
) -> dict[str, Any]:
    """Return tensors of a checkpoint without their companions, weights multiplied by their scales.

    The products are computed in fp32 and rounded once.

    Args:
        path: a safetensors file.
        scales: name of each weight's scale.
        names: name of each tensor in the answer, by its name in the file.
        dtype: of weights with a scale; other tensors keep theirs.
    """
    import torch
    from safetensors import safe_open

    state: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for name, new in names.items():
            if name in scales:
                weight, scale = (file.get_tensor(each).to(torch.float32) for each in (name, scales[name]))
                state[new] = multiplied(weight, scale).to(dtype)
            elif not is_marker(name):
                state[new] = file.get_tensor(name)
    return state


def multiplied(weight: Any, scale: Any) -> Any:
    """Return the product of a weight and its scale: one number, one for each row, or one for each block."""
    if scale.numel() == 1:
        return weight * scale.reshape(())
    if scale.dim() == 1:
        return weight * scale.reshape(-1, *[1] * (weight.dim() - 1))
    for axis, length in enumerate(weight.shape):
        scale = scale.repeat_interleave(length // scale.shape[axis], dim=axis)
    return weight * scale
