"""Query, key and value in one product."""

from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests.families import FAMILIES, build, draw, psnr, session
from vivace.errors import NoEffect, Unsupported
from vivace.machinery.technique import component_of
from vivace.measure.accelerator import weights_bytes

pytestmark = pytest.mark.usefixtures("short_calls")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", ["", "@denoiser", "@vae"])
@pytest.mark.diagonal
def test_the_picture_stays_and_the_weights_are_not_kept_twice(family: str, target: str) -> None:
    pipe = build(family)
    before = weights_bytes(pipe)
    reference = draw(vivace.apply(pipe))
    fused = vivace.apply(pipe, f"fuse_qkv{target}")
    assert psnr(draw(fused), reference) >= 40
    assert weights_bytes(pipe) == before
    (effect,) = fused.effects.values()
    assert set(effect) == {f"{c}.fused_attentions" for c in (target[1:],) if c} or {
        "denoiser.fused_attentions",
        "vae.fused_attentions",
    }
    assert all(int(count) > 0 for count in effect.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_fewer_products_run(family: str) -> None:
    def num_products(recipe: str) -> int:
        made = session(family, recipe)
        calls = []
        for layer in component_of(made.pipe, "denoiser").modules():
            if isinstance(layer, torch.nn.Linear):
                layer.register_forward_hook(lambda *_: calls.append(1))
        draw(made, num_inference_steps=1)
        return len(calls)

    assert num_products("fuse_qkv") < num_products("baseline")


def test_what_is_quantised_is_the_fused_weight() -> None:
    made = session("flux", "int8+fuse_qkv")
    layers = [m for m in made.pipe.transformer.modules() if isinstance(m, torch.nn.Linear)]
    assert made.effects["quantize@denoiser"]["denoiser.quantized_layers"] == len(layers)
    assert hasattr(made.pipe.transformer.transformer_blocks[0].attn.to_qkv.weight, "__tensor_flatten__")


def test_what_cannot_be_fused_is_said_in_words() -> None:
    pipe = build("sd")
    vivace.apply(pipe, "fuse_qkv")
    with pytest.raises(NoEffect, match="fused already") as caught:
        vivace.apply(pipe, "fuse_qkv")
    assert caught.value.already_so
    pipe = build("sd")
    vivace.apply(pipe, "int8")
    with pytest.raises(Unsupported, match="quantised weights cannot be fused"):
        vivace.apply(pipe, "fuse_qkv")
    with pytest.raises(NoEffect, match="no attention that diffusers can fuse in vae"):
        vivace.load("tiny-sd", "tiny_vae+fuse_qkv@vae")

    class Adapter:
        def __call__(self, attn: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return hidden_states

    pipe = build("sdxl")
    pipe.unet.set_attn_processor(Adapter())
    with pytest.raises(Unsupported, match="computed by Adapter"):
        vivace.apply(pipe, "fuse_qkv")
    assert np.isfinite(draw(vivace.apply(pipe, "fuse_qkv@vae"))).all()
