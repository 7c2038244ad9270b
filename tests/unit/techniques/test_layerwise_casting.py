"""Weights stored in fp8 and cast when they are used."""

import pytest
import torch

import vivace
from tests.families import build, draw, psnr, session
from vivace.errors import NoEffect, RecipeError, Unsupported
from vivace.measure.accelerator import weights_bytes
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless

pytestmark = pytest.mark.usefixtures("short_calls")

FP8 = torch.float8_e4m3fn
TARGETS = [
    *(("sd", "denoiser"), ("sd", "text_encoder")),
    *(("sdxl", "denoiser"), ("sdxl", "text_encoder"), ("sdxl", "text_encoder_2")),
    *(("flux", "denoiser"), ("flux", "text_encoder"), ("flux", "text_encoder_2")),
]


def num_fp8(module: torch.nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dtype == FP8)


@pytest.mark.parametrize(("family", "component"), TARGETS)
@pytest.mark.slow("sdxl-text*", "flux-text_encoder_2")
@pytest.mark.quick("sd-denoiser", "flux-text_encoder")
def test_cast_weights_shrink_and_the_image_stays_near(family: str, component: str) -> None:
    pipe = build(family)
    before = weights_bytes(pipe)
    reference = draw(vivace.apply(pipe))
    stored = vivace.apply(pipe, f"layerwise_casting@{component}")
    num = stored.effects[f"layerwise_casting@{component}"][f"{component}.parameters_in_fp8"]
    assert weights_bytes(pipe) == before - 3 * int(num), "a byte instead of four"
    for _ in range(2):
        assert psnr(draw(stored), reference) > 22
    assert weights_bytes(pipe) == before - 3 * int(num), "and it stays so"
    assert stored.evidence() == {f"{component}.parameters_in_fp8_now": num}
    assert stored.refuted({}) is None


def test_what_must_keep_its_precision_does() -> None:
    pipe = build("flux")
    vivace.apply(pipe, "layerwise_casting@denoiser,text_encoder,text_encoder_2")
    t5 = pipe.text_encoder_2
    assert t5.dtype == torch.float32, "what pipelines take for the dtype of the latents"
    assert {p.dtype for n, p in t5.named_parameters() if ".wo." in n or "shared" in n} == {torch.float32}
    assert num_fp8(t5) > 0
    assert pipe.transformer.dtype == torch.float32
    for module in (pipe.transformer, t5, pipe.text_encoder):
        assert all(p.dtype != FP8 for n, p in module.named_parameters() if "norm" in n)


def test_a_run_that_casts_them_for_good_refutes_it() -> None:
    stored = session("sd", "layerwise_casting")
    stored.pipe.unet.to(torch.float32)
    assert "nothing of denoiser is stored in fp8 any more" in (stored.refuted({}) or "")


def test_layerwise_casting_refuses_with_a_reason() -> None:
    pipe = session("sd", "layerwise_casting").pipe
    with pytest.raises(NoEffect, match="in fp8 already") as caught:
        vivace.apply(pipe, "layerwise_casting")
    assert caught.value.already_so
    with pytest.raises(Unsupported, match="quantised already"):
        vivace.apply(session("sd", "int8").pipe, "layerwise_casting")
    with pytest.raises(RecipeError, match="both set the weights of denoiser"):
        resolve("int8+layerwise_casting")
    with pytest.raises(RecipeError, match="cannot be aimed at vae"):
        resolve("layerwise_casting@vae")


@pytest.mark.usefixtures("shallow")
@pytest.mark.long
def test_memory_of_fp8_storage_is_predicted() -> None:
    model = find_weightless("flux-dev")
    plain, stored = (
        predict(model, resolve(recipe), text="embeddings") for recipe in ("baseline", "layerwise_casting")
    )
    before, after = (next(c for c in p.components if c.name == "transformer") for p in (plain, stored))
    assert after.dtype == "fp8, bf16", "most bytes first"
    assert 0.6 < after.num_bytes / before.num_bytes < 0.68, "modulation, a quarter of it, stays in bf16"
    assert stored.peak_bytes < plain.peak_bytes - 0.9 * (before.num_bytes - after.num_bytes)
