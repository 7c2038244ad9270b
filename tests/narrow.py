"""Published architectures with a tenth of their channels, small enough to run on a CPU.

Run as a script it is a worker process whose every architecture is small.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vivace.architectures import ARCHITECTURES, CATALOGUE, family_of_model
from vivace.architectures.components import Architecture, ComponentConfig
from vivace.architectures.entry import Entry
from vivace.architectures.family import Family
from vivace.architectures.flux import FLUX
from vivace.architectures.sd3 import SD3
from vivace.architectures.stable_diffusion import STABLE_DIFFUSION
from vivace.benchmark import studies

SIDE = 128
COMMAND = (sys.executable, __file__)
FLOW = [name for name in ARCHITECTURES if family_of_model(name) not in (FLUX, STABLE_DIFFUSION)]
"""Names of the transformers after FLUX.1."""
_CLIP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "projection_dim": 64,
    "vocab_size": 1000,
}
_LANGUAGE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
_VISION = {
    "num_hidden_layers": 1,
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_heads": 4,
    "num_attention_heads": 4,
    "out_hidden_size": 64,
}
_MARKS = {
    "vision_start_token_id": 996,
    "vision_end_token_id": 997,
    "image_token_id": 998,
    "video_token_id": 999,
}
"""Ids of a vocabulary of 1000 that stand for images."""
_DC: dict[str, Any] = {
    f"{part}_block_out_channels": [16, 16, 32, 32, 64, 64] for part in ("encoder", "decoder")
}
_NARROW: dict[str, dict[str, Any]] = {
    "AutoencoderKL": {"block_out_channels": [32, 32, 64, 64]},
    "AutoencoderKLFlux2": {"block_out_channels": [32, 32, 64, 64]},
    "AutoencoderDC": _DC | {"attention_head_dim": 16},
    "AutoencoderKLQwenImage": {"base_dim": 16},
    "AutoencoderKLQwenImage21": {"base_dim": 16, "decoder_base_dim": 16},
    "CLIPTextModel": _CLIP,
    "CLIPTextModelWithProjection": _CLIP,
    "T5EncoderModel": {"d_model": 128, "d_kv": 16, "d_ff": 320, "num_heads": 8, "vocab_size": 1000},
    "ChromaTransformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 128,
        "axes_dims_rope": [8, 12, 12],
        "approximator_hidden_dim": 64,
    },
    "CogView4Transformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "text_embed_dim": 64,
        "time_embed_dim": 64,
    },
    "ErnieImageTransformer2DModel": {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 256,
        "text_in_dim": 64,
        "rope_axes_dim": [8, 12, 12],
    },
    "FluxTransformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "joint_attention_dim": 128,
        "pooled_projection_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "Flux2Transformer2DModel": {
        "attention_head_dim": 32,
        "axes_dims_rope": [8, 8, 8, 8],
        "num_attention_heads": 2,
        "joint_attention_dim": 192,
    },
    "Ideogram4Transformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "intermediate_size": 128,
        "adaln_dim": 32,
        "llm_features_dim": 832,
        "mrope_section": [6, 5, 5],
    },
    "Krea2Transformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "axes_dims_rope": [8, 12, 12],
        "text_hidden_dim": 64,
        "text_num_attention_heads": 4,
        "text_num_key_value_heads": 4,
        "text_intermediate_size": 128,
    },
    "LongCatImageTransformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "pooled_projection_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "OvisImageTransformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "QwenImageTransformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "joint_attention_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "QwenImage21Transformer2DModel": {
        "attention_head_dim": 32,
        "num_attention_heads": 2,
        "context_in_dim": 64,
        "axes_dims_rope": [8, 12, 12],
    },
    "SanaTransformer2DModel": {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 64,
        "caption_channels": 64,
        "sample_size": 16,
    },
    "SD3Transformer2DModel": {
        "attention_head_dim": 16,
        "num_attention_heads": 4,
        "caption_projection_dim": 64,
        "joint_attention_dim": 128,
        "pooled_projection_dim": 128,
        "pos_embed_max_size": 32,
        "sample_size": 16,
    },
    "ZImageTransformer2DModel": {
        "dim": 64,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 64,
        "axes_dims": [8, 12, 12],
    },
}
"""Changed arguments of networks, by class; others are UNets and language models."""
_FEW: dict[str, dict[str, Any]] = {
    "AutoencoderDC": {f"{part}_layers_per_block": [1] * 6 for part in ("encoder", "decoder")},
    "AutoencoderKLQwenImage": {"num_res_blocks": 1},
    "AutoencoderKLQwenImage21": {"num_res_blocks": 1},
    "T5EncoderModel": {"num_layers": 1},
    "GlmModel": {"num_hidden_layers": 2, "pad_token_id": None},
    "Qwen3Model": {"num_hidden_layers": 2},
    "ChromaTransformer2DModel": {"num_layers": 1, "num_single_layers": 2, "approximator_layers": 2},
    "CogView4Transformer2DModel": {"num_layers": 2},
    "ErnieImageTransformer2DModel": {"num_layers": 2},
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "Ideogram4Transformer2DModel": {"num_layers": 2},
    "Krea2Transformer2DModel": {
        "num_layers": 2,
        "num_layerwise_text_blocks": 1,
        "num_refiner_text_blocks": 1,
    },
    "LongCatImageTransformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "OvisImageTransformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "QwenImageTransformer2DModel": {"num_layers": 2},
    "QwenImage21Transformer2DModel": {"num_layers": 2},
    "SanaTransformer2DModel": {"num_layers": 2},
    "SD3Transformer2DModel": {"num_layers": 2},
    "ZImageTransformer2DModel": {"n_layers": 2, "n_refiner_layers": 1},
}
_READS_FIXED_LAYERS = ("FLUX.2", "Krea 2", "Ideogram 4")
"""Families whose pipelines read the states of some layers of a language model, the last of them the 27th to 35th."""


def network(model: str, name: str = "transformer") -> ComponentConfig:
    """Return one of the networks of a published model."""
    return ARCHITECTURES[model].components[name]


def _family(name: str) -> Family:
    family = family_of_model(name)
    assert family is not None
    return family


def _narrow_denoiser(unet: ComponentConfig) -> dict[str, Any]:
    if unet.class_name in _NARROW:
        return _NARROW[unet.class_name]
    if "addition_embed_type" not in unet.config:
        return {"block_out_channels": [64, 64, 128, 128], "cross_attention_dim": 64}
    return {
        "block_out_channels": [64, 64, 128],
        "attention_head_dim": [2, 2, 4],
        "cross_attention_dim": 128,
        "addition_time_embed_dim": 32,
        "projection_class_embeddings_input_dim": 64 + 6 * 32,
    }


def _narrow_language_model(component: ComponentConfig) -> dict[str, Any]:
    """Return the arguments with another language model and, of one that sees, a vision tower of one layer."""
    config, is_qwen25 = component.config, component.class_name.startswith("Qwen2_5")
    if "text_config" not in config:
        return _LANGUAGE
    text = {name: value for name, value in _LANGUAGE.items() if name != "head_dim" or not is_qwen25}
    if "mrope_section" in config["text_config"].get("rope_parameters", {}):
        section = [2, 3, 3] if is_qwen25 else [4, 2, 2]
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": section}
    vision = config["vision_config"] | _VISION
    if component.class_name.startswith("Qwen3"):
        vision["deepstack_visual_indexes"] = [0]
    marks = _MARKS if component.class_name.startswith("Qwen") else {}
    return {"text_config": config["text_config"] | text, "vision_config": vision} | marks


def narrow(name: str) -> Architecture:
    """Return an architecture with the same blocks and at most a tenth of the channels."""
    architecture = ARCHITECTURES[name]
    changed = {
        part: _narrow_denoiser(component)
        if _is_denoiser(part)
        else _NARROW.get(component.class_name) or _narrow_language_model(component)
        for part, component in architecture.components.items()
    }
    return architecture.changed(**changed)


def _is_denoiser(part: str) -> bool:
    """Whether a component is one of the denoiser's class; Ideogram 4 has two."""
    return part == "unet" or part.endswith("transformer")


