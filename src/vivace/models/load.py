"""Load a pipeline from its folder: safetensors only, never remote code, nothing from the network."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vivace.errors import UnknownModel
from vivace.models.files import component_class
from vivace.models.find import Found

# Read by diffusers when it is imported; closes custom-pipeline loading before every branch.
os.environ.setdefault("DIFFUSERS_DISABLE_REMOTE_CODE", "1")


def load_pipeline(found: Found, device: str) -> Any:
    """The diffusers pipeline as published, on `device` ("cpu" or "cuda"), in evaluation mode.

    CPUs run fp32, whatever the weights are stored in; a GPU runs the catalogue's precision.

    Raises:
        UnknownModel: the folder's files cannot be read as a pipeline.
    """
    import torch

    dtype = torch.float32
    if device == "cuda":
        names = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
        dtype = names[found.entry.cuda_dtype] if found.entry is not None else torch.float16
    with quiet():
        from diffusers import DiffusionPipeline

        try:
            own = {component.name: _load_component(component, dtype) for component in found.components}
            pipe = DiffusionPipeline.from_pretrained(
                str(found.folder), dtype=dtype, local_files_only=True, use_safetensors=True, **own
            )
        except (OSError, ValueError, KeyError, RuntimeError, ImportError, AttributeError, TypeError) as error:
            reason = str(error).strip().splitlines()
            raise UnknownModel(
                f"{found.folder} does not load as a diffusers pipeline: {reason[0] if reason else error!r}"
            ) from error
    for component in pipe.components.values():
        if isinstance(component, torch.nn.Module):
            # One precision for all: transformers and diffusers disagree on what fp16 files on disk mean.
            if any(p.is_floating_point() and p.dtype != dtype for p in component.parameters()):
                component.to(dtype)
            component.eval().requires_grad_(False)
    pipe.to(device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def _load_component(folder: Path, dtype: Any) -> Any:
    """A model by the class that its config names, which must be one of diffusers' own: no code from folders."""
    import diffusers

    name = component_class(folder)
    kind = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, diffusers.ModelMixin)):
        raise ValueError(f"{folder / 'config.json'} names {name!r}, which is no model class of diffusers")
    model: Any = kind
    return model.from_pretrained(str(folder), dtype=dtype, local_files_only=True, use_safetensors=True)


def load_tiny_vae(folder: Path) -> Any:
    """An AutoencoderTiny from a folder, fp32, on the CPU."""
    import torch

    with quiet():
        from diffusers import AutoencoderTiny

        vae = AutoencoderTiny.from_pretrained(
            str(folder), dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
    return vae.eval().requires_grad_(False)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Loading bars belong to vivace's own progress, and offline CPUs need no advice about GPUs."""
    import logging

    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    names = ("torchao", "transformers", "diffusers", "torch.utils._pytree")
    before = {name: logging.getLogger(name).level for name in names}
    bars = diffusers_logging.is_progress_bar_enabled()
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
        if bars:
            diffusers_logging.enable_progress_bar()
            transformers_logging.enable_progress_bar()
