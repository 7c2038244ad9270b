"""FLOP by component at the native size, on meta tensors."""

from typing import Any

import pytest
import torch

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
@pytest.mark.quick("flux-dev", "sd15")
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


class Heads(torch.nn.Module):
    """One attention, and one linear layer that PyTorch turns into `bmm`: its input is transposed."""

    def __init__(self, written_out: bool) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)
        self.written_out = written_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x.transpose(1, 2))
        heads = x.unflatten(-1, (4, 4)).transpose(1, 2)
        if self.written_out:
            return (heads @ heads.transpose(-1, -2)).softmax(-1) @ heads
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, value=heads)


@pytest.mark.parametrize("written_out", [False, True])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_attention_is_told_from_linear_layers(device: str, written_out: bool) -> None:
    x: Any = torch.zeros(3, 16, 10, device=device)
    heads = Heads(written_out).to(device)
    flops = count_flops(lambda: heads(x))
    assert flops == Flops(gemm=2 * 3 * 10 * 16 * 16, conv=0, attention=2 * 2 * 3 * 10 * 10 * 16)
    assert flops.total == flops.gemm + flops.attention


def test_one_modules_calls_are_counted_alone() -> None:
    """Its hooks included, and nothing beside it."""
    counted, beside = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)
    counted.register_forward_pre_hook(lambda _, args: (args[0] + torch.ones(2, 8) @ torch.ones(8, 8),))

    def call() -> None:
        for _ in range(3):
            counted(torch.ones(2, 8))
            beside(torch.ones(2, 8))

    own = 2 * 2 * 8 * 4 + 2 * 2 * 8 * 8
    assert count_flops(call, of=counted).total == 3 * own
    assert count_flops(call, of=beside).total == 3 * 2 * 2 * 8 * 4
    assert count_flops(call).total == 3 * (own + 2 * 2 * 8 * 4)
    assert count_flops(lambda: beside(torch.ones(2, 8)), of=counted).total == 0
    assert len(counted._forward_pre_hooks) == 1, "the counting ones are gone"
