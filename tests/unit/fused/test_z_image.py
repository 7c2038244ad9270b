"""Z-Image's fused blocks against diffusers', on a CPU, where plain PyTorch computes what the kernels do."""

import math
from typing import Any

import pytest
import torch
from diffusers import ZImageTransformer2DModel

from tests import flow_models
from tests.families import psnr
from tests.fused_kernels import error
from tests.unit.fused.rounded import outliers, round_by_row
from tests.unit.fused.test_flux import target
from vivace.errors import Unsupported
from vivace.machinery.fused import operations
from vivace.machinery.kernels import reference
from vivace.models.synthetic import fill
from vivace.recipes.resolve import resolve
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.techniques.fused import Fused

HEADS, CHANNELS = 2, 128


def transformer() -> Any:
    torch.manual_seed(0)
    made = ZImageTransformer2DModel(
        in_channels=4,
        dim=HEADS * CHANNELS,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=HEADS,
        n_kv_heads=HEADS,
        cap_feat_dim=48,
    )
    with torch.no_grad():
        fill(made, torch.Generator().manual_seed(1))
    return made.eval().requires_grad_(False)


def inputs(words: tuple[int, ...], height: int, width: int) -> dict[str, Any]:
    """Of images with texts of so many words."""
    generator = torch.Generator().manual_seed(2)
    return {
        "x": [torch.randn(4, 1, height, width, generator=generator) for _ in words],
        "t": torch.linspace(0.3, 0.7, len(words)),
        "cap_feats": [torch.randn(number, 48, generator=generator) for number in words],
        "return_dict": False,
    }


def stacked(output: Any) -> torch.Tensor:
    assert all(each.dtype == torch.float32 for each in output[0])
    return torch.stack(output[0])


@pytest.mark.parametrize(
    ("words", "height", "width"), [((40,), 16, 16), ((7, 90), 10, 18), ((3, 3, 3), 2, 2), ((64, 1), 16, 2)]
)
@torch.no_grad()
@pytest.mark.quick("words[12]*")
def test_same_output_as_diffusers(words: tuple[int, ...], height: int, width: int) -> None:
    """Of several images with texts of other lengths, whose keys are masked, too."""
    arguments = inputs(words, height, width)
    expected = stacked(transformer()(**arguments))
    for precision, allowed in (("bf16", 0.02), ("fp8", 0.08)):
        made = transformer()
        Fused(precision=precision).apply(target(made))
        assert error(stacked(made(**arguments)), expected) < allowed, precision


@pytest.mark.parametrize("largest", [1, 10, 50])
@torch.no_grad()
def test_outlier_channels_cost_no_more_than_with_a_scale_for_each_row(largest: float) -> None:
    arguments = inputs((9,), 10, 18)

    def with_outliers(change: Any = None) -> Any:
        made = transformer()
        for name in ("noise_refiner", "context_refiner", "layers"):
            outliers(getattr(made, name), largest, change)
        return made

    expected, by_row = (stacked(with_outliers(change)(**arguments)) for change in (None, round_by_row))
    errors = {}
    for precision in ("bf16", "fp8"):
        made = with_outliers()
        Fused(precision=precision).apply(target(made))
        errors[precision] = error(stacked(made(**arguments)), expected)
    assert errors["fp8"] < 1.5 * math.hypot(error(by_row, expected), errors["bf16"])


@torch.no_grad()
def test_no_activation_exceeds_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    made = transformer()
    Fused(precision="fp8").apply(target(made))
    largest: list[float] = []
    rounded = reference.to_e4m3

    def watched(x: torch.Tensor) -> torch.Tensor:
        largest.append(float(x.abs().amax()))
        return rounded(x)

    monkeypatch.setattr(reference, "to_e4m3", watched)
    monkeypatch.setattr(operations, "has_triton", lambda: False)
    made(**inputs((9,), 10, 18))
    assert len(largest) == 5 * 4, "two norms, attention and MLP of each block"
    assert max(largest) <= reference.E4M3_MAX * (1 + 1e-6)
    assert min(largest) > reference.E4M3_MAX / 1000, "a bound is not that loose"


@torch.no_grad()
def test_what_it_does_not_compute_is_refused() -> None:
    made = transformer()
    Fused(precision="bf16").apply(target(made))
    arguments = inputs((5,), 4, 6)
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(**arguments, controlnet_block_samples={0: torch.zeros(1)})
    with pytest.raises(Unsupported, match="take no ControlNet"):
        made(*(arguments[name] for name in ("x", "t", "cap_feats")), False, {0: torch.zeros(1)})
    omni = {name: [arguments[name]] for name in ("x", "cap_feats")} | {"siglip_feats": [None]}
    with pytest.raises(Unsupported, match="image_noise_mask"):
        made(**(arguments | omni), image_noise_mask=[[1]])


def draw(recipe: str) -> Any:
    return flow_models.latents(flow_models.session("z-image-turbo", recipe))


def test_a_pipeline_draws_as_near_to_fp32_as_diffusers_bf16() -> None:
    expected = flow_models.reference("z-image-turbo")
    by_diffusers = psnr(flow_models.draw(flow_models.session("z-image-turbo", "bf16@denoiser")), expected)
    for recipe, least in (("fused(bf16)", by_diffusers - 1), ("fused(fp8)@denoiser,vae", 35)):
        session = flow_models.session("z-image-turbo", recipe)
        assert psnr(flow_models.draw(session), expected) > least, recipe
        assert session.refuted({}) is None


@pytest.mark.parametrize("cache", ["teacache", "magcache"])
def test_caches_of_whole_steps_go_with_it(cache: str) -> None:
    cache = f"{cache}(hits=0.5)"
    plain, fused = (flow_models.session("z-image-turbo", text) for text in (cache, f"fused(bf16)+{cache}"))
    expected = flow_models.latents(plain)
    assert psnr(flow_models.latents(fused), expected) > psnr(draw(f"bf16@denoiser+{cache}"), expected) - 1
    assert fused.evidence()["cache_hit_rate"] == plain.evidence()["cache_hit_rate"]


@pytest.mark.parametrize("recipe", ["fused(bf16)", "fused(fp8, attention=fp8)"])
@pytest.mark.quick("fused(bf16)*")
def test_its_memory_and_work_are_predicted(recipe: str) -> None:
    model = find_weightless("synthetic:z-image-turbo")
    plain, fused = (predict(model, resolve(text), text="embeddings") for text in ("baseline", recipe))
    share = fused.model_bytes / plain.model_bytes
    assert share == pytest.approx(1.0 if recipe == "fused(bf16)" else 0.707, abs=0.02)
    assert fused.peak_bytes < 1.02 * plain.peak_bytes
    works = [
        sum(component.gemm_flop for component in of.work.components if component.component == "denoiser")
        for of in (plain, fused)
    ]
    assert works[1] == pytest.approx(works[0], rel=0.01)
