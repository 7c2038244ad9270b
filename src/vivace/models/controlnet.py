"""ControlNets: from a folder in diffusers' format, or with random weights for time and memory alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import UnusableModel, WorkloadError
from vivace.foundation.untrusted.files import reading, user_path
from vivace.machinery.technique import component_of
from vivace.models.bounds import check_files, check_places
from vivace.models.headers import check_whole
from vivace.models.model_files import component_class, files_of, fingerprint
from vivace.models.quiet import quiet

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

RANDOM = "random"
"""Name of a ControlNet with random weights of the usual size: its images show nothing of the control."""
_CLASSES = {"unet": "ControlNetModel", "transformer": "FluxControlNetModel"}
_FLUX_BLOCKS = {"num_layers": 4, "num_single_layers": 10}
"""Blocks of diffusers' `FluxControlNetModel.from_transformer`, at most those of the transformer."""
_SPREAD = 0.02
"""Standard deviation of the layers that are zero before training; with zeros a ControlNet changes nothing."""


def find_controlnet(name: str | None) -> str:
    """Return a ControlNet's identity, FOLDER@FINGERPRINT of its files, or RANDOM for none.

    Raises:
        WorkloadError: there is no such folder.
        UnusableModel: it holds no ControlNet in safetensors format.
    """
    if name is None or name == RANDOM:
        return RANDOM
    folder = user_path(name)
    if not folder.is_dir():
        raise WorkloadError(
            f"--controlnet {name}: there is no such folder; download the ControlNet's repository, and give its folder"
        )
    folder = folder.resolve()
    check_places(folder, ())
    files = files_of(folder)
    weights = [file for file in files if file.endswith(".safetensors")]
    if "config.json" not in files or not weights:
        raise UnusableModel(f"{name} has no config.json with safetensors; give a ControlNet's folder")
    check_files(folder, ["config.json"], weights, name)
    with reading(name):
        kind = component_class(folder)
    if kind not in _CLASSES.values():
        raise UnusableModel(f"{name} holds a {kind}; give a {' or a '.join(_CLASSES.values())}")
    return f"{folder}@{fingerprint(files)}"


def controlnet_for(pipe: DiffusionPipeline, identity: str) -> Any:
    """Return a ControlNet for a pipeline's denoiser, on its device and in its dtype.

    Args:
        identity: as `find_controlnet` returns it.

    Raises:
        UnusableModel: it is of another architecture, or its files were changed.
    """
    denoiser = component_of(pipe, "denoiser")
    if identity == RANDOM:
        return _random(denoiser)
    import diffusers

    folder, _, expected = identity.rpartition("@")
    if fingerprint(files_of(Path(folder))) != expected:
        raise UnusableModel(f"the files of {folder} changed since it was found; run the command again")
    attribute = "unet" if hasattr(denoiser, "up_blocks") else "transformer"
    kind = component_class(Path(folder))
    if kind != _CLASSES[attribute]:
        raise UnusableModel(f"{folder} holds a {kind}, and this model takes a {_CLASSES[attribute]}")
    check_whole(Path(folder).glob("*.safetensors"))
    chosen: Any = getattr(diffusers, kind)
    with quiet(), reading(folder):
        made = chosen.from_pretrained(
            folder, dtype=denoiser.dtype, local_files_only=True, use_safetensors=True
        )
    return made.eval().requires_grad_(False).to(denoiser.device)


def _random(denoiser: torch.nn.Module) -> Any:
    """Return a ControlNet that is a copy of the denoiser, as before training, with disturbed zero layers."""
    import diffusers
    import torch

    with quiet(), warnings.catch_warnings(), torch.device(denoiser.device), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers warns about its own code
        if hasattr(denoiser, "up_blocks"):
            made = diffusers.ControlNetModel.from_unet(denoiser)
        else:
            config: Any = denoiser.config
            blocks = {name: min(number, config[name]) for name, number in _FLUX_BLOCKS.items()}
            made = diffusers.FluxControlNetModel.from_transformer(
                denoiser,
                **blocks,
                attention_head_dim=config.attention_head_dim,
                num_attention_heads=config.num_attention_heads,
            )
        made.to(denoiser.dtype).eval().requires_grad_(False)
        if denoiser.device.type != "meta":
            generator = torch.Generator(denoiser.device).manual_seed(0)
            for parameter in made.parameters():
                if not parameter.any():
                    parameter.normal_(0.0, _SPREAD, generator=generator)
    return made
