"""Each fused kernel against float64, on any device: under Triton's interpreter on a CPU, and on a GPU.

The interpreter's cast to e4m3 loses the carry into the exponent (127 becomes 64, Triton 3.6), so on a CPU kernels write
what they would round to fp32 buffers. The cast itself is tested on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vivace.kernels import reference as ref
from vivace.kernels.reference import Bounds, Branch, Modulation, Tokens

EIGHT_BITS = 0.04
"""Relative error of rounding to e4m3: at most 1/16 an element, about 0.026 of a whole."""
SIXTEEN_BITS = 0.008
"""Of rounding to bf16 once: at most 1/256 an element; the interpreter cuts off instead, which is twice that."""


def random(kind: str, *shape: int, device: str, seed: int = 0) -> torch.Tensor:
    """Values of a kind: "normal"; "outliers", a few of them a thousand times larger; "zeros", with rows of zeros."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    made = torch.randn(*shape, generator=generator)
    if kind == "outliers":
        made = torch.where(torch.rand(*shape, generator=generator) < 0.001, made * 1000, made)
    if kind == "zeros":
        made[::3] = 0
    return made.to(device, torch.bfloat16)


KINDS = ("normal", "outliers", "zeros")


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative error of a whole tensor in the Frobenius norm; nan if anything is."""
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm().clamp(min=1e-30))


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device).to(dtype)


def eight_bits(device: str) -> torch.dtype:
    return torch.float8_e4m3fn if device == "cuda" else torch.float32


def allowed(quantize: bool, device: str) -> float:
    return EIGHT_BITS if quantize and device == "cuda" else SIXTEEN_BITS


LAYOUTS = (Tokens(1, 4, 12), Tokens(2, 7, 9), Tokens(2, 0, 6))


def check_residual_norm(
    kind: str, tokens: Tokens, channels: int, adds: bool, quantize: bool, device: str
) -> None:
    from vivace.kernels.norm_modulate import residual_norm

    rows = tokens.num_rows
    x = random(kind, rows, channels, device=device)
    y = random("normal", rows, channels, device=device, seed=2) if adds else None
    bias = random("normal", 2, channels, device=device, seed=5)
    modulations = random("normal", tokens.batch, 7 * channels, device=device, seed=6)
    gate = Modulation(0, 3 * channels)
    norm = (Modulation(channels, 4 * channels), Modulation(2 * channels, 6 * channels))
    limits = torch.tensor([[1.5, 0.5], [2.5, 0.1]], device=device)
    wanted_x = x.double()
    wide = modulations.double()
    if y is not None:
        wanted_x = ref.add_gated(x.double(), y.double(), bias.double(), wide, gate, tokens)
    stored = wanted_x.bfloat16()
    wanted = ref.norm_modulate(stored.double(), wide, *norm, tokens)
    out = poisoned(rows, channels, dtype=eight_bits(device) if quantize else torch.bfloat16, device=device)
    scale = poisoned(rows, 1, dtype=torch.float32, device=device) if quantize else None
    bound = torch.zeros(1, device=device)
    row_scales = poisoned(rows, 1, dtype=torch.float32, device=device)
    branch = Branch(y, gate, bias) if y is not None else None
    residual_norm(x, branch, modulations, norm, tokens, out, scale, Bounds(limits, bound, row_scales))
    assert error(x, wanted_x) < SIXTEEN_BITS
    found = out.double() if scale is None else out.double() * scale.double()
    assert error(found, wanted) < allowed(quantize, device)
    bounds = ref.product_bounds(wanted, limits, tokens)
    assert bound.item() == pytest.approx(bounds.amax().item(), rel=0.02)
    assert torch.allclose(row_scales, ref.scale_of(bounds), rtol=0.02)
    stream = torch.arange(rows, device=device) >= tokens.num_text_rows
    weight = torch.nn.functional.normalize(random("normal", 2, 8, channels, device=device).double(), dim=-1)
    weight *= limits.double()[:, :1, None]
    product = (wanted[:, None] * weight[stream.long()]).sum(dim=-1) + limits.double()[stream.long(), 1:]
    assert (product.abs() <= bounds).all(), "no product exceeds its bound"


def check_qk_norm_rope(
    kind: str, tokens: Tokens, heads: int, channels: int, quantize: bool, device: str
) -> None:
    from vivace.kernels.qk_norm_rope import qk_norm_rope

    inner = heads * channels
    qkv = random(kind, tokens.num_rows, 3 * inner + 16, device=device)
    bias = random("normal", 2, 3 * inner + 16, device=device, seed=1)
    weights = 1 + 0.1 * random("normal", 2, 2, channels, device=device, seed=2)
    angles = torch.rand(tokens.length, channels // 2, generator=torch.Generator().manual_seed(3)) * 100
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    wanted = ref.qk_norm_rope(qkv.double(), bias.double(), weights.double(), cos, sin, tokens, heads)
    dtype = eight_bits(device) if quantize else torch.bfloat16
    made = [
        poisoned(tokens.batch, tokens.length, heads, channels, dtype=dtype, device=device) for _ in range(3)
    ]
    scales: Any = None
    factors = torch.ones(3, device=device)
    if quantize:
        limit = (channels**0.5 * weights.float().abs().amax(dim=(0, 2)) / 448).contiguous()
        bound = wanted[2].abs().amax().float().reshape(1) * 3
        scales = (
            limit,
            bound,
            poisoned(2, dtype=torch.float32, device=device),
            poisoned(tokens.num_rows, 1, dtype=torch.float32, device=device),
        )
    qk_norm_rope(qkv, bias, weights, cos, sin, tokens, *made, scales)
    if quantize:
        factors = torch.stack([limit[0], limit[1], scales[2][0]])
        assert scales[2][1].item() == pytest.approx(1 / factors[2].item())
        assert torch.equal(scales[3], factors[2].expand(tokens.num_rows, 1))
        assert factors[2].item() == pytest.approx(bound.item() / 448)
    for got, want, factor in zip(made, wanted, factors, strict=True):
        assert error(got.double() * factor.double(), want) < allowed(quantize, device)


def check_gelu(kind: str, tokens: Tokens, channels: int, scales: str, device: str) -> None:
    """scales: "none", those of "rows", or one from a "bound"."""
    from vivace.kernels.gelu import gelu

    wide = random(kind, tokens.num_rows, channels + 32, device=device)
    x = wide[:, 16 : 16 + channels]
    bias = random("normal", 2, channels, device=device, seed=1)
    wanted = ref.gelu(x.double(), bias.double(), tokens)
    # As loose as bounds are.
    bounds = wanted.abs().amax(dim=-1, keepdim=True).float() * 30
    bound = scale = None
    out = x
    if scales != "none":
        out = poisoned(tokens.num_rows, channels, dtype=eight_bits(device), device=device)
        scale = ref.scale_of(bounds)
    if scales == "bound":
        assert scale is not None
        bound = bounds.amax().reshape(1)
        scale = scale.fill_(float("nan"))
    around = wide[:, :16].clone(), wide[:, 16 + channels :].clone()
    gelu(x, bias, tokens, out, scale, bound)
    if bound is not None:
        assert torch.allclose(scale, ref.scale_of(bound))
    found = out.double() if scale is None else out.double() * scale.double()
    assert error(found, wanted) < allowed(scale is not None, device)
    assert torch.equal(wide[:, :16], around[0])
    assert torch.equal(wide[:, 16 + channels :], around[1])


def check_quantize_rows(kind: str, rows: int, channels: int, device: str) -> None:
    from vivace.kernels.quantize_rows import quantize_rows

    x = random(kind, rows, channels, device=device)
    out = poisoned(rows, channels, dtype=eight_bits(device), device=device)
    scale = poisoned(rows, 1, dtype=torch.float32, device=device)
    quantize_rows(x, out, scale)
    assert error(out.double() * scale.double(), x) < allowed(True, device)
    assert torch.allclose(scale, ref.quantize_rows(x)[1])
    wide = poisoned(rows, channels + 16, dtype=eight_bits(device), device=device)
    quantize_rows(x, wide[:, :channels], scale * 2, is_given=True)
    assert error(wide[:, :channels].double() * scale.double() * 2, x) < allowed(True, device)
    assert wide[:, channels:].float().isnan().all()


def check_skinny_product(rows: int, outputs: int, channels: int, quantize: bool, device: str) -> None:
    from vivace.kernels.skinny_product import skinny_product

    x = random("normal", rows, channels, device=device)
    x = x if device == "cuda" else x.float()
    weight = random("normal", outputs, channels, device=device, seed=1)
    bias = random("normal", outputs, device=device, seed=2)
    scale = None
    wide = weight.double()
    if quantize:
        weight, rowwise = ref.quantize_rows(weight)
        scale = rowwise[:, 0].contiguous()
        wide = weight.double() * rowwise.double()
    wanted = x.double() @ wide.T + bias.double()
    out = poisoned(rows, outputs, dtype=torch.bfloat16, device=device)
    skip = torch.ones(1, dtype=torch.int32, device=device)
    skinny_product(x, weight, scale, bias, out, skip)
    assert out.isnan().all(), "nothing is written"
    skinny_product(x, weight, scale, bias, out, skip * 0)
    assert error(out, wanted) < SIXTEEN_BITS
    out.fill_(float("nan"))
    skinny_product(x, weight, scale, bias, out)
    assert error(out, wanted) < SIXTEEN_BITS


def cases() -> Iterator[tuple[str, Tokens]]:
    for kind in KINDS:
        for tokens in LAYOUTS:
            yield kind, tokens
