"""ControlNets: from a folder in diffusers' format, or with random weights for time and memory alone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.architectures import FAMILIES, family_of
from vivace.architectures.family import ControlNets
from vivace.errors import UnusableModel, WorkloadError
from vivace.foundation.untrusted.files import reading, user_path
from vivace.machinery.technique import component_of
from vivace.models.bounds import check_files, check_places
from vivace.models.checkpoints.headers import check_whole
from vivace.models.model_files import component_class, files_of, fingerprint
from vivace.models.quiet import quiet

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

RANDOM = "random"
"""Name of a ControlNet with random weights of the usual size: its images show nothing of the control."""
_SPREAD = 0.02
"""Standard deviation of the layers that are zero before training; with zeros a ControlNet changes nothing."""


def find_controlnet(name: str | None) -> str:
    """Return a ControlNet's identity, FOLDER@FINGERPRINT of its files, or RANDOM for none."""
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
    classes = [family.controlnets.name for family in FAMILIES if family.controlnets is not None]
    if kind not in classes:
        raise UnusableModel(f"{name} holds a {kind}; give a {' or a '.join(classes)}")
    return f"{folder}@{fingerprint(files)}"


def controlnet_for(pipe: DiffusionPipeline, identity: str) -> Any:
    """Return a ControlNet for a pipeline's denoiser, on its device and in its dtype.

    Args:
        identity: as `find_controlnet` returns it.
    """
    denoiser = component_of(pipe, "denoiser")
    if identity == RANDOM:
        return _random(denoiser)
    import diffusers

    folder, _, expected = identity.rpartition("@")
    if fingerprint(files_of(Path(folder))) != expected:
        raise UnusableModel(f"the files of {folder} changed since it was found; run the command again")
    kind, wanted = component_class(Path(folder)), _controlnets(denoiser).name
    if kind != wanted:
        raise UnusableModel(f"{folder} holds a {kind}, and this model takes a {wanted}")
    check_whole(Path(folder).glob("*.safetensors"))
    chosen: Any = getattr(diffusers, kind)
    with quiet(), reading(folder):
        made = chosen.from_pretrained(
            folder, dtype=denoiser.dtype, local_files_only=True, use_safetensors=True
        )
    return made.eval().requires_grad_(False).to(denoiser.device)


def _controlnets(denoiser: torch.nn.Module) -> ControlNets:
    """Return what is known of a denoiser's ControlNets, which its pipeline for this task takes."""
    family = family_of(denoiser)
    assert family is not None
    assert family.controlnets is not None
    return family.controlnets


def _random(denoiser: torch.nn.Module) -> Any:
    """Return a ControlNet that is a copy of the denoiser, as before training, with disturbed zero layers."""
    import diffusers
    import torch

    with quiet(), warnings.catch_warnings(), torch.device(denoiser.device), torch.no_grad():
        warnings.simplefilter("ignore", FutureWarning)  # diffusers warns about its own code
        known = _controlnets(denoiser)
        made = getattr(getattr(diffusers, known.name), known.copy)(denoiser, **known.arguments(denoiser))
        made.to(denoiser.dtype).eval().requires_grad_(False)
        if denoiser.device.type != "meta":
            generator = torch.Generator(denoiser.device).manual_seed(0)
            for parameter in made.parameters():
                if not parameter.any():
                    parameter.normal_(0.0, _SPREAD, generator=generator)
    return made
