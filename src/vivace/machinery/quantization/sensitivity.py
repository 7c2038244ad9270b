"""The change of the denoiser's output when a single layer is quantised, and the layers to leave out for it.

A few images are generated, and one call of the denoiser is kept of each, from other parts of the denoising. Then each
layer is quantised alone and these calls are repeated. So the error of a layer is what reaches the denoiser's output,
through everything behind the layer. The squared errors of layers nearly add up, which makes the choice a knapsack: the
layers with most error for their cost are left unquantised until a share of the work, or of the weights, is used up.

The errors are cached in a file, so that later processes choose the same.
"""

from __future__ import annotations

import copy
import functools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from vivace.foundation.spec.base import Spec
from vivace.machinery.quantization.calibration import cache_file, generate, source_of, write_cache
from vivace.machinery.quantization.layers import replace_layer
from vivace.machinery.technique import Target

if TYPE_CHECKING:
    import torch

Convert = Callable[[str, "torch.nn.Module"], "torch.nn.Module"]
"""Quantises the layer of a name, perhaps in place."""

_RUINED = 1e9  # the error of an output that is not finite
_DIGITS = 6  # of what is cached, and so of what is chosen by


class Sensitivity(Spec):
    """Of each layer the squared error of the denoiser's output over its square when it alone is quantised, the mean
    over the calls; and its multiplications in these calls."""

    errors: dict[str, float]
    work: dict[str, float]
    source: str


@dataclass(frozen=True)
class Measured:
    """A sensitivity, its origin ("measured on ...", "reloaded, ..."), and the file that it is cached in."""

    sensitivity: Sensitivity
    origin: str
    file: Path | None = None


def measure(
    target: Target, layers: Mapping[str, torch.nn.Module], convert: Convert, how: str, num_images: int
) -> Measured:
    """Return layers' sensitivity: cached, else measured on `num_images` images; `how` is all that `convert` depends
    on."""
    prompts = [target.request.prompts[k % len(target.request.prompts)] for k in range(num_images)]
    source = json.dumps([source_of(target, sorted(layers), prompts), how, target.machine.device_name])
    file = cache_file(target, "sensitivity", source, ".json")
    images = f"{num_images} image{'s' if num_images > 1 else ''}"
    if file is not None and (cached := _load(file, source, layers)) is not None:
        return Measured(cached, f"reloaded, measured on {images}", file)
    denoiser = target.module("denoiser")
    calls = [_one_call(target, denoiser, prompt, k, num_images) for k, prompt in enumerate(prompts)]
    references, work = _references(denoiser, layers, calls)
    errors = {}
    for name, layer in layers.items():
        replace_layer(denoiser, name, convert(name, _copy_of(layer)))
        try:
            outputs = [_output(denoiser, call) for call in calls]
        finally:
            replace_layer(denoiser, name, layer)
        shares = [_relative(output, other) for output, other in zip(outputs, references, strict=True)]
        errors[name] = _rounded(math.fsum(shares) / len(shares))
    sensitivity = Sensitivity(errors=errors, work=work, source=source)
    is_kept = file is not None and write_cache(file, sensitivity.model_dump_json().encode())
    return Measured(sensitivity, f"measured on {images}", file if is_kept else None)


def most_sensitive(errors: Mapping[str, float], costs: Mapping[str, float], share: float) -> list[str]:
    """Return the layers to leave, those with most error for their cost first, which together cost at most `share`."""
    total = math.fsum(errors.values())
    left = share
    kept = []
    gains = {name: errors[name] / costs[name] for name in errors if costs[name] > 0}
    for name in sorted(gains, key=lambda name: (-gains[name], name)):
        if costs[name] <= left and gains[name] > total:
            kept.append(name)
            left -= costs[name]
    return kept


