"""Published architectures with a tenth of their channels, small enough to run on a CPU.

Run as a script it is a worker process whose every architecture is small.
"""

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vivace.architectures.entry import Entry
from vivace.benchmark import studies
from vivace.models.architectures import ARCHITECTURES, Architecture
from vivace.models.catalogue import CATALOGUE
from vivace.models.flow_architectures import FLOW_ARCHITECTURES

SIDE = 128
QWEN = ("QwenImagePipeline", "QwenImageEditPipeline", "QwenImageEditPlusPipeline")
COMMAND = (sys.executable, __file__)
FLOW = [architecture.name for architecture in FLOW_ARCHITECTURES]
"""Names of the transformers after FLUX.1."""
_CLIP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "projection_dim": 64,
    "vocab_size": 1000,
}
_VAE: dict[str, Any] = {"block_out_channels": [32, 32, 64, 64]}


_LANGUAGE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
}
_MARKS = {
    "vision_start_token_id": 996,
    "vision_end_token_id": 997,
    "image_token_id": 998,
    "video_token_id": 999,
}
"""Ids of a vocabulary of 1000 that stand for images."""
_FLUX2: dict[str, Any] = {"attention_head_dim": 32, "axes_dims_rope": [8, 8, 8, 8], "num_attention_heads": 2}
_T5: dict[str, Any] = {"d_model": 128, "d_kv": 16, "d_ff": 320, "num_heads": 8, "vocab_size": 1000}
_DC: dict[str, Any] = {
    f"{part}_block_out_channels": [16, 16, 32, 32, 64, 64] for part in ("encoder", "decoder")
} | {"attention_head_dim": 16}
_SANA: dict[str, dict[str, Any]] = {
    "transformer": {
        "num_attention_heads": 4,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 4,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 64,
        "caption_channels": 64,
        "sample_size": 16,
    },
    "vae": _DC,
    "text_encoder": _LANGUAGE,
}