def _few_blocks(name: str, part: str, component: ComponentConfig) -> dict[str, Any]:
    if _is_denoiser(part):
        few = _FEW.get(component.class_name, {"layers_per_block": 1}) | {}
        if "transformer_layers_per_block" in component.config:
            few["transformer_layers_per_block"] = [1, 1, 1]
        return few | ({"dual_attention_layers": [0]} if "dual_attention_layers" in component.config else {})
    if part.startswith("text_encoder") and _family(name).name in _READS_FIXED_LAYERS:
        return {}
    if "text_config" in component.config:
        return {"text_config": component.config["text_config"] | {"num_hidden_layers": 1}}
    layers = 2 if _family(name) is SD3 else 1
    usual = {"num_hidden_layers": layers} if part.startswith("text_encoder") else {"layers_per_block": 1}
    return _FEW.get(component.class_name, usual)


def small(name: str) -> Architecture:
    """Return a narrow architecture with as few blocks as its kind allows."""
    architecture = narrow(name)
    return architecture.changed(
        **{part: _few_blocks(name, part, each) for part, each in architecture.components.items()}
    )


def shallow(name: str) -> Architecture:
    """Return an architecture of the published width with fewer blocks: predictions trace every block, and depend on the
    width."""
    architecture = ARCHITECTURES[name]
    if architecture.pipeline == "FluxPipeline":
        return architecture.changed(transformer={"num_layers": 2, "num_single_layers": 4})
    if architecture.pipeline == "StableDiffusionXLPipeline":
        text = {"num_hidden_layers": 2}
        unet = {"transformer_layers_per_block": [1, 1, 2]}
        return architecture.changed(unet=unet, text_encoder=text, text_encoder_2=text)
    return architecture


