"""FLOP by component at the native size, on meta tensors."""

from typing import Any

import pytest

from benchmarks.flops import Flops, count_denoiser, count_flops
from tests.narrow import network
from vivace.architectures import ARCHITECTURES
from vivace.architectures.components import ComponentConfig
from vivace.models.synthetic import on_meta

TERA = 1e12
TOLERANCE = 0.005


def by_kind(flops: Flops) -> dict[str, float]:
    """Return TFLOP in all and of each kind."""
    return {kind: getattr(flops, kind) / TERA for kind in ("total", "gemm", "conv", "attention")}


def about(total: float, gemm: float, conv: float, attention: float) -> Any:
    """Return what equals such figures within half a per cent of the total."""
    figures = {"total": total, "gemm": gemm, "conv": conv, "attention": attention}
    return pytest.approx(figures, rel=TOLERANCE, abs=TOLERANCE * total)


@pytest.mark.parametrize(
    ("component", "side", "text_length", "total", "gemm", "conv", "attention"),
    [
        (network("flux-dev"), 1024, 512, 74.385, 59.512, 0.0, 14.872),
        (network("flux-schnell"), 1024, 256, 69.467, 56.201, 0.0, 13.266),
        (network("sdxl", "unet"), 1024, 77, 6.761, 4.354, 1.623, 0.784),
        (network("sd15", "unet"), 512, 77, 0.803, 0.233, 0.444, 0.126),
    ],
    ids=["flux-dev", "flux-schnell", "sdxl", "sd15"],
)
@pytest.mark.quick("sd15")
def test_one_step(
    component: ComponentConfig,
    side: int,
    text_length: int,
    total: float,
    gemm: float,
    conv: float,
    attention: float,
) -> None:
    denoiser = on_meta(component)
    flops = count_denoiser(denoiser, height=side, width=side, text_length=text_length)
    assert by_kind(flops) == about(total, gemm, conv, attention)
    if total < 1:
        both = count_denoiser(denoiser, height=side, width=side, text_length=text_length, batch=2)
        assert both.total == pytest.approx(2 * flops.total, rel=TOLERANCE), "guidance is a batch of two"


def decoding(vae: Any, side: int) -> Flops:
    latents = next(vae.parameters()).new_zeros(1, vae.config.latent_channels, side // 8, side // 8)
    return count_flops(lambda: vae.decode(latents))


@pytest.mark.parametrize(
    ("component", "side", "total", "gemm", "conv", "attention"),
    [
        (network("flux-dev", "vae"), 1024, 10.47, 0.03, 9.89, 0.55),
        (network("sdxl", "vae"), 1024, 10.47, 0.03, 9.89, 0.55),
        (network("sd15", "vae"), 512, 2.515, 0.009, 2.472, 0.034),
        (ARCHITECTURES["flux-dev"].tiny_vae, 1024, 0.566, 0.0, 0.566, 0.0),
        (ARCHITECTURES["sd15"].tiny_vae, 512, 0.141, 0.0, 0.141, 0.0),
    ],
    ids=["flux", "sdxl", "sd15", "taef1", "taesd"],
)
def test_decoding(
    component: ComponentConfig, side: int, total: float, gemm: float, conv: float, attention: float
) -> None:
    assert by_kind(decoding(on_meta(component), side)) == about(total, gemm, conv, attention)
