"""The scales of activations that are fixed before drawing: seen in a few calls, kept in a file, read back from it.

A file holds a scalar for each layer, shaped (1,) * rank of the layer's inputs, and says in its metadata what it was
made from; it is taken again for exactly that.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.contract import COMPONENTS, Target
from vivace.contract.cache_folder import cache_folder

_VERSION = 1
_LARGEST = 448.0  # of e4m3


@dataclass(frozen=True)
class Scales:
    """of: scale by layer. missing: why a layer has none. how: in words, for the Record. file: where they are kept."""

    of: Mapping[str, Any]
    missing: Mapping[str, str]
    how: str
    file: Path | None = None


def scales_of(target: Target, layers: Mapping[str, Any], num_pictures: int) -> Scales:
    """The scales of these layers' inputs: kept ones if there are, else seen while `num_pictures` are drawn.

    Args:
        target: its pipeline is called as the workload will be, with `target.asked.prompts` (at least one).
        layers: by name, the component's in front ("denoiser.proj_out").
    """
    prompts = [target.asked.prompts[k % len(target.asked.prompts)] for k in range(num_pictures)]
    source = _source(target, sorted(layers), prompts)
    file = _file(target, source)
    pictures = f"{num_pictures} picture{'s' if num_pictures > 1 else ''}"
    if file is not None and (kept := _read(file, source, layers)) is not None:
        return Scales(*kept, f"reloaded, calibrated on {pictures}", file)
    seen = {name: _Seen() for name in layers}
    with _watching(layers, seen):
        for k, prompt in enumerate(prompts):
            _draw(target, prompt, seed=k)
    scales, missing = {}, {}
    for name, found in seen.items():
        reason = found.unusable()
        if reason is None:
            scales[name] = found.scale()
        else:
            missing[name] = reason
    is_kept = file is not None and _write(file, source, scales, missing)
    return Scales(scales, missing, f"calibrated on {pictures}", file if is_kept else None)


class _Seen:
    """What came into one layer: the largest magnitude, kept on the device, and the ranks."""

    def __init__(self) -> None:
        self.largest: Any = None
        self.ranks: set[int] = set()

    def look(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        import torch

        largest = inputs[0].detach().abs().amax().float()
        self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)
        self.ranks.add(inputs[0].dim())

    def unusable(self) -> str | None:
        if self.largest is None:
            return "not called while calibrating"
        if len(self.ranks) > 1:
            return "its inputs come in several ranks"
        return None if bool(self.largest.isfinite()) else "its inputs were not finite"

    def scale(self) -> Any:
        import torch

        (rank,) = self.ranks
        smallest = torch.finfo(torch.float32).tiny
        return (self.largest / _LARGEST).clamp(min=smallest).reshape((1,) * rank)


@contextlib.contextmanager
def _watching(layers: Mapping[str, Any], seen: Mapping[str, _Seen]) -> Iterator[None]:
    hooks = [layer.register_forward_pre_hook(seen[name].look) for name, layer in layers.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _draw(target: Target, prompt: str, seed: int) -> None:
    import torch

    accepted = inspect.signature(target.pipe.__call__).parameters
    call = {k: v for k, v in target.model.defaults.items() if k in accepted}
    target.pipe(prompt=prompt, generator=torch.Generator("cpu").manual_seed(seed), **call)


def _source(target: Target, names: Sequence[str], prompts: Sequence[str]) -> str:
    """All that the scales depend on, as text."""
    call = {k: v for k, v in sorted(target.model.defaults.items()) if isinstance(v, bool | int | float | str)}
    dtypes = {c: str(m.dtype) for c, m in sorted(target.modules(COMPONENTS).items())}
    return json.dumps(
        {
            "version": _VERSION,
            "model": target.identity,
            "call": call,
            "prompts": list(prompts),
            "dtypes": dtypes,
            "layers": list(names),
        },
        sort_keys=True,
    )


def _file(target: Target, source: str) -> Path | None:
    """None: the pipeline's origin is unknown, so what is kept could not be told from another's."""
    if not target.identity:
        return None
    return cache_folder() / "scales" / f"{hashlib.sha256(source.encode()).hexdigest()[:32]}.safetensors"


def _read(file: Path, source: str, layers: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]] | None:
    """The scales, on their layers' devices, and why others have none; None: there is no such file, or it is damaged."""
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


def _write(file: Path, source: str, scales: Mapping[str, Any], missing: Mapping[str, str]) -> bool:
    """Whole or not at all. A folder that cannot be written to costs the next run its calibration, nothing else."""
    from safetensors.torch import save_file

    part = file.with_suffix(f".{os.getpid()}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: scale.cpu() for name, scale in scales.items()}
        save_file(tensors, str(part), {"source": source, "missing": json.dumps(dict(missing))})
        part.replace(file)
    except OSError:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        return False
    return True
