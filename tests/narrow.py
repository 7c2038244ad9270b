"""Published architectures with a tenth of their channels, small enough to run on a CPU.

Run as a script it is a worker process whose every architecture is small.
"""

import functools
import sys
from typing import Any

import pytest
import torch

from vivace.benchmark import studies
from vivace.models.architectures import ARCHITECTURES, Architecture
from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Entry

SIDE = 128
COMMAND = (sys.executable, __file__)
_CLIP: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "projection_dim": 64,
    "vocab_size": 1000,
}
_VAE: dict[str, Any] = {"block_out_channels": [32, 32, 64, 64]}


def narrow(name: str) -> Architecture:
    """Return an architecture with the same blocks and at most a tenth of the channels."""
    architecture = ARCHITECTURES[name]
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
        configs["text_encoder_2"] = {
            "d_model": 128,
            "d_kv": 16,
            "d_ff": 320,
            "num_heads": 8,
            "vocab_size": 1000,
        }
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
    if architecture.pipeline == "FluxPipeline":
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
    monkeypatch.setattr(studies, "start_launcher", functools.partial(studies.start_launcher, worker=COMMAND))
    torch.set_num_threads(1)


if __name__ == "__main__":
    architectures, entries = small_models()
    ARCHITECTURES.update(architectures)
    CATALOGUE.update(entries)
    from vivace.benchmark.worker import main

    main()
