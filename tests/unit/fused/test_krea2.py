"""Krea 2's fused blocks against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from diffusers import Krea2Transformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.fused_unets import size
from tests.unit.fused.rounded import attend_in_e4m3, outliers, round_by_row
from tests.unit.fused.test_flux import target
from vivace.architectures import ARCHITECTURES
from vivace.errors import Unsupported
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.fused import operations
from vivace.machinery.kernels import reference
from vivace.machinery.offloading.components import ComponentOffloader
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

HEADS, KEY_HEADS, CHANNELS = 4, 2, 128
MODEL = "krea-2-turbo"


def transformer(num_layers: int = 3, channels: int = CHANNELS) -> Any:
    torch.manual_seed(0)
    made = Krea2Transformer2DModel(
        in_channels=16,
        num_layers=num_layers,
        attention_head_dim=channels,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        intermediate_size=384,
        timestep_embed_dim=32,
        text_hidden_dim=48,
        num_text_layers=3,
        text_num_attention_heads=4,
        text_num_key_value_heads=4,
        text_intermediate_size=64,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(channels // 4, channels * 3 // 8, channels * 3 // 8),
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        fill(made, generator)
        for name, parameter in made.named_parameters():
            if "norm" in name or "table" in name:  # zeros in a model with random weights
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], padded_to: int, height: int, width: int) -> dict[str, Any]:
    """Of images with texts of so many words, whose padding is in front of the last word."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, places = len(words), torch.arange(padded_to)
    mask = torch.stack([(places < number - 1) | (places == padded_to - 1) for number in words])
    positions = torch.zeros(padded_to + height * width, 3)
    positions[padded_to:, 1] = torch.arange(height).repeat_interleave(width)
    positions[padded_to:, 2] = torch.arange(width).repeat(height)
    return {
        "hidden_states": random(batch, height * width, 16),
        "encoder_hidden_states": random(batch, padded_to, 3, 48),
        "timestep": torch.linspace(0.7, 0.3, batch),
        "position_ids": positions,
        "encoder_attention_mask": mask,
        "return_dict": False,
    }


CASES = [
    inputs((16,), 16, 8, 8),
    inputs((7,), 16, 5, 9),
    inputs((9, 9), 12, 4, 2),
    inputs((3, 16, 7), 16, 4, 2),
]
"""A text without padding; one with it; two of one length; three of others, which keep a mask."""


@pytest.mark.parametrize("arguments", CASES)
@torch.no_grad()
@pytest.mark.quick("arguments[03]")
def test_same_output_as_diffusers(arguments: dict[str, Any]) -> None:
    expected = transformer()(**arguments)[0]
    for precision, allowed in (("bf16", 0.015), ("fp8", 0.08)):
        made = transformer()
        Fused(precision=precision).apply(target(made))
        (output,) = made(**arguments)
        assert output.dtype == torch.float32
        assert error(output, expected) < allowed


@torch.no_grad()
def test_padding_is_left_out_and_looked_for_once_for_each_text() -> None:
    made = transformer()
    effect = Fused(precision="bf16").apply(target(made))
    first, second = inputs((7,), 16, 5, 9), inputs((9,), 16, 5, 9)
    lengths: list[int] = []
    made.text_fusion.register_forward_pre_hook(lambda _, args: lengths.append(args[0].shape[1]))
    outputs = [made(**arguments)[0] for arguments in (first, second, first)]
    assert lengths == [7, 9, 7]
    assert torch.equal(outputs[0], outputs[2])
    assert effect.evidence()["denoiser.padding_left_out"] == 9
    first["encoder_hidden_states"][:, 6:15] = 1e3
    assert torch.equal(made(**first)[0], outputs[0]), "what is padded is not read"
    first["encoder_attention_mask"][:, 6] = True
    assert not torch.equal(made(**first)[0], outputs[0])
    assert lengths[-1] == 8, "a mask that is written to is looked at again"


@torch.no_grad()
def test_same_bits_from_the_same_inputs() -> None:
    made = transformer()
    Fused(precision="fp8").apply(target(made))
    first = made(**CASES[1])[0]
    assert all(torch.equal(made(**CASES[1])[0], first) for _ in range(10))


@torch.no_grad()
def test_attention_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls: list[int] = []

    def of_groups(q: Any, k: Any, v: Any, *more: Any) -> None:
        num_calls.append(1)
        shapes.add(q.shape)
        assert q.shape[2] == HEADS
        assert k.shape[2] == v.shape[2] == KEY_HEADS
        k, v = (each.view(torch.uint8).repeat_interleave(2, dim=2).view(q.dtype) for each in (k, v))
        attend_in_e4m3(q, k, v, *more)

    monkeypatch.setattr(cudnn_fp8, "attend", of_groups)
    shapes = set()
    for case in (*CASES, *(inputs((number,), 160, 5, 9) for number in (3, 64))):
        expected = transformer()(**case)[0]
        made = transformer()
        Fused(precision="fp8", attention="fp8").apply(target(made))
        num_calls.clear()
        assert error(made(**case)[0], expected) < 0.09
        assert len(num_calls) == 3, "also where texts are padded"
    assert len(shapes) == len(CASES) + 1, "texts of up to 64 tokens have one"


