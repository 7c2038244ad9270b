"""Text-to-image pipelines of diffusers and their default settings, from their own configuration.

Read without torch and diffusers, which take seconds to import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vivace.foundation.untrusted.files import read_json

# Default steps and guidance of each class's __call__; a test compares them with the installed diffusers. None: the
# class has no such argument, or its default is not a number.
TEXT_TO_IMAGE: dict[str, tuple[int, float | None]] = {
    "AmusedPipeline": (12, 10.0),
    "AuraFlowPipeline": (50, 3.5),
    "BriaFiboPipeline": (30, 5.0),
    "BriaPipeline": (30, 5.0),
    "ChromaPipeline": (35, 5.0),
    "CogView3PlusPipeline": (50, 5.0),
    "CogView4Pipeline": (50, 5.0),
    "Cosmos2TextToImagePipeline": (35, 7.0),
    "ErnieImagePipeline": (50, 4.0),
    "Flux2KleinPipeline": (50, 4.0),
    "Flux2Pipeline": (50, 4.0),
    "FluxPipeline": (28, 3.5),
    "GlmImagePipeline": (50, 1.5),
    "HiDreamImagePipeline": (50, 5.0),
    "HunyuanDiTPAGPipeline": (50, 5.0),
    "HunyuanDiTPipeline": (50, 5.0),
    "HunyuanImagePipeline": (50, None),
    "IFPipeline": (100, 7.0),
    "Ideogram4Pipeline": (48, None),
    "Kandinsky3Pipeline": (25, 3.0),
    "Kandinsky5T2IPipeline": (50, 3.5),
    "KandinskyCombinedPipeline": (100, 4.0),
    "KandinskyV22CombinedPipeline": (100, 4.0),
    "Krea2Pipeline": (28, 4.5),
    "LatentConsistencyModelPipeline": (4, 8.5),
    "LongCatImagePipeline": (50, 4.5),
    "Lumina2Pipeline": (30, 4.0),
    "LuminaPipeline": (30, 4.0),
    "NucleusMoEImagePipeline": (50, 4.0),
    "OmniGenPipeline": (50, 2.5),
    "OvisImagePipeline": (50, 5.0),
    "PRXPipeline": (28, 4.0),
    "PRXPixelPipeline": (28, 4.0),
    "PixArtAlphaPipeline": (20, 4.5),
    "PixArtSigmaPAGPipeline": (20, 4.5),
    "PixArtSigmaPipeline": (20, 4.5),
    "QwenImage21Pipeline": (40, None),
    "QwenImagePipeline": (50, None),
    "SanaPAGPipeline": (20, 4.5),
    "SanaPipeline": (20, 4.5),
    "SanaSprintPipeline": (2, 4.5),
    "StableCascadeCombinedPipeline": (12, None),
    "StableDiffusion3PAGPipeline": (28, 7.0),
    "StableDiffusion3Pipeline": (28, 7.0),
    "StableDiffusionPAGPipeline": (50, 7.5),
    "StableDiffusionPipeline": (50, 7.5),
    "StableDiffusionSAGPipeline": (50, 7.5),
    "StableDiffusionXLPAGPipeline": (50, 5.0),
    "StableDiffusionXLPipeline": (50, 5.0),
    "WuerstchenCombinedPipeline": (12, None),
    "ZImagePipeline": (50, 5.0),
}
# Pipelines whose weights are trained to edit an image, likewise.
EDITING: dict[str, tuple[int, float | None]] = {
    "FluxKontextPipeline": (28, 3.5),
    "QwenImageEditPipeline": (50, None),
    "QwenImageEditPlusPipeline": (50, None),
}
# Steps and guidance of models that their own configuration tells from others of their class: a value in a file.
_VARIANTS: tuple[tuple[str, str, str, object, int, float], ...] = (
    ("FluxPipeline", "transformer/config.json", "guidance_embeds", False, 4, 0.0),  # FLUX.1 [schnell]
    *(
        ("StableDiffusionXLPipeline", "scheduler/scheduler_config.json", "_class_name", name, 50, 3.0)
        for name in ("EDMDPMSolverMultistepScheduler", "EDMEulerScheduler")  # Playground v2.5
    ),
)
_SCHNELL_SEQUENCE_LENGTH = 256
_FLUX_SEQUENCE_LENGTH = 512  # FluxPipeline's own max_sequence_length
_NATIVE_CELLS = 128  # latent cells per side of transformers without a configured size
# Trained at another size than their configuration says.
_SIDES = {"AuraFlowPipeline": 1024, "StableCascadeCombinedPipeline": 1024, "WuerstchenCombinedPipeline": 512}


def defaults_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return the default height, width, num_inference_steps and guidance_scale of a pipeline in a folder.

    The size comes from its configuration; steps and guidance are the defaults of its class, or of a model of that class
    which its configuration tells from others.
    """
    steps, guidance = _variant(folder, class_name) or (TEXT_TO_IMAGE | EDITING)[class_name]
    side = _SIDES.get(class_name) or _side(folder)
    return {
        "height": side,
        "width": side,
        "num_inference_steps": steps,
        "guidance_scale": 1.0 if guidance is None else guidance,  # 1 is no guidance
    }


def _variant(folder: Path, class_name: str) -> tuple[int, float] | None:
    """Return steps and guidance of a model that differs from its class; None if it does not."""
    for kind, file, key, value, steps, guidance in _VARIANTS:
        config = read_config(folder / file) if kind == class_name else {}
        if key in config and config[key] == value:
            return steps, guidance
    return None


def call_of(folder: Path, class_name: str) -> dict[str, Any]:
    """Return extra call arguments: FLUX's pipelines pad to 512 tokens, unless the T5 tokenizer asks for fewer."""
    if class_name not in ("FluxPipeline", "FluxKontextPipeline"):
        return {}
    length = read_config(folder / "tokenizer_2" / "tokenizer_config.json").get("model_max_length")
    is_schnell = _variant(folder, class_name) is not None
    longest = _SCHNELL_SEQUENCE_LENGTH if is_schnell else _FLUX_SEQUENCE_LENGTH
    if isinstance(length, int) and length < longest:
        return {"max_sequence_length": length}
    return {"max_sequence_length": longest} if is_schnell else {}


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
