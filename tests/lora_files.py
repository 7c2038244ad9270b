"""Random LoRAs for tests of recipes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vivace.machinery.technique import attribute_of

Takes = Callable[[str], bool]


def write_lora(
    pipe: Any,
    path: Path,
    rank: int,
    seed: int = 0,
    strength: float = 0.03,
    takes: Takes = lambda _: True,
    named: Callable[[str], str] = lambda layer: layer,
) -> str:
    """Write a LoRA for the denoiser's layers whose names `takes` takes; return its path.

    Args:
        strength: of its change, beside the inputs of a layer.
        named: what the file calls a layer.
    """
    name = attribute_of(pipe, "denoiser")
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for layer, module in getattr(pipe, name).named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d) and takes(layer):
            outputs, *inner = module.weight.shape
            down = torch.randn(rank, *inner, generator=generator) / module.weight[0].numel() ** 0.5
            up = strength * torch.randn(outputs, rank, *[1] * (len(inner) - 1), generator=generator)
            state[f"{name}.{named(layer)}.lora_A.weight"] = down
            state[f"{name}.{named(layer)}.lora_B.weight"] = up
    assert state, "no layer has such a name"
    save_file(state, path)
    return path.as_posix()
