"""LoRA files as diffusers reads them: whether `pipe.load_lora_weights` would add the same as vivace does.

It also knows names of layers that vivace has no table for.

Its converters leave out what they do not know and some mistake names, so a script may call them only where both agree.
"""

from __future__ import annotations

import inspect
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import UnusableModel
from vivace.foundation.untrusted.files import reading
from vivace.machinery.lora.changes import LoraLayers, Matrices
from vivace.machinery.lora.lora_files import settings_of_header
from vivace.machinery.technique import COMPONENTS, Component, attribute_of, component_of

if TYPE_CHECKING:
    import torch

_TOLERANCE = 1e-3


class TensorTrace:
    """Follows a file's tensors through functions that rename, split, join and scale them."""

    def __init__(self) -> None:
        self.read: set[str] = set()

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        kind = _kind()
        followed = {}
        for name, tensor in tensors.items():
            own: Any = tensor.as_subclass(kind)
            own.sources, own.trace = frozenset((name,)), self
            followed[name] = own
        return followed

    def used(self, outputs: Iterable[Any]) -> set[str]:
        """Return the names of the file's tensors that went into these, or were read as numbers."""
        return self.read.union(*(getattr(output, "sources", ()) for output in outputs))


def adds_the_same(pipe: Any, path: Path, layers: LoraLayers) -> bool:
    """Whether diffusers reads these layers from a file, and adds the same to each."""
    try:
        with reading(path):
            theirs = _read(pipe, path)
    except UnusableModel:
        return False
    loaded = getattr(type(pipe), "_lora_loadable_modules", ())
    for component, own in layers.items():
        others = theirs.get(component, {})
        if attribute_of(pipe, component) not in loaded or own.keys() != others.keys():
            return False
        if any(
            layer.matrices is None or not _agree(layer.matrices, others[name]) for name, layer in own.items()
        ):
            return False
    return True


def converted(pipe: Any, tensors: Mapping[str, Any]) -> tuple[Mapping[str, Matrices], set[str]]:
    """Return the denoiser's layers that diffusers reads, and the names of the tensors used; else UnusableModel."""
    import torch

    trace = TensorTrace()
    with reading("the LoRA"):
        state, alphas = _converted(pipe, trace.of(tensors))
        attribute = attribute_of(pipe, "denoiser")
        own, scales = _of_part(state, attribute), _of_part(alphas, attribute)
        used = trace.used((*own.values(), *scales.values()))
        layers = _layers(pipe, "denoiser", own, scales, {})
    plain = {
        name: Matrices(pair.down.as_subclass(torch.Tensor), pair.up.as_subclass(torch.Tensor), pair.scale)
        for name, pair in layers.items()
    }
    return plain, used


def _agree(matrices: Matrices, other: Matrices) -> bool:
    import torch

    if matrices.size() != other.size():
        return False
    probe = torch.randn(matrices.size()[1], generator=torch.Generator().manual_seed(0))
    first, second = (
        pair.scale * (pair.up.float() @ (pair.down.flatten(1).float() @ probe)) for pair in (matrices, other)
    )
    return bool((first - second).norm() <= _TOLERANCE * first.norm())


def _read(pipe: Any, path: Path) -> Mapping[Component, Mapping[str, Matrices]]:
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(str(path), framework="pt") as file:
        text = (file.metadata() or {}).get("lora_adapter_metadata")
    metadata = json.loads(text) if text else {}
    state, alphas = _converted(pipe, load_file(path))
    parts = {attribute_of(pipe, component): component for component in COMPONENTS}
    read: dict[Component, Mapping[str, Matrices]] = {}
    for attribute in dict.fromkeys(key.partition(".")[0] for key in state):
        component = parts.get(attribute)
        if component is not None:
            read[component] = _layers(
                pipe, component, _of_part(state, attribute), _of_part(alphas, attribute), metadata
            )
    return read


def _converted(pipe: Any, stored: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return matrices and alphas by names that begin with the pipeline's attribute, as diffusers converts them."""
    convert = getattr(type(pipe), "lora_state_dict", None)
    if convert is None:
        return stored, {}
    arguments: dict[str, Any] = {}
    if getattr(pipe, "unet", None) is not None:
        arguments["unet_config"] = pipe.unet.config
    if "return_alphas" in inspect.signature(convert).parameters:
        arguments["return_alphas"] = True
    converted = convert(stored, **arguments)
    state, alphas = converted[:2] if isinstance(converted, tuple) else (converted, None)
    return state, alphas or {}


def _of_part(values: Mapping[str, Any], attribute: str) -> dict[str, Any]:
    start = f"{attribute}."
    return {key.removeprefix(start): value for key, value in values.items() if key.startswith(start)}


def _layers(
    pipe: Any, component: Component, state: dict[str, Any], alphas: dict[str, Any], metadata: Any
) -> dict[str, Matrices]:
    """Return a component's layers by their names in it; ValueError for other tensors than two matrices a layer."""
    from diffusers.utils.state_dict_utils import (
        convert_all_state_dict_to_peft,
        convert_unet_state_dict_to_peft,
    )

    convert = convert_unet_state_dict_to_peft if component == "denoiser" else convert_all_state_dict_to_peft
    module = component_of(pipe, component)

    def renamed(values: dict[str, Any], rename: Any) -> dict[str, Any]:
        names = rename(values) if values else {}
        if component != "denoiser" and not hasattr(module, "text_model"):
            # transformers has flattened CLIPTextModel; files are older.
            return {key.removeprefix("text_model."): value for key, value in names.items()}
        return dict(names)

    matrices: dict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in renamed(state, convert).items():
        layer, _, role = key.partition(".lora_")
        matrices[layer][role] = value
    # Alphas are named after their layer, or after one of its matrices, and are then renamed in the same way.
    scales = {key.removesuffix(".alpha"): float(alpha) for key, alpha in alphas.items()}
    rename = convert_unet_state_dict_to_peft if component == "denoiser" else _renamed_alphas
    by_layer = {key.partition(".lora_")[0]: alpha for key, alpha in renamed(scales, rename).items()}
    settings = settings_of_header(metadata, attribute_of(pipe, component))
    layers = {}
    for layer, roles in matrices.items():
        if roles.keys() != {"A.weight", "B.weight"}:
            raise ValueError(f"{layer} has {', '.join(sorted(roles))}")
        down, up = roles["A.weight"], roles["B.weight"]
        stated = None if settings is None else settings.scale((layer,), len(down))
        own = by_layer.get(layer)
        scale = stated if stated is not None else 1.0 if own is None else own / len(down)
        layers[layer] = Matrices(down, up.flatten(1), scale)
    return layers


def _renamed_alphas(values: dict[str, Any]) -> dict[str, Any]:
    """Rename alphas like a text encoder's matrices: alphas may be named after one of them, or after the layer alone."""
    from diffusers.utils.state_dict_utils import convert_state_dict_to_peft

    try:
        return dict(convert_state_dict_to_peft(values))
    except ValueError:  # only layers, which need no other name
        return values


def _kind() -> Any:
    import torch

    class Traced(torch.Tensor):  # type: ignore[misc]
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = super().__torch_function__(func, types, args, kwargs or {})
            traced = [value for value in _leaves((args, kwargs or {})) if isinstance(value, Traced)]
            sources = frozenset().union(*(getattr(value, "sources", ()) for value in traced))
            trace = next((value.trace for value in traced if hasattr(value, "trace")), None)
            for value in _leaves(result):
                if isinstance(value, Traced):
                    value.sources, value.trace = sources, trace
                elif isinstance(value, float) and trace is not None:
                    trace.read |= sources
            return result

    return Traced


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value
