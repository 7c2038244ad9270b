"""Users' own files: headers that are those of models, with next to no weights."""

import json
import struct
from pathlib import Path

import torch
from safetensors.torch import save_file

from vivace.runtime.memory.weightless import find_weightless

UNET, FLUX = "model.diffusion_model.input_blocks.0.0.weight", "double_blocks.0.img_attn.norm.key_norm.scale"


def write_sdxl(folder: Path) -> Path:
    names = (
        "conditioner.embedders.1.model.positional_embedding",
        UNET,
        "first_stage_model.decoder.conv_in.weight",
    )
    save_file(
        {name: torch.zeros(8, 4, 3, 3, dtype=torch.float16) for name in names}, folder / "mine.safetensors"
    )
    return folder / "mine.safetensors"


def write_fp8(folder: Path) -> Path:
    tensors = {FLUX: torch.zeros(1).half(), "guidance_in.in_layer.weight": torch.zeros(1).half()}
    tensors["img_in.weight"] = torch.zeros(3072, 64).to(torch.float8_e4m3fn)
    save_file(tensors, folder / "flux-fp8.safetensors")
    return folder / "flux-fp8.safetensors"


def write_gguf(folder: Path) -> Path:
    """The header of a FLUX.1 [dev] in Q8_0 of about 12 GB."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    tensors = [
        (FLUX, (128,), 0),
        ("guidance_in.in_layer.weight", (3072, 256), 8),
        ("img_in.weight", (3072, 64), 8),
    ]
    tensors.append(("double_blocks.0.img_mlp.0.weight", (1_000_000, 11_200), 8))
    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 1) + text("general.architecture")
    data += struct.pack("<I", 8) + text("flux")
    for name, shape, kind in tensors:
        sizes = b"".join(struct.pack("<Q", length) for length in reversed(shape))
        data += text(name) + struct.pack("<I", len(shape)) + sizes + struct.pack("<IQ", kind, 0)
    (folder / "flux.gguf").write_bytes(data)
    return folder / "flux.gguf"


def write_folder(folder: Path) -> Path:
    """A folder of SDXL in diffusers' format, with its configuration alone."""
    model = folder / "sdxl"
    (model / "unet").mkdir(parents=True)
    index = {"_class_name": "StableDiffusionXLPipeline", "unet": ["diffusers", "UNet2DConditionModel"]}
    (model / "model_index.json").write_text(json.dumps(index))
    config = find_weightless("sdxl").build().unet.config
    (model / "unet" / "config.json").write_text(json.dumps(dict(config)))
    return model


def write_unet(folder: Path) -> Path:
    """A UNet of SDXL alone, as trainers write it."""
    names = (
        "input_blocks.0.0.weight",
        "input_blocks.4.1.transformer_blocks.0.attn2.to_k.weight",
        "label_emb.0.0.weight",
    )
    shapes = ((320, 4, 3, 3), (640, 2048), (1280, 2816))
    tensors = {
        f"model.diffusion_model.{name}": torch.zeros(shape, dtype=torch.float16)
        for name, shape in zip(names, shapes, strict=True)
    }
    save_file(tensors, folder / "sdxl-unet.safetensors")
    return folder / "sdxl-unet.safetensors"
