"""Identify a published file of weights by tensors that it has, never by missing ones. Names are those of the authors'
own files, of ComfyUI's `model_detection.py` and of diffusers' `single_file_utils.py`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vivace.architectures import FAMILIES, Family
from vivace.architectures.family import Signature, refuse
from vivace.architectures.others import CONFUSABLE, OTHERS
from vivace.errors import UnusableModel

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "pipe.dit.", "")
"""Prefixes that tools write before the names of a denoiser's tensors; "net." is NVIDIA's, "pipe.dit." DiffSynth's."""
_SUPPORTED = [name for family in FAMILIES if family.files for name in family.files.supported]
SUPPORTED = f"supported are single files of {', '.join(_SUPPORTED[:-1])} and {_SUPPORTED[-1]}"
_FOLDER = f"give it as a folder in diffusers' format, or as org/repo of the hub ({SUPPORTED})"
_REST = (
    "give the file that holds the whole model, or a folder in diffusers' format with all parts ({supported})"
)
_QUANTISED = (
    "vivace reads no weights that another tool quantised, except fp8, ComfyUI's nvfp4 and mxfp8, and GGUF; give the "
    "model in 16 bits, and quantise it with a recipe: quantize(int8), quantize(fp8) or quantize(nf4)"
)
_WITH_MODEL = "give the model that it belongs to ({supported})"
_FIRST = "input_blocks.0.0.weight"
_FLUX = "double_blocks.0.img_attn.norm.key_norm.scale"

_NO_MODELS: tuple[Signature, ...] = (
    # Weights that are codes. Nunchaku's files also have tensors that are called lora_down.
    *refuse(
        _QUANTISED,
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.wscales",)),
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.qweight", "*.proj_down")),
        ("a model that was quantised with SVDQuant for Nunchaku", ("*.qweight", "*.smooth_factor")),
        ("a model that was quantised with bitsandbytes (nf4 or fp4)", ("*.quant_state.bitsandbytes__*",)),
        ("a model that was quantised with bitsandbytes (nf4 or fp4)", ("*.absmax",)),
        ("a model that was quantised with bitsandbytes (int8)", ("*.SCB",)),
        ("a model that was quantised with AWQ or GPTQ", ("*.qweight",)),
        ("a model that was quantised with optimum-quanto", ("*.weight._data",)),
        ("a model that was quantised with torchao", ("*.weight.qdata",)),
        ("a model that was quantised with torchao", ("*._weight_qdata",)),
    ),
    # What goes beside a model; its names contain those of the model.
    *refuse(
        "give the model and the LoRA as two files: --recipe 'lora(FILE)' ({supported})",
        ("a model with a LoRA beside its weights, which is not merged into them", (_FIRST, "*lora_*")),
        ("a model with a LoRA beside its weights, which is not merged into them", (_FLUX, "*lora_*")),
    ),
    *refuse(
        "give it as a recipe for its model: lora(FILE) ({supported})",
        ("a LoRA, not a model", ("*lora_*",)),
        ("a LoRA, not a model", ("*.lora.*",)),
        ("a LoRA (LoKr), not a model", ("*lokr_*",)),
        ("a LoRA (LoHa), not a model", ("*hada_w*",)),
        ("a LoRA (OFT), not a model", ("*.oft_*",)),
        ("a LoRA (full differences), not a model", ("*.diff",)),
    ),
    *refuse(
        "give the model that it belongs to ({supported}); a ControlNet is an option beside it: --controlnet FOLDER",
        ("a ControlNet, not a model", ("control_model.*",)),
        ("a ControlNet, not a model", ("input_hint_block.*",)),
        ("a ControlNet, not a model", ("controlnet_cond_embedding.*",)),
        ("a ControlNet, not a model", ("controlnet_blocks.*",)),
        ("a ControlNet, not a model", ("controlnet_down_blocks.*",)),
        ("a ControlNet, not a model", ("control_layers.*",)),
        ("a ControlNet, not a model", ("control_all_x_embedder.*",)),
        ("a ControlNet (LLLite), not a model", ("lllite_*",)),
        ("a T2I-Adapter, not a model", ("adapter.body.*",)),
        ("a T2I-Adapter, not a model", ("body.0.block1.weight",)),
    ),
)
_COMPONENTS: tuple[Signature, ...] = (
    *refuse(
        "one component in diffusers' layout; give the folder of the whole pipeline",
        ("a VAE", ("decoder.up_blocks.0.*", "decoder.mid_block.*")),
        ("a UNet", ("down_blocks.0.*", "mid_block.*")),
        ("a part of a UNet", ("down_blocks.*",)),
        ("a transformer", ("transformer_blocks.0.*",)),
    ),
    # Other parts.
    *refuse(
        _WITH_MODEL,
        ("an IP-Adapter, not a model", ("ip_adapter.*",)),
        ("an IP-Adapter, not a model", ("image_proj.*",)),
        ("an embedding (textual inversion), not a model", ("emb_params",)),
        ("an embedding (textual inversion), not a model", ("string_to_param.*",)),
        ("an embedding (textual inversion), not a model", ("clip_g", "clip_l")),
        ("a safety checker, not a model", ("concept_embeds",)),
        ("an upscaler's network, not a model", ("body.0.rdb1.conv1.weight",)),
        ("an upscaler's network, not a model", ("model.1.sub.0.*",)),
    ),
    *refuse(
        _REST,
        ("a VAE alone (a deep-compression autoencoder)", ("decoder.stages.*",)),
        ("a VAE alone", ("first_stage_model.*",)),
        ("a VAE alone", ("decoder.*",)),
        ("a VAE alone", ("vae.*",)),
        ("a text encoder alone (CLIP)", ("text_model.*",)),
        ("a text encoder alone (T5)", ("encoder.block.*",)),
        ("a text encoder alone (OpenCLIP)", ("transformer.resblocks.0.*",)),
        ("a text encoder alone", ("cond_stage_model.*",)),
        ("a text encoder alone", ("conditioner.*",)),
        ("a text encoder alone", ("text_encoders.*",)),
        ("an image encoder alone (CLIP)", ("vision_model.*",)),
        ("a language model, such as the text encoder of some model, alone", ("model.embed_tokens.weight",)),
        ("a language model, such as the text encoder of some model, alone", ("model.language_model.*",)),
        ("a language model in llama.cpp's layout alone", ("token_embd.weight",)),
    ),
)