def _with_text(name: str, **changed: Any) -> dict[str, Any]:
    """Return a multimodal model's config with another language model and a vision tower of one layer."""
    config = ARCHITECTURES[name].components["text_encoder"].config
    vision = {"num_hidden_layers": 1, "depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 4}
    narrowed = {"num_attention_heads": 4} | vision | {"out_hidden_size": 64}
    return {
        "text_config": config["text_config"] | changed,
        "vision_config": config["vision_config"] | narrowed,
    }


def _flow(name: str) -> dict[str, dict[str, Any]]:
    """Return the changed configs of a transformer after FLUX.1: at most a tenth of the channels, as many blocks."""
    pipeline = ARCHITECTURES[name].pipeline
    if pipeline == "StableDiffusion3Pipeline":
        return {
            "transformer": {
                "attention_head_dim": 16,
                "num_attention_heads": 4,
                "caption_projection_dim": 64,
                "joint_attention_dim": 128,
                "pooled_projection_dim": 128,
                "pos_embed_max_size": 32,
                "sample_size": 16,
            },
            "vae": _VAE,
            "text_encoder": _CLIP,
            "text_encoder_2": _CLIP,
            "text_encoder_3": _T5,
        }
    if pipeline in ("SanaPipeline", "SanaSprintPipeline"):
        return _SANA
    if pipeline == "ZImagePipeline":
        transformer = {"dim": 64, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 64, "axes_dims": [8, 12, 12]}
        return {"transformer": transformer, "vae": _VAE, "text_encoder": _LANGUAGE}
    if pipeline in QWEN:
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
        text = {name: value for name, value in _LANGUAGE.items() if name != "head_dim"}
        return {
            "transformer": {
                "attention_head_dim": 32,
                "num_attention_heads": 2,
                "joint_attention_dim": 64,
                "axes_dims_rope": [8, 12, 12],
            },
            "vae": {"base_dim": 16},
            "text_encoder": _with_text(name, **text, rope_parameters=rope) | _MARKS,
        }
    if pipeline == "QwenImage21Pipeline":
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
        text_encoder = _with_text(name, **_LANGUAGE, rope_parameters=rope) | _MARKS
        text_encoder["vision_config"]["deepstack_visual_indexes"] = [0]
        return {
            "transformer": {
                "attention_head_dim": 32,
                "num_attention_heads": 2,
                "context_in_dim": 64,
                "axes_dims_rope": [8, 12, 12],
            },
            "vae": {"base_dim": 16, "decoder_base_dim": 16},
            "text_encoder": text_encoder,
        }
    if pipeline == "Krea2Pipeline":
        rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 2, 2]}
        text_encoder = _with_text(name, **_LANGUAGE, rope_parameters=rope) | _MARKS
        text_encoder["vision_config"]["deepstack_visual_indexes"] = [0]
        return {
            "transformer": {
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
            "vae": {"base_dim": 16},
            "text_encoder": text_encoder,
        }
    if pipeline == "CogView4Pipeline":
        transformer = {"attention_head_dim": 32, "num_attention_heads": 2, "text_embed_dim": 64}
        return {"transformer": transformer | {"time_embed_dim": 64}, "vae": _VAE, "text_encoder": _LANGUAGE}
    if pipeline == "Flux2KleinPipeline":
        return {"transformer": _FLUX2 | {"joint_attention_dim": 192}, "vae": _VAE, "text_encoder": _LANGUAGE}
    return {
        "transformer": _FLUX2 | {"joint_attention_dim": 192},
        "vae": _VAE,
        "text_encoder": _with_text(name, **_LANGUAGE),
    }


def narrow(name: str) -> Architecture:
    """Return an architecture with the same blocks and at most a tenth of the channels."""
    architecture = ARCHITECTURES[name]
    if name in FLOW:
        return architecture.changed(**_flow(name))
    configs: dict[str, Any] = {"vae": _VAE, "text_encoder": _CLIP}
    if architecture.pipeline == "StableDiffusionPipeline":
        configs["unet"] = {"block_out_channels": [64, 64, 128, 128], "cross_attention_dim": 64}
    elif architecture.pipeline == "StableDiffusionXLPipeline":
        configs["text_encoder_2"] = _CLIP
        configs["unet"] = {
            "block_out_channels": [64, 64, 128],
            "attention_head_dim": [2, 2, 4],
            "cross_attention_dim": 128,
            "addition_time_embed_dim": 32,
            "projection_class_embeddings_input_dim": 64 + 6 * 32,
        }
    else:
        configs["text_encoder_2"] = _T5
        configs["transformer"] = {
            "attention_head_dim": 32,
            "num_attention_heads": 4,
            "joint_attention_dim": 128,
            "pooled_projection_dim": 64,
            "axes_dims_rope": [8, 12, 12],
        }
    return architecture.changed(**configs)


def small(name: str) -> Architecture:
    """Return a narrow architecture with as few blocks as its kind allows."""
    architecture = narrow(name)
    text = {"num_hidden_layers": 1}
    if name in FLOW:
        return architecture.changed(**_few_blocks(name))
    if architecture.pipeline in ("FluxPipeline", "FluxKontextPipeline"):
        return architecture.changed(
            transformer={"num_layers": 1, "num_single_layers": 2},
            vae={"layers_per_block": 1},
            text_encoder=text,
            text_encoder_2={"num_layers": 1},
        )
    if architecture.pipeline == "StableDiffusionPipeline":
        return architecture.changed(
            unet={"layers_per_block": 1}, vae={"layers_per_block": 1}, text_encoder=text
        )
    return architecture.changed(
        unet={"layers_per_block": 1, "transformer_layers_per_block": [1, 1, 1]},
        vae={"layers_per_block": 1},
        text_encoder=text,
        text_encoder_2=text,
    )


def _few_blocks(name: str) -> dict[str, dict[str, Any]]:
    """Return the configs with which a transformer after FLUX.1 has two blocks of each kind, or one."""
    one_layer = {"layers_per_block": 1}
    pipeline = ARCHITECTURES[name].pipeline
    if pipeline == "StableDiffusion3Pipeline":
        few: dict[str, Any] = {"num_layers": 2}
        if "dual_attention_layers" in ARCHITECTURES[name].components["transformer"].config:
            few["dual_attention_layers"] = [0]
        text: dict[str, Any] = {"num_hidden_layers": 2}
        return {
            "transformer": few,
            "vae": one_layer,
            "text_encoder": text,
            "text_encoder_2": text,
            "text_encoder_3": {"num_layers": 1},
        }
    if pipeline in ("SanaPipeline", "SanaSprintPipeline"):
        layers = {f"{part}_layers_per_block": [1] * 6 for part in ("encoder", "decoder")}
        return {"transformer": {"num_layers": 2}, "vae": layers, "text_encoder": {"num_hidden_layers": 1}}
    if pipeline == "CogView4Pipeline":
        text = {"num_hidden_layers": 2, "pad_token_id": None}
        return {"transformer": {"num_layers": 2}, "vae": one_layer, "text_encoder": text}
    if pipeline == "ZImagePipeline":
        return {
            "transformer": {"n_layers": 2, "n_refiner_layers": 1},
            "vae": one_layer,
            "text_encoder": {"num_hidden_layers": 2},
        }
    if pipeline == "Krea2Pipeline":
        few = {"num_layers": 2, "num_layerwise_text_blocks": 1, "num_refiner_text_blocks": 1}
        # It reads the states of twelve fixed layers of its language model, the last of them the 35th.
        return {"transformer": few, "vae": {"num_res_blocks": 1}}
    if pipeline in (*QWEN, "QwenImage21Pipeline"):
        config = narrow(name).components["text_encoder"].config
        shallow_text = {"text_config": config["text_config"] | {"num_hidden_layers": 1}}
        return {
            "transformer": {"num_layers": 2},
            "vae": {"num_res_blocks": 1},
            "text_encoder": shallow_text,
        }
    # FLUX.2 reads the hidden states of three fixed layers of its language model, the last of them the 27th or 30th.
    return {"transformer": {"num_layers": 1, "num_single_layers": 2}, "vae": one_layer}


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
    from vivace.benchmark.worker import main

    main()