def small_areas() -> Iterator[tuple[Any, str, Any]]:
    """Yield what lets Qwen-Image-Edit read images of SIDE pixels: module, attribute, and value.

    It reads a megapixel, which takes a CPU a minute.
    """
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus

    for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
        small = functools.partial(_of_a_small_area, module.calculate_dimensions)
        yield module, "calculate_dimensions", small


def _of_a_small_area(of_a_megapixel: Any, area: float, ratio: float) -> Any:
    return of_a_megapixel(area * (SIDE / 1024) ** 2, ratio)


def small_models() -> tuple[dict[str, Architecture], dict[str, Entry]]:
    """Return small architectures, and their catalogue entries with images of SIDE pixels and at most two steps."""
    entries = {
        name: CATALOGUE[name].model_copy(
            update={
                "height": SIDE,
                "width": SIDE,
                "num_inference_steps": min(2, CATALOGUE[name].num_inference_steps),
                "threads": 1,
            }
        )
        for name in ARCHITECTURES
    }
    return {name: small(name) for name in ARCHITECTURES}, entries


def make_all_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every architecture small, in this process and in the workers that it starts."""
    architectures, entries = small_models()
    for name in architectures:
        monkeypatch.setitem(ARCHITECTURES, name, architectures[name])
        monkeypatch.setitem(CATALOGUE, name, entries[name])
    for small_area in small_areas():
        monkeypatch.setattr(*small_area)
    monkeypatch.setattr(studies, "start_launcher", functools.partial(studies.start_launcher, worker=COMMAND))
    torch.set_num_threads(1)


def set_up() -> None:
    """Make every architecture small, in this process."""
    architectures, entries = small_models()
    ARCHITECTURES.update(architectures)
    CATALOGUE.update(entries)
    for small_area in small_areas():
        setattr(*small_area)


if __name__ == "__main__":
    set_up()
    from vivace.benchmark.rounds.worker import main

    main()