class TensorNames:
    """The names of a file's tensors, without their denoiser's prefix."""

    def __init__(self, names: Iterable[str]) -> None:
        """Strip the first of the denoiser's prefixes that any tensor has from the names in the file."""
        names = list(names)
        self.prefix = next(
            prefix for prefix in DENOISER_PREFIXES if any(name.startswith(prefix) for name in names)
        )
        self.own = {name.removeprefix(self.prefix): name for name in names}

    def has(self, pattern: str) -> bool:
        """Return whether a tensor has a name."""
        text = pattern.strip("*")
        if pattern.startswith("*") and pattern.endswith("*"):
            return any(text in name for name in self.own)
        if pattern.startswith("*"):
            return any(name.endswith(text) for name in self.own)
        if pattern.endswith("*"):
            return any(name.startswith(text) for name in self.own)
        return pattern in self.own


def _fits(row: Signature, names: TensorNames, tensors: Mapping[str, Any]) -> bool:
    return all(names.has(pattern) for pattern in row.has) and all(
        names.own.get(name) is not None and tensors[names.own[name]]["shape"][axis : axis + 1] == [length]
        for name, axis, length in row.sizes
    )


def signature_of(
    path: Path, names: TensorNames, tensors: Mapping[str, Any]
) -> tuple[Family | None, Signature] | None:
    """Return the signature that a file's tensors fit, and whose it is; None if they fit none."""

    def first(rows: Iterable[Signature]) -> Signature | None:
        return next((row for row in rows if _fits(row, names, tensors)), None)

    if (row := first((*_NO_MODELS, *CONFUSABLE))) is not None:
        return None, row
    rows = [(family, first(family.files.signatures)) for family in FAMILIES if family.files is not None]
    fitting = [(family, row) for family, row in rows if row is not None]
    contained = {name for family, _ in fitting if family.files for name in family.files.contains}
    fitting = [(family, row) for family, row in fitting if family.name not in contained]
    if len(fitting) > 1:
        what = " and ".join(f"of {family.name} ({', '.join(row.has)})" for family, row in fitting)
        raise UnusableModel(f"{path} has the tensors {what}, so it cannot be told which it is; {_FOLDER}")
    if fitting:
        return fitting[0]
    row = first((*OTHERS, *_COMPONENTS))
    return None if row is None else (None, row)


def advice_for(row: Signature) -> str:
    """Return what to do with a file that is refused."""
    return row.advice.format(folder=_FOLDER, supported=SUPPORTED) or _FOLDER