@pytest.mark.parametrize("largest", [1, 10, 50])
@torch.no_grad()
def test_outlier_channels_cost_no_more_than_with_a_scale_for_each_row(largest: float) -> None:
    def with_outliers(change: Any = None) -> Any:
        made = transformer()
        outliers(made.transformer_blocks, largest, change)
        return made

    expected, by_row = (with_outliers(change)(**CASES[1])[0] for change in (None, round_by_row))
    made = with_outliers()
    Fused(precision="fp8").apply(target(made))
    assert error(made(**CASES[1])[0], expected) < 1.5 * error(by_row, expected)


@torch.no_grad()
def test_no_activation_exceeds_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = transformer()
    Fused(precision="fp8").apply(target(made))
    arguments = inputs((7, 7), 9, 5, 9)
    arguments["hidden_states"][:, ::5] *= 1000
    largest: list[float] = []
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    monkeypatch.setattr(reference, "to_e4m3", watched)
    monkeypatch.setattr(operations, "has_triton", lambda: False)
    made(**arguments)
    assert len(largest) == 3 * 4, "two norms, attention and the MLP of each block"
    assert max(largest) <= reference.E4M3_MAX * (1 + 1e-6)


def test_weights_keep_their_size_and_norms_stay_in_fp32() -> None:
    sixteen, eight = transformer().bfloat16(), transformer()
    before = size(sixteen)
    Fused(precision="bf16").apply(target(sixteen))
    assert size(sixteen) == pytest.approx(before, rel=0.02)
    Fused(precision="fp8").apply(target(eight))
    assert size(eight) < 0.68 * before, "what modulates all blocks stays in bf16"
    assert eight.final_layer.norm.weight.dtype == torch.float32
    assert eight.final_layer.linear.weight.dtype == torch.bfloat16


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    with pytest.raises(Unsupported, match="ip_adapter"):
        made(**CASES[0], attention_kwargs={"ip_adapter": torch.zeros(1)})
    made(**CASES[0], attention_kwargs={"scale": 1.0})


def draw(model: str, recipe: str, **call: Any) -> Any:
    return flow_models.latents(flow_models.session(model, recipe), **call)


@pytest.mark.parametrize("model", [MODEL, "krea-2-raw"])
def test_a_pipeline_draws_as_near_to_fp32_as_diffusers_bf16(model: str) -> None:
    """Raw is guided by a second call in each step, with a text of its own."""
    expected = flow_models.reference(model, output_type="latent")
    by_row = flow_models.session(model)
    for layer in by_row.pipe.transformer.transformer_blocks.modules():
        if isinstance(layer, torch.nn.Linear):
            round_by_row(layer)
    by_others = {
        "bf16": psnr(draw(model, "bf16@denoiser"), expected),
        "fp8": psnr(flow_models.latents(by_row), expected),
    }
    for recipe, lost in (("fused(bf16)", 1), ("fused(fp8)", 3)):
        session = flow_models.session(model, recipe)
        least = by_others["bf16" if "bf16" in recipe else "fp8"] - lost
        assert psnr(flow_models.latents(session), expected) > least, recipe
        assert session.refuted({}) is None
        assert session.evidence()["denoiser.padding_left_out"] > flow_models.WORDS["Krea2Pipeline"] / 2


def test_an_offloaded_model_draws_the_same() -> None:
    plain, made = (flow_models.session(MODEL, "fused(fp8)") for _ in range(2))
    offloader = ComponentOffloader(made.pipe, "cpu", pin=False)
    assert np.array_equal(flow_models.latents(made), flow_models.latents(plain))
    assert not offloader.is_in_call


def test_two_prompts_of_other_lengths_are_drawn_as_each_alone() -> None:
    session = flow_models.session(MODEL, "fused(bf16)")
    prompts = ["a red circle", flow_models.PROMPT + " and a green square on a grey table"]
    together = flow_models.draw(session, prompts)
    assert psnr(flow_models.draw(session, prompts[0])[0], together[0]) > 35


@pytest.mark.parametrize("cache", ["teacache", "magcache"])
def test_caches_of_whole_steps_go_with_it(cache: str) -> None:
    cache = f"{cache}(hits=0.5)"
    plain, fused = (flow_models.session(MODEL, text) for text in (cache, f"fused(bf16)+{cache}"))
    expected = flow_models.latents(plain)
    by_diffusers = psnr(draw(MODEL, f"bf16@denoiser+{cache}"), expected)
    assert psnr(flow_models.latents(fused), expected) > by_diffusers - 1
    assert fused.evidence()["cache_hit_rate"] == plain.evidence()["cache_hit_rate"]


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8, attention=fp8)"])
@pytest.mark.quick("fused(bf16)*")
def test_its_memory_and_work_are_predicted(recipe: str) -> None:
    """Of two blocks."""
    two = ARCHITECTURES[MODEL].changed(transformer={"num_layers": 2})
    with mock.patch.dict(ARCHITECTURES, {MODEL: two}):
        model = find_weightless(f"synthetic:{MODEL}")
        plain, fused = (predict(model, resolve(text), text="embeddings") for text in ("baseline", recipe))
    saved = plain.model_bytes - fused.model_bytes
    of_blocks = 2 * (2.5 + 1 + 8) * 6144**2 * 2
    assert saved == pytest.approx(0 if recipe == "fused(bf16)" else of_blocks / 2, abs=0.02 * of_blocks)
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, fused)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.01)
