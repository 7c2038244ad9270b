"""Stable Diffusion 3.5's fused forward against diffusers', on a CPU, where PyTorch computes what the kernels do."""

from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import SD3Transformer2DModel

from tests import flow_models
from tests.fused_kernels import error
from tests.unit.fused.test_flux import target
from vivace.architectures import ARCHITECTURES
from vivace.errors import Unsupported
from vivace.machinery.fused import modulations
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128
KINDS = {"large": (), "medium": (0, 1)}
"""The blocks with a second attention, of three."""
MODELS = ("sd35-large", "sd35-medium")


def transformer(kind: str = "medium", channels: int = CHANNELS, **config: Any) -> Any:
    torch.manual_seed(0)
    made = SD3Transformer2DModel(
        **{
            "sample_size": 16,
            "in_channels": 4,
            "out_channels": 4,
            "num_layers": 3,
            "num_attention_heads": HEADS,
            "attention_head_dim": channels,
            "joint_attention_dim": 48,
            "caption_projection_dim": HEADS * channels,
            "pooled_projection_dim": 32,
            "pos_embed_max_size": 24,
            "dual_attention_layers": KINDS[kind],
            "qk_norm": "rms_norm",
        }
        | config
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(batch: int, words: int, height: int, width: int) -> dict[str, Any]:
    """Height and width in tokens."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "hidden_states": random(batch, 4, 2 * height, 2 * width),
        "encoder_hidden_states": random(batch, words, 48),
        "pooled_projections": random(batch, 32),
        "timestep": torch.linspace(700, 300, batch),
        "return_dict": False,
    }


CASES = [inputs(1, 128, 8, 8), inputs(2, 9, 5, 9), inputs(3, 16, 4, 2), inputs(1, 1, 1, 1)]


@torch.no_grad()
def test_heads_of_64_channels_and_the_second_attention_counts() -> None:
    """As the published models have them."""
    arguments = inputs(2, 9, 5, 9)
    made = transformer(channels=64)
    expected = made(**arguments)[0]
    without = transformer(channels=64)
    for block in without.transformer_blocks:
        if block.attn2 is not None:
            block.attn2.to_out[0].weight.zero_()
            block.attn2.to_out[0].bias.zero_()
    assert error(without(**arguments)[0], expected) > 0.1
    Fused(precision="bf16").apply(target(made))
    assert error(made(**arguments)[0], expected) < 0.015


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_modulations_of_all_steps_are_computed_before_the_first(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows for each timestep: guidance is a part of the batch, with a pooled text of its own."""
    monkeypatch.setattr(modulations, "capacity_on", lambda device: 2)
    made, plain = transformer(kind), transformer(kind)
    its = target(made)
    its.pipe.scheduler = type("Scheduler", (), {"timesteps": torch.tensor([700.0, 300.0])})()
    effect = Fused(precision="bf16").apply(its)
    arguments = inputs(2, 5, 4, 6)
    for time in its.pipe.scheduler.timesteps:
        arguments["timestep"] = time.expand(2)
        assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015
    assert effect.evidence() == {
        "denoiser.modulations_hoisted": 4,
        "denoiser.modulations_computed_in_the_loop": 0,
    }
    whole = dict(arguments)
    for name in ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"):
        arguments[name] = arguments[name][1:]
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015
    assert effect.evidence()["denoiser.modulations_hoisted"] == 4, "rows that guidance leaves are there"
    assert effect.evidence()["denoiser.modulations_computed_in_the_loop"] == 0
    arguments = whole
    arguments["timestep"] = arguments["timestep"] * 0.9
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015, "another time is computed"
    assert effect.evidence()["denoiser.modulations_computed_in_the_loop"] == 1


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = CASES[0]
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**arguments, block_controlnet_hidden_states=[torch.zeros(1)])
    with pytest.raises(Unsupported, match="without skip-layer guidance"):
        made(**arguments, skip_layers=[1])
    with pytest.raises(Unsupported, match="ip_adapter_image_embeds"):
        made(**arguments, joint_attention_kwargs={"ip_adapter_image_embeds": torch.zeros(1)})
    made(**arguments, joint_attention_kwargs={"scale": 1.0})
    with pytest.raises(ValueError, match="cannot be greater than `pos_embed_max_size`"):
        made(**inputs(1, 3, 25, 4))
    of_three = transformer(qk_norm=None)
    assert "they are made for 3.5" in str(Fused(precision="bf16").unsupported(target(of_three)))


@pytest.mark.parametrize("model", MODELS)
def test_attention_in_fp8_is_refused_at_heads_of_64_channels(model: str) -> None:
    located = find_weightless(f"synthetic:{model}")
    with pytest.raises(Unsupported, match=r"heads of 128 channels.* and these have 64"):
        predict(located, resolve("fused(fp8, attention=fp8)"), text="embeddings")


def test_skip_layer_guidance_is_refused_before_an_image_is_drawn() -> None:
    session = flow_models.session(MODELS[0], "fused(bf16)", num_inference_steps=8)
    with pytest.raises(Unsupported, match="leave fused out, or call without skip-layer guidance"):
        flow_models.latents(session, skip_guidance_layers=[1], skip_layer_guidance_stop=1.0)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8)"])
@pytest.mark.quick("fused(bf16)-sd35-medium")
def test_its_memory_and_work_are_predicted(model: str, recipe: str) -> None:
    """Of two blocks."""
    two = ARCHITECTURES[model].changed(transformer={"num_layers": 2, "dual_attention_layers": [0]})
    with mock.patch.dict(ARCHITECTURES, {model: two}):
        located = find_weightless(f"synthetic:{model}")
        plain, fused = (predict(located, resolve(text), text="embeddings") for text in ("baseline", recipe))
    channels = 64 * two.components["transformer"].config["num_attention_heads"]
    # Of the first block both streams, a second attention and 15 vectors of modulations; of the last less of the text.
    of_layers = (24 + 4 + 15 + 12 + 3 + 8) * channels**2
    in_fp8, padding = recipe == "fused(fp8)", 4 * channels**2
    saved = plain.model_bytes - fused.model_bytes
    expected = of_layers - padding if in_fp8 else -2 * padding
    assert saved == pytest.approx(expected, abs=0.1 * of_layers), "and a table of modulations"
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, fused)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.01)
