"""Static scales of activations: measured while a few images are generated, cached in a file, and loaded from it.

A file holds one scalar per layer, shaped (1,) * rank of the layer's inputs. Its metadata says what it was made from;
only a file made from exactly the same is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from vivace.errors import OutputError
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import cache_folder
from vivace.machinery.quantization.layers import LayerChoice
from vivace.machinery.technique import COMPONENTS, Component, Target, call_parameters, without_clashes

if TYPE_CHECKING:
    import torch

_VERSION = 1
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class Scales:
    """The scales of layers' inputs, why layers have none, their origin ("calibrated on ...", "reloaded, ...") and where
    they are cached, if anywhere."""

    by_layer: Mapping[str, torch.Tensor]
    missing: Mapping[str, str]
    origin: str
    file: Path | None = None


def calibrate(target: Target, layers: Mapping[str, torch.nn.Module], num_images: int) -> Scales:
    """Return the scales of these layers' inputs (by component and name): cached, or measured on `num_images` images."""
    from safetensors.torch import save

    prompts = [target.request.prompts[k % len(target.request.prompts)] for k in range(num_images)]
    source = source_of(target, sorted(layers), prompts)
    file = cache_file(target, "scales", source, ".safetensors")
    images = f"{num_images} image{'s' if num_images > 1 else ''}"
    if file is not None and (cached := _load(file, source, layers)) is not None:
        return Scales(*cached, f"reloaded, calibrated on {images}", file)
    largest = _Largest()
    ranges = {name: _InputRange(largest) for name in layers}
    decodes = any(name.startswith("vae.") for name in layers)
    with _observing(layers, ranges):
        for k, prompt in enumerate(prompts):
            generate(target, prompt, seed=k, decodes=decodes)
    scales, missing = {}, {}
    for name, range_ in ranges.items():
        reason = range_.unusable()
        if reason is None:
            scales[name] = range_.scale()
        else:
            missing[name] = reason
    on_host = {name: scale.cpu() for name, scale in scales.items()}
    content = save(on_host, {"source": source, "missing": json.dumps(missing)})
    is_cached = file is not None and write_cache(file, content)
    return Scales(scales, missing, f"calibrated on {images}", file if is_cached else None)


def calibrate_choices(
    target: Target,
    modules: Mapping[Component, torch.nn.Module],
    choices: Mapping[Component, LayerChoice],
    num_images: int,
) -> Scales:
    """Calibrate the scales of the chosen layers; those that get none move to the skipped ones."""
    layers = {
        f"{component}.{name}": modules[component].get_submodule(name)
        for component, choice in choices.items()
        for name in choice.chosen
    }
    scales = calibrate(target, layers, num_images)
    for full_name, reason in scales.missing.items():
        component, _, name = full_name.partition(".")
        choice = choices[cast("Component", component)]
        choice.chosen.remove(name)
        choice.skipped[name] = reason
    return scales


class _Largest:
    """The largest magnitude of tensors, on their device; computed once for a tensor that several layers take."""

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        self._known: Any = WeakIdKeyDictionary()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        version = None if tensor.is_inference() else tensor._version
        entry = self._known.get(tensor)
        if entry is not None and version is not None and entry[0] == version:
            largest: torch.Tensor = entry[1]
            return largest
        # One kernel, which writes nothing of the tensor's size.
        largest = torch.linalg.vector_norm(tensor.detach(), torch.inf)
        self._known[tensor] = (version, largest)
        return largest


class _InputRange:
    def __init__(self, of_tensors: _Largest) -> None:
        self.largest: torch.Tensor | None = None
        self.ranks: set[int] = set()
        self._of_tensors = of_tensors

    def observe(self, layer: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        import torch

        largest = self._of_tensors.of(inputs[0])
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.ranks.add(inputs[0].dim())

    def unusable(self) -> str | None:
        if self.largest is None:
            return "not called while calibrating"
        if len(self.ranks) > 1:
            return "its inputs come in several ranks"
        return None if bool(self.largest.isfinite()) else "its inputs were not finite"

    def scale(self) -> torch.Tensor:
        import torch

        assert self.largest is not None
        (rank,) = self.ranks
        smallest = torch.finfo(torch.float32).tiny
        return (self.largest.float() / _E4M3_MAX).clamp(min=smallest).reshape((1,) * rank)


@contextlib.contextmanager
def _observing(layers: Mapping[str, torch.nn.Module], ranges: Mapping[str, _InputRange]) -> Iterator[None]:
    hooks = [layer.register_forward_pre_hook(ranges[name].observe) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def generate(target: Target, prompt: str, seed: int, decodes: bool = True) -> None:
    """Call the pipeline as the workload will, without decoding the latents if that is not needed."""
    import torch

    accepted = call_parameters(target.pipe)
    call = {k: v for k, v in target.model.defaults.items() if k in accepted} | dict(target.request.inputs)
    if not decodes and "output_type" in accepted:
        call["output_type"] = "latent"
    target.pipe(
        prompt=prompt,
        generator=torch.Generator("cpu").manual_seed(seed),
        **without_clashes(target.pipe, call),
    )


def source_of(target: Target, names: Sequence[str], prompts: Sequence[str]) -> str:
    call = {k: v for k, v in sorted(target.model.defaults.items()) if isinstance(v, bool | int | float | str)}
    dtypes = {c: str(m.dtype) for c, m in sorted(target.modules(COMPONENTS).items())}
    return json.dumps(
        {
            "version": _VERSION,
            "model": target.identity,
            "call": call | dict.fromkeys(sorted(target.request.inputs), "given"),
            "prompts": list(prompts),
            "dtypes": dtypes,
            "layers": list(names),
        },
        sort_keys=True,
    )


def cache_file(target: Target, folder: str, source: str, suffix: str) -> Path | None:
    """Return where what was measured is cached; None for a pipeline of unknown origin, which cannot be told apart."""
    """Return the file of cached scales; None for a pipeline of unknown origin, whose scales cannot be told apart."""
    if not target.identity:
        return None
    return cache_folder() / folder / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}{suffix}"


def write_cache(file: Path, content: bytes) -> bool:
    """Write a file atomically. If the folder is not writable, the next run measures again."""
    try:
        replace(file, content)
    except OutputError:
        return False
    return True


def _load(
    file: Path, source: str, layers: Mapping[str, torch.nn.Module]
) -> tuple[dict[str, torch.Tensor], dict[str, str]] | None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(file), framework="pt") as opened:
            about = opened.metadata() or {}
            scales = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  no mapping
        missing = json.loads(about.get("missing", "{}"))
    except (OSError, SafetensorError, ValueError):
        return None
    if about.get("source") != source or set(scales) | set(missing) != set(layers):
        return None
    return {name: scale.to(layers[name].weight.device) for name, scale in scales.items()}, missing
