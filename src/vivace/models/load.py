"""Load a pipeline from files on this machine (safetensors only, never code from models), or build it from an
architecture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vivace.contract.script import literal
from vivace.errors import Unsupported, UnusableModel
from vivace.models.architectures import Architecture, Component
from vivace.models.entry import Part, Sampler
from vivace.models.files import component_class
from vivace.models.find import Found, obtain
from vivace.models.gguf_file import SUFFIX
from vivace.models.headers import check_whole, main_dtype
from vivace.models.lora import merge
from vivace.models.pipelines import read_config
from vivace.models.quiet import quiet
from vivace.models.remote import fetch_part
from vivace.models.repository import INDEX, components_of

# Read by diffusers when it is imported; closes custom-pipeline loading before every branch.
os.environ.setdefault("DIFFUSERS_DISABLE_REMOTE_CODE", "1")

_UNREADABLE = (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError)


def load_pipeline(found: Found, device: str, *, wait: bool = False) -> Any:
    """The diffusers pipeline as published, on `device` ("cpu" or "cuda"), in evaluation mode.

    CPUs run fp32, whatever the weights are stored in; a GPU runs the catalogue's precision, or, for other models, the
    one that the weights are stored in.

    Args:
        wait: leave it in the host's memory, in the device's precision, for techniques that bring it to the device piece
            by piece. Random weights are always made on the device.

    Raises:
        UnusableModel: the files cannot be read as a pipeline.
        Unsupported: what is missing of it cannot be fetched; random weights do not fit a CPU's memory.
    """
    import torch

    found = obtain(found)
    dtype = getattr(
        torch, {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}[precision(found, device)]
    )
    if found.architecture is not None:
        return _built(found.model.name, found.architecture, device, dtype)
    with quiet(), _explained(found):
        pipe = _from_files(found, dtype)
        if found.entry is not None and found.entry.scheduler is not None:
            _set_scheduler(pipe, found.entry.scheduler)
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            _convert(component, dtype)
            component.eval().requires_grad_(False)
    if getattr(pipe, "watermark", None) is not None:
        pipe.watermark = None  # SDXL's draws one wherever that library happens to be installed
    if not wait:
        pipe.to(device)
    if found.lora is not None:
        with quiet(), _explained(found):
            merge(pipe, found.lora)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_tiny_vae(source: Path | Part | Component) -> Any:
    """An AutoencoderTiny from a folder, from the hub, or with random weights; fp32, on the CPU.

    Raises:
        Unsupported: it is not on this machine and cannot be fetched.
    """
    import torch

    if isinstance(source, Component):
        from vivace.models.synthetic import build_component

        return build_component(source, "cpu", torch.float32)
    folder = source if isinstance(source, Path) else fetch_part(source)
    check_whole(folder.glob("*.safetensors"))
    with quiet():
        from diffusers import AutoencoderTiny

        vae = AutoencoderTiny.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    return vae.eval().requires_grad_(False)


def _built(name: str, architecture: Architecture, device: str, dtype: Any) -> Any:
    """With random weights, where it will run and as it will run: nothing is converted or moved afterwards."""
    from vivace.models.synthetic import build

    if device == "cpu":
        _check_room(name, architecture, dtype)
    return build(architecture, device, dtype)


def _check_room(name: str, architecture: Architecture, dtype: Any) -> None:
    """A machine that swaps is lost for minutes, and a system that kills says no word."""
    import psutil

    from vivace.models.synthetic import num_parameters

    number = sum(num_parameters(component) for component in architecture.components.values())
    wanted, free = number * dtype.itemsize, psutil.virtual_memory().available
    if wanted > free:
        raise Unsupported(
            f"{name} takes {wanted / 1e9:.1f} GB on a CPU, which runs fp32, and {free / 1e9:.1f} GB are free; run it "
            f"on a GPU, or take a smaller model"
        )


def _from_files(found: Found, dtype: Any) -> Any:
    import diffusers

    assert found.folder is not None
    given: dict[str, Any] = dict.fromkeys(found.without)
    if "safety_checker" in found.without:
        given["requires_safety_checker"] = False
    for name, path in found.components.items():
        given[name] = _load_component(found, name, path, dtype)
    if found.checkpoint is not None:
        kind = getattr(diffusers, found.pipeline)
        return kind.from_single_file(
            str(found.checkpoint), config=str(found.folder), dtype=dtype, local_files_only=True, **given
        )
    return diffusers.DiffusionPipeline.from_pretrained(
        str(found.folder),
        dtype=dtype,
        variant=found.variant,
        local_files_only=True,
        use_safetensors=True,
        **given,
    )


def _load_component(found: Found, name: str, path: Path, dtype: Any) -> Any:
    """A model from its folder or from a single file, of a class that must be one of diffusers' own."""
    import diffusers

    assert found.folder is not None
    if path.is_dir():
        class_name = component_class(path)
        where = path / "config.json"
    else:
        class_name = components_of(read_config(found.folder / INDEX))[name][1]
        where = found.folder / INDEX
    kind = getattr(diffusers, class_name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ValueError(f"{where} names {class_name!r}, which is no model class of diffusers")
    model: Any = kind
    if path.is_file():
        stored: dict[str, Any] = {}
        if path.suffix == SUFFIX:
            # Weights stay as they are stored, and each layer widens its own in each call.
            stored["quantization_config"] = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
        return model.from_single_file(
            str(path), config=str(found.folder), subfolder=name, dtype=dtype, local_files_only=True, **stored
        )
    variant = "fp16" if any(path.glob("*.fp16.safetensors")) else None
    return model.from_pretrained(
        str(path), dtype=dtype, variant=variant, local_files_only=True, use_safetensors=True
    )


def _set_scheduler(pipe: Any, scheduler: Sampler) -> None:
    import diffusers

    kind = getattr(diffusers, scheduler.class_name)
    pipe.register_modules(scheduler=kind.from_config(pipe.scheduler.config, **scheduler.overrides))


@contextlib.contextmanager
def _explained(found: Found) -> Iterator[None]:
    """What the libraries raise for files that they cannot read, as one of ours; too little memory stays what it is."""
    import torch

    try:
        yield
    except _UNREADABLE as error:
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in reason:
            raise
        raise UnusableModel(f"{found.model.name} does not load as a {found.pipeline}: {reason}") from error


def precision(found: Found, device: str) -> str:
    """What the model is loaded in: "fp32", "fp16" or "bf16"."""
    if device != "cuda":
        return "fp32"
    if found.entry is not None:
        return found.entry.cuda_dtype
    assert found.folder is not None
    largest = max(found.weights, key=lambda path: path.stat().st_size)
    stored = main_dtype(largest)
    if stored in ("F16", "BF16"):
        return {"F16": "fp16", "BF16": "bf16"}[stored]
    # UNets are made to run in fp16; transformers and their T5 overflow in it.
    return "bf16" if "transformer" in components_of(read_config(found.folder / INDEX)) else "fp16"


def _convert(component: Any, dtype: Any) -> None:
    """One precision for all: libraries disagree on what fp16 files on disk mean.

    But for parts that overflow in less than fp32 by their authors' own word (T5's output projections in fp16).
    """
    import torch

    kept: list[str] = []
    if dtype != torch.float32:
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            kept += getattr(component, attribute, None) or ()
    for name, parameter in component.named_parameters():
        is_kept = parameter.dtype == torch.float32 and any(part in name for part in kept)
        if parameter.is_floating_point() and parameter.dtype != dtype and not is_kept:
            parameter.data = parameter.data.to(dtype)


def tiny_vae_arguments(found: Found) -> tuple[str, ...]:
    """What `AutoencoderTiny.from_pretrained` takes for this model's tiny VAE; empty if there is none."""
    tiny = found.tiny_vae
    if isinstance(tiny, Path):
        return (f"WEIGHTS / {literal(tiny.name)}",)
    if isinstance(tiny, Part):
        return literal(tiny.repo), f"revision={literal(tiny.revision)}"
    return ()
