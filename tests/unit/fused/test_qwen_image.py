"""Qwen-Image's fused forward against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

from typing import Any
from unittest import mock

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.fused_unets import size
from tests.unit.fused.rounded import attend_in_e4m3, outliers, round_by_row
from tests.unit.fused.test_flux import target
from tests.unit.techniques.test_cuda_graph import capture
from vivace.architectures import ARCHITECTURES
from vivace.errors import Unsupported
from vivace.machinery.attention_backends import cudnn_fp8
from vivace.machinery.compilation.prompt_lengths import PaddedTexts
from vivace.machinery.fused import modulations, operations
from vivace.machinery.kernels import reference
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128
MODEL = "qwen-image"


def transformer(num_layers: int = 3, **config: Any) -> Any:
    torch.manual_seed(0)
    made = QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=num_layers,
        num_attention_heads=HEADS,
        attention_head_dim=CHANNELS,
        joint_attention_dim=48,
        **config,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], *shapes: tuple[int, int]) -> dict[str, Any]:
    """Of images with texts of so many words; shapes of the image, and of those to be edited, in tokens."""
    generator = torch.Generator().manual_seed(2)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    batch, longest = len(words), max(words)
    mask = torch.arange(longest)[None] < torch.tensor(words)[:, None]
    return {
        "hidden_states": random(batch, sum(height * width for height, width in shapes), 16),
        "encoder_hidden_states": random(batch, longest, 48),
        "encoder_hidden_states_mask": None if mask.all() else mask,
        "timestep": torch.linspace(0.7, 0.3, batch),
        "img_shapes": [[(1, *shape) for shape in shapes]] * batch,
        "return_dict": False,
    }


CASES = [
    inputs((128,), (8, 8)),
    inputs((9, 9), (5, 9)),
    inputs((3, 16, 7), (4, 2)),
    inputs((7,), (5, 9), (4, 6), (3, 3)),
]
"""One text; two of one length; three padded to the longest; an image with two to be edited."""


@pytest.mark.parametrize("arguments", CASES)
@torch.no_grad()
@pytest.mark.quick("arguments[03]")
def test_same_output_as_diffusers(arguments: dict[str, Any]) -> None:
    expected = transformer()(**arguments)[0]
    for precision, allowed in (("bf16", 0.015), ("fp8", 0.07)):
        made = transformer()
        Fused(precision=precision).apply(target(made))
        (output,) = made(**arguments)
        assert output.dtype == torch.float32
        assert error(output, expected) < allowed


@pytest.mark.parametrize("shapes", [((5, 9), (4, 6), (3, 3)), ((4, 6),)])
@torch.no_grad()
def test_images_to_be_edited_are_modulated_by_a_time_of_zero(shapes: Any) -> None:
    """As in Qwen-Image-Edit-2511."""
    arguments = inputs((7,), *shapes)
    expected = transformer(zero_cond_t=True)(**arguments)[0]
    if len(shapes) > 1:
        assert error(transformer()(**arguments)[0], expected) > 0.1, "they would be otherwise"
    for precision, allowed in (("bf16", 0.015), ("fp8", 0.07)):
        made = transformer(zero_cond_t=True)
        Fused(precision=precision).apply(target(made))
        assert error(made(**arguments)[0], expected) < allowed


@torch.no_grad()
def test_a_padded_text_is_an_image_of_its_own() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs((3, 9), (4, 6))
    together = made(**arguments)[0]
    arguments["encoder_hidden_states"][0, 3:] = 1e3
    assert torch.equal(made(**arguments)[0], together), "what is padded is not read"
    alone = {name: each[:1] if torch.is_tensor(each) else each for name, each in arguments.items()}
    alone["encoder_hidden_states"] = alone["encoder_hidden_states"][:, :3]
    alone["encoder_hidden_states_mask"] = None
    assert error(made(**alone)[0], together[:1]) < 0.01


@torch.no_grad()
def test_after_fuse_qkv() -> None:
    made = transformer()
    expected = made(**CASES[0])[0]
    made.fuse_qkv_projections()
    Fused(precision="bf16").apply(target(made))
    assert error(made(**CASES[0])[0], expected) < 0.015
    assert not [*made.transformer_blocks.parameters()], "the separate weights are gone"


@torch.no_grad()
def test_attention_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    num_calls: list[int] = []

    def counted(*arguments: Any) -> None:
        num_calls.append(1)
        attend_in_e4m3(*arguments)

    monkeypatch.setattr(cudnn_fp8, "attend", counted)
    for case, in_fp8 in zip(CASES, (True, True, False, True), strict=True):
        expected = transformer()(**case)[0]
        made = transformer()
        Fused(precision="fp8", attention="fp8").apply(target(made))
        num_calls.clear()
        assert error(made(**case)[0], expected) < 0.08
        assert len(num_calls) == (3 if in_fp8 else 0), "a mask takes attention in bf16"


@torch.no_grad()
def test_texts_of_new_lengths_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are padded to 64 tokens, and what is padded is not attended to, by either kind of attention."""
    monkeypatch.setattr(cudnn_fp8, "attend", attend_in_e4m3)
    made, exact, plain = transformer(), transformer(), transformer()
    Fused(precision="fp8", attention="fp8").apply(target(made))
    Fused(precision="bf16").apply(target(exact))
    graphs = PaddedTexts(made.forward, torch.device("cpu"), capture, 1)
    for words in (3, 40, 64, 65):
        arguments = inputs((words,), (5, 9), (4, 6))
        assert error(graphs(**arguments)[0], plain(**arguments)[0]) < 0.08
        unpadded = exact(**arguments)[0]
        exact.forward.pads = True
        assert error(exact(**arguments)[0], unpadded) < 0.01
        exact.forward.pads = False
    assert graphs.num_captured == 2


