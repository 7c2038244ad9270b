"""Pipelines of published architectures with random weights: speed and memory at full size without a download.

A component is constructed on the meta device. Each parameter is then allocated once, on the target device and in the
target dtype, and filled there (`fill`), so that 12 B parameters never pass through host memory.
Buffers that a module computes in its constructor (position ids) are kept.

The images are meaningless. Shapes, kernels, memory and the range of activations are those of the published model, and
so are the times. Everything that depends on training (cache thresholds, quality) is not.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import math
import re
from collections.abc import Iterator
from typing import Any

from vivace.architectures import ARCHITECTURES, FAMILIES
from vivace.architectures.components import Architecture, ComponentConfig
from vivace.architectures.family import RandomWeights, Rules
from vivace.architectures.gains import SHARED
from vivace.errors import UnknownModel, nearest
from vivace.models.hashed_tokenizers import tokenizer_for, with_processor
from vivace.models.quiet import quiet

_BIAS, _NORM_SPREAD = 0.02, 0.1
"""Biases are close to 0 and norm weights close to 1, but not exactly: a kernel that ignores them is detected."""


def build(architecture: Architecture | str, device: str, dtype: Any, seed: int = 0) -> Any:
    """Build the diffusers pipeline of an architecture, in evaluation mode and without gradients.

    Args:
        architecture: an Architecture, or the name of one in `ARCHITECTURES`.
        device: "cpu", "cuda", "cuda:1", ...
        dtype: a torch dtype, for every component.
        seed: the same seed gives the same weights on the same kind of device in the same dtype.

    Returns:
        A pipeline of `architecture.pipeline`'s class, its progress bar off.

    Raises:
        UnknownModel: there is no architecture of that name.
    """
    if isinstance(architecture, str):
        architecture = _named(architecture)
    with quiet():
        import diffusers
    parts: dict[str, Any] = {}
    for name, component in architecture.components.items():
        parts[name] = build_component(component, device, dtype, seed, name)
        if name in architecture.text_lengths:
            length = architecture.text_lengths[name]
            parts[name.replace("text_encoder", "tokenizer")] = tokenizer_for(parts[name].config, length)
    scheduler = getattr(diffusers, architecture.scheduler.class_name)(**architecture.scheduler.config)
    kind = getattr(diffusers, architecture.pipeline)
    parts = with_processor(kind, parts)
    pipe = kind(scheduler=scheduler, **parts, **architecture.arguments)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def build_component(
    component: ComponentConfig, device: str, dtype: Any, seed: int = 0, name: str | None = None
) -> Any:
    """Build one module with random weights, in evaluation mode and without gradients; see `build`.

    Args:
        name: its name in the pipeline ("unet"), so that two components of one class and seed get different weights.
    """
    import torch

    module = on_meta(component)
    _allocate(module, device, dtype)
    generator = torch.Generator(device)
    generator.manual_seed(_seed_of(seed, name or component.class_name))
    with torch.no_grad():
        fill(module, generator)
    return module


def on_meta(component: ComponentConfig, *, with_buffers: bool = True) -> Any:
    """Return the module with its parameters on the meta device in fp32, to count parameters and FLOPs.

    Its parameters take no memory.

    Args:
        with_buffers: whether its buffers are real, on the CPU, or on the meta device too: SD 3.5's positions take
            seconds to compute.
    """
    import torch
    from accelerate import init_empty_weights

    where = contextlib.nullcontext() if with_buffers else torch.device("meta")
    kind = _class_of(
        component
    )  # imported here: constants of a module imported below would have no values for good
    with init_empty_weights(include_buffers=False), _rng_state_restored(), where:
        module = _construct(kind, component)
    if hasattr(module, "tie_weights"):
        # init_empty_weights has replaced a shared tensor separately in each module.
        module.tie_weights()
    return module.eval().requires_grad_(False)


def num_parameters(component: ComponentConfig) -> int:
    """Count the parameters of a component, shared ones once."""
    return sum(p.numel() for p in on_meta(component, with_buffers=False).parameters())


def _named(name: str) -> Architecture:
    if name not in ARCHITECTURES:
        names = ", ".join(ARCHITECTURES)
        raise UnknownModel(
            f"no architecture '{name[:200]}'{nearest(name, ARCHITECTURES)} (there are {names})"
        )
    return ARCHITECTURES[name]


def _class_of(component: ComponentConfig) -> Any:
    if component.library == "transformers":
        import transformers

        return getattr(transformers, component.class_name)
    import diffusers

    return getattr(diffusers, component.class_name)


def _construct(kind: Any, component: ComponentConfig) -> Any:
    if component.library == "transformers":
        # transformers writes into the dictionaries that it is given.
        return kind(kind.config_class(**copy.deepcopy(component.config)))
    return kind(**component.config)


def _allocate(module: Any, device: str, dtype: Any) -> None:
    """Allocate uninitialised memory for parameters, shared ones once; buffers keep their values."""
    import torch

    allocated: dict[int, Any] = {}
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in allocated:
                empty = torch.empty(parameter.shape, dtype=dtype, device=device)
                # The old parameter is kept alive, so that its id is not reused.
                allocated[id(parameter)] = (parameter, torch.nn.Parameter(empty, requires_grad=False))
            setattr(child, name, allocated[id(parameter)][1])
        for name, buffer in child.named_buffers(recurse=False):
            # What is in no file stays in fp32 when a model is loaded, too: frequencies of embeddings.
            is_cast = buffer.is_floating_point() and name not in child._non_persistent_buffers_set
            kind = dtype if is_cast else buffer.dtype
            setattr(child, name, buffer.to(device, kind))


def _seed_of(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "big")


@contextlib.contextmanager
def _rng_state_restored() -> Iterator[None]:
    """Restore the global RNG state, which constructors may advance."""
    import torch

    state = torch.random.get_rng_state()
    try:
        yield
    finally:
        torch.random.set_rng_state(state)


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
