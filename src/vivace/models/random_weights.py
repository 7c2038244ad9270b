"""Random weights that keep activations in the range of a trained model; see `vivace.architectures.gains`.

Biases are close to 0 and norm weights close to 1, but not exactly, so that a kernel that ignores them is detected.
"""

from __future__ import annotations

import math
import re
from typing import Any

from vivace.architectures import FAMILIES
from vivace.architectures.family import RandomWeights, Rules
from vivace.architectures.gains import SHARED

_BIAS = 0.02
_NORM_SPREAD = 0.1


def fill(module: Any, generator: Any) -> None:
    """Fill every parameter of a component in place, in the order of `named_parameters`.

    Args:
        module: of a class that a family gives gains for.
        generator: a torch.Generator on the module's device.
    """
    import torch

    own = _weights_of(module)
    gains, norms = _compiled(own.gains(module)), _compiled(own.norms(module))
    embeddings = {id(child.weight) for child in module.modules() if isinstance(child, torch.nn.Embedding)}
    for name, parameter in module.named_parameters():
        if parameter.dim() == 1 or name.endswith("gamma"):
            is_bias = name.endswith("bias")
            mean = 0.0 if is_bias else _first(norms, name)
            spread = _BIAS if is_bias else _NORM_SPREAD * min(1.0, abs(mean) or 1.0)
            parameter.normal_(mean, spread, generator=generator)
            continue
        gain = _first(gains, name)
        fan_in = 1 if id(parameter) in embeddings else parameter[0].numel()
        parameter.normal_(0.0, gain / math.sqrt(fan_in), generator=generator)
    own.finish(module)


def _weights_of(module: Any) -> RandomWeights:
    kind = type(module).__name__
    of_families = (family.random_weights[kind] for family in FAMILIES if kind in family.random_weights)
    return next(of_families, None) or SHARED[kind]


def _compiled(rules: Rules) -> list[tuple[re.Pattern[str], float]]:
    return [(re.compile(pattern), gain) for pattern, gain in rules]


def _first(rules: list[tuple[re.Pattern[str], float]], name: str) -> float:
    return next((gain for pattern, gain in rules if pattern.search(name)), 1.0)
