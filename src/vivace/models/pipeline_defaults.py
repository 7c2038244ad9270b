"""Default settings of a pipeline in a folder, from its own configuration and its class in diffusers, without importing
it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.architectures import pipeline_named
from vivace.architectures.calls import call_defaults
from vivace.architectures.family import OwnDefaults
from vivace.foundation.untrusted.files import read_json

_NATIVE_CELLS = 128  # latent cells per side of transformers without a configured size


def defaults_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return the default height, width, num_inference_steps and guidance_scale of a pipeline in a folder. The size
    comes from its configuration; of a pipeline that no family describes from its class, if that states one. Steps and
    guidance are the defaults of its class, or of a model of that class which its configuration tells from others."""
    call, own = call_defaults(class_name) or {}, _own_defaults(folder, class_name)
    guidance = call.get("guidance_scale") if own is None else own.guidance
    height, width = (
        call.get(side) if pipeline_named(class_name) is None else None for side in ("height", "width")
    )
    return {
        "height": height or _side(folder),
        "width": width or _side(folder),
        "num_inference_steps": call["num_inference_steps"] if own is None else own.steps,
        "guidance_scale": 1.0 if guidance is None else guidance,  # 1 is no guidance
    }


def _own_defaults(folder: Path, class_name: str) -> OwnDefaults | None:
    """Return the settings of a model that differs from others of its class; None if it does not."""
    known = pipeline_named(class_name)
    for own in () if known is None else known.own_defaults:
        config = read_config(folder / own.file)
        if own.key in config and config[own.key] == own.value:
            return own
    return None


def call_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return extra call arguments: the length to which FLUX's pipelines pad, unless T5's tokenizer asks for less."""
    known = pipeline_named(class_name)
    if known is None or known.max_text_length is None:
        return {}
    length = read_config(folder / "tokenizer_2" / "tokenizer_config.json").get("model_max_length")
    own = _own_defaults(folder, class_name)
    longest = known.max_text_length if own is None else own.max_text_length or known.max_text_length
    if isinstance(length, int) and length < longest:
        return {"max_sequence_length": length}
    return {"max_sequence_length": longest} if own is not None else {}


def _side(folder: Path) -> int:
    denoiser = read_config(folder / "unet" / "config.json") or read_config(
        folder / "transformer" / "config.json"
    )
    vae = read_config(folder / "vae" / "config.json")
    cells, pixels = denoiser.get("sample_size"), vae.get("sample_size")
    levels = vae.get("block_out_channels") or vae.get("encoder_block_out_channels")
    factor = 2 ** min(len(levels) - 1, 10) if isinstance(levels, list) and levels else 8
    # FLUX-like transformers have no configured size, and their pipelines default to 128 cells per side; the VAE's
    # size is better.
    unstated = pixels if isinstance(pixels, int) else _NATIVE_CELLS * factor
    return cells * factor if isinstance(cells, int) else unstated


def read_config(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if that is not possible."""
    try:
        content = read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