@dataclass(frozen=True)
class KeptLayers:
    """The layers that are left unquantised by their sensitivity, the most sensitive for their cost first, their shares
    of work and weights, and the predicted relative error of the denoiser's output with them left, and without."""

    names: tuple[str, ...]
    errors: Mapping[str, float]
    work: float
    weights: float
    error_without: float
    error: float
    measured: Measured

    @classmethod
    def of(cls, measured: Measured, weights: Mapping[str, float], share: float) -> KeptLayers:
        """Choose layers of at most a `share` of the work, and of the weights: FLUX's modulations are a fifth of
        those."""
        errors, work = measured.sensitivity.errors, measured.sensitivity.work
        costs = {name: max(_share([name], work), _share([name], weights)) for name in errors}
        names = most_sensitive(errors, costs, share)
        rest = [error for name, error in errors.items() if name not in set(names)]
        return cls(
            names=tuple(names),
            errors={name: errors[name] for name in names},
            work=_share(names, work),
            weights=_share(names, weights),
            error_without=math.sqrt(math.fsum(errors.values())),
            error=math.sqrt(math.fsum(rest)),
            measured=measured,
        )

    def changed(self) -> dict[str, int | float | str]:
        file = self.measured.file
        return {
            "denoiser.sensitive_layers_left": len(self.names),
            "denoiser.sensitive_share_of_work": _rounded(self.work),
            "denoiser.sensitive_share_of_weights": _rounded(self.weights),
            "denoiser.predicted_error": _rounded(self.error),
            "denoiser.predicted_error_with_all": _rounded(self.error_without),
            "sensitivity": self.measured.origin,
            "sensitivity_file": "not kept" if file is None else file.name,
        }

    def listed(self) -> list[str]:
        return [f"{name}: {math.sqrt(self.errors[name]):.2%}" for name in self.names]


def _share(names: list[str], of: Mapping[str, float]) -> float:
    return math.fsum(of[name] for name in names) / (math.fsum(of.values()) or 1.0)


_Call = tuple[tuple[Any, ...], dict[str, Any]]


def _one_call(target: Target, denoiser: torch.nn.Module, prompt: str, k: int, number: int) -> _Call:
    import torch
    from torch.utils._pytree import tree_map_only

    calls: list[_Call] = []

    def note(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs)))

    handle = denoiser.register_forward_pre_hook(note, with_kwargs=True)
    try:
        generate(target, prompt, seed=k)
    finally:
        handle.remove()
    return calls[int(len(calls) * (k + 0.5) / number)]


def _references(
    denoiser: torch.nn.Module, layers: Mapping[str, torch.nn.Module], calls: list[_Call]
) -> tuple[list[torch.Tensor], dict[str, float]]:
    work = dict.fromkeys(layers, 0.0)

    def count(name: str, layer: Any, _: Any, output: torch.Tensor) -> None:
        work[name] += layer.weight.numel() * output.numel() / layer.weight.shape[0]

    hooks = [layer.register_forward_hook(functools.partial(count, name)) for name, layer in layers.items()]
    try:
        return [_output(denoiser, call) for call in calls], work
    finally:
        for hook in hooks:
            hook.remove()


def _copy_of(layer: torch.nn.Module) -> torch.nn.Module:
    copied = copy.copy(layer)
    copied._parameters = dict(layer._parameters)
    copied._buffers = dict(layer._buffers)
    return copied


def _output(denoiser: torch.nn.Module, call: _Call) -> torch.Tensor:
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    args, kwargs = tree_map_only(torch.Tensor, torch.clone, call)
    with torch.no_grad():
        output = denoiser(*args, **kwargs)
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return torch.cat([tensor.float().flatten() for tensor in tensors])


def _relative(output: torch.Tensor, reference: torch.Tensor) -> float:
    error = float((output - reference).double().square().sum() / reference.double().square().sum())
    return error if math.isfinite(error) else _RUINED


def _rounded(error: float) -> float:
    return float(f"{error:.{_DIGITS}g}")


def _load(file: Path, source: str, layers: Mapping[str, object]) -> Sensitivity | None:
    try:
        sensitivity = Sensitivity.model_validate_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, ValidationError):
        return None
    is_same = sensitivity.source == source and set(sensitivity.errors) == set(sensitivity.work) == set(layers)
    return sensitivity if is_same else None