@pytest.mark.parametrize("largest", [1, 10, 50])
@torch.no_grad()
def test_outlier_channels_cost_no_more_than_with_a_scale_for_each_row(largest: float) -> None:
    def with_outliers(change: Any = None) -> Any:
        made = transformer()
        outliers(made.transformer_blocks, largest, change, apart="_mod.")
        return made

    expected, by_row = (with_outliers(change)(**CASES[3])[0] for change in (None, round_by_row))
    made = with_outliers()
    Fused(precision="fp8").apply(target(made))
    assert error(made(**CASES[3])[0], expected) < 1.5 * error(by_row, expected)


@torch.no_grad()
def test_no_activation_exceeds_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = transformer()
    Fused(precision="fp8").apply(target(made))
    arguments = inputs((7, 7), (5, 9))
    arguments["hidden_states"][:, ::5] *= 1000
    largest: list[float] = []
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    monkeypatch.setattr(reference, "to_e4m3", watched)
    monkeypatch.setattr(operations, "has_triton", lambda: False)
    made(**arguments)
    assert len(largest) == 3 * 5, "two norms and attention of each block; the MLP of text and of image"
    assert max(largest) <= reference.E4M3_MAX * (1 + 1e-6)


@pytest.mark.parametrize("zero", [False, True])
@torch.no_grad()
def test_modulations_of_all_steps_are_computed_before_the_first(
    zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row for each timestep, whatever the batch, and for both calls of guidance."""
    monkeypatch.setattr(modulations, "capacity_on", lambda device: 8)
    made, plain = transformer(zero_cond_t=zero), transformer(zero_cond_t=zero)
    shapes = ((4, 6), (2, 3)) if zero else ((4, 6),)
    batch = 1 if zero else 2
    its = target(made)
    its.pipe.scheduler = type("Scheduler", (), {"timesteps": torch.tensor([700.0, 300.0])})()
    effect = Fused(precision="bf16").apply(its)
    for words in (5, 3):
        for time in its.pipe.scheduler.timesteps:
            arguments = inputs((words,) * batch, *shapes) | {"timestep": time.expand(batch) / 1000}
            assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015
    assert effect.evidence() == {
        "denoiser.modulations_hoisted": 2 + zero,
        "denoiser.modulations_computed_in_the_loop": 0,
    }
    arguments["timestep"] = arguments["timestep"] * 0.9
    assert error(made(**arguments)[0], plain(**arguments)[0]) < 0.015, "another time is computed"
    assert effect.evidence()["denoiser.modulations_computed_in_the_loop"] == 1


def test_weights_keep_their_size() -> None:
    sixteen, eight = transformer().bfloat16(), transformer()
    before = size(sixteen)
    Fused(precision="bf16").apply(target(sixteen))
    assert size(sixteen) == pytest.approx(before, rel=0.01)
    Fused(precision="fp8").apply(target(eight))
    assert size(eight) < 0.56 * before


def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = CASES[0]
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**arguments, controlnet_block_samples=[torch.zeros(1)])
    with pytest.raises(Unsupported, match="takes no guidance"):
        made(**arguments, guidance=torch.ones(1))
    with pytest.raises(Unsupported, match="ip_adapter"):
        made(**arguments, attention_kwargs={"ip_adapter": torch.zeros(1)})
    made(**arguments, attention_kwargs={"scale": 1.0})
    layered = transformer(use_additional_t_cond=True)
    assert "use_additional_t_cond" in str(Fused(precision="bf16").unsupported(target(layered)))
    made = transformer(zero_cond_t=True)
    Fused(precision="bf16").apply(target(made))
    with pytest.raises(Unsupported, match="one image at a time"):
        made(**inputs((5, 5), (4, 6), (2, 2)))


def draw(model: str, recipe: str, **call: Any) -> Any:
    return flow_models.latents(flow_models.session(model, recipe), **call)


@pytest.mark.parametrize("model", ["qwen-image", "qwen-image-edit", "qwen-image-edit-2511"])
def test_a_pipeline_draws_as_near_to_fp32_as_diffusers_bf16(model: str) -> None:
    """With guidance: two calls a step, with texts of other lengths."""
    expected = flow_models.reference(model, output_type="latent")
    by_diffusers = psnr(draw(model, "bf16@denoiser"), expected)
    for recipe, lost in (("fused(bf16)", 1), ("fused(fp8)", 4)):
        session = flow_models.session(model, recipe)
        assert psnr(flow_models.latents(session), expected) > by_diffusers - lost, recipe
        assert session.refuted({}) is None


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
    of_blocks = 2 * (24 + 12) * 3072**2 * 2
    assert saved == pytest.approx(0 if recipe == "fused(bf16)" else of_blocks / 2, abs=0.02 * of_blocks)
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, fused)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.01)
