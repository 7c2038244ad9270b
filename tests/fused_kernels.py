"""Each fused kernel against float64, on any device: under Triton's interpreter on a CPU, and on a GPU.

The interpreter's cast to e4m3 loses the carry into the exponent (127 becomes 64, Triton 3.6), so on a CPU kernels write
what they would round to fp32 buffers. The cast itself is tested on a GPU.
"""

from collections.abc import Iterator
from typing import Any

import torch

from vivace.machinery.kernels import reference as ref
from vivace.machinery.kernels.reference import Branch, Modulation, PaddedImages, TokenLayout

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


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of a whole tensor in the Frobenius norm; nan if anything is."""
    difference = (actual.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp(min=1e-30))


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.full(shape, float("nan"), device=device).to(dtype)


def eight_bits(device: str) -> torch.dtype:
    return torch.float8_e4m3fn if device == "cuda" else torch.float32


def allowed(quantize: bool, device: str) -> float:
    return EIGHT_BITS if quantize and device == "cuda" else SIXTEEN_BITS


LAYOUTS = (TokenLayout(1, 4, 12), TokenLayout(2, 7, 9), TokenLayout(2, 0, 6))


def check_residual_norm(
    kind: str, tokens: TokenLayout, channels: int, adds: bool, quantize: bool, device: str
) -> None:
    from vivace.machinery.kernels.norm_modulate import residual_norm

    rows = tokens.num_rows
    x = random(kind, rows, channels, device=device)
    y = random("normal", rows, channels, device=device, seed=2) if adds else None
    bias = random("normal", 2, channels, device=device, seed=5)
    modulations = random("normal", tokens.batch, 7 * channels, device=device, seed=6)
    gate = Modulation(0, 3 * channels)
    norm = (Modulation(channels, 4 * channels), Modulation(2 * channels, 6 * channels))
    wanted_x = x.double()
    wide = modulations.double()
    if y is not None:
        wanted_x = ref.add_gated(x.double(), y.double(), bias.double(), wide, gate, tokens)
    stored = wanted_x.bfloat16()
    expected = ref.norm_modulate(stored.double(), wide, *norm, tokens)
    out = poisoned(rows, channels, dtype=eight_bits(device) if quantize else torch.bfloat16, device=device)
    scale = torch.tensor([[1.3, 0], [1.2, 0]], device=device)[:, 0] if quantize else None
    branch = Branch(y, gate, bias) if y is not None else None
    residual_norm(x, branch, modulations, norm, tokens, out, scale)
    assert error(x, wanted_x) < SIXTEEN_BITS
    actual = out.double()
    if scale is not None:
        actual = actual * ref.by_stream(scale.double()[:, None], tokens)
    assert error(actual, expected) < allowed(quantize, device)


def check_qk_norm_rope(
    kind: str, tokens: TokenLayout, heads: int, channels: int, quantize: bool, device: str
) -> None:
    from vivace.machinery.kernels.qk_norm_rope import qk_norm_rope

    inner = heads * channels
    qkv = random(kind, tokens.num_rows, 3 * inner + 16, device=device)
    bias = random("normal", 2, 3 * inner + 16, device=device, seed=1)
    weights = 1 + 0.1 * random("normal", 2, 2, channels, device=device, seed=2)
    angles = torch.rand(tokens.length, channels // 2, generator=torch.Generator().manual_seed(3)) * 100
    cos, sin = angles.cos().to(device), angles.sin().to(device)
    expected = ref.qk_norm_rope(qkv.double(), bias.double(), weights.double(), cos, sin, tokens, heads)
    dtype = eight_bits(device) if quantize else torch.bfloat16
    made = [
        poisoned(tokens.batch, tokens.length, heads, channels, dtype=dtype, device=device) for _ in range(3)
    ]
    scales: Any = None
    factors = torch.ones(3, device=device)
    if quantize:
        limit = (channels**0.5 * weights.float().abs().amax(dim=(0, 2)) / 448).contiguous()
        values = ref.scale_of(expected[2].abs().amax().float().reshape(1) * 3)
        scales = (limit, values)
        factors = torch.cat([limit, values])
    qk_norm_rope(qkv, bias, weights, cos, sin, tokens, *made, scales)  # type: ignore[call-arg]
    for got, want, factor in zip(made, expected, factors, strict=True):
        assert error(got.double() * factor.double(), want) < allowed(quantize, device)
    if tokens.batch > 1:  # each image has positions of its own
        of_images = [torch.stack([part * (1 - 0.1 * k) for k in range(tokens.batch)]) for part in (cos, sin)]
        own = [torch.empty_like(each) for each in made]
        qk_norm_rope(qkv, bias, weights, *of_images, tokens, *own, scales)  # type: ignore[call-arg]
        expected = ref.qk_norm_rope(qkv.double(), bias.double(), weights.double(), *of_images, tokens, heads)  # type: ignore[call-arg]
        for got, want, factor in zip(own, expected, factors, strict=True):
            assert error(got.double() * factor.double(), want) < allowed(quantize, device)
    # Of a pair each channel has angles of its own.
    by_channel = [torch.cat([part, part.flip(0)], dim=1) for part in (cos, sin)]
    own = [torch.empty_like(each) for each in made]
    qk_norm_rope(qkv, bias, weights, *by_channel, tokens, *own, scales)  # type: ignore[call-arg]
    expected = ref.qk_norm_rope(qkv.double(), bias.double(), weights.double(), *by_channel, tokens, heads)  # type: ignore[call-arg]
    for got, want, factor in zip(own, expected, factors, strict=True):
        assert error(got.double() * factor.double(), want) < allowed(quantize, device)
    check_grouped_heads(qkv, weights, (cos, sin), tokens, scales, made)
    # Queries apart, and a token's key and value side by side. Neither reads the other.
    q, both = torch.zeros_like(made[0]), torch.zeros_like(torch.stack(made[1:], dim=2))
    first, rest = qkv.clone(), qkv.clone()
    first[:, inner:], rest[:, :inner] = float("nan"), float("nan")
    qk_norm_rope(first, bias, weights, cos, sin, tokens, q, None, None, scales)
    qk_norm_rope(rest, bias, weights, cos, sin, tokens, None, both[:, :, 0], both[:, :, 1], scales)
    for got, want in zip((q, *both.unbind(2)), made, strict=True):
        assert got.float().equal(want.float())


def check_grouped_heads(
    qkv: torch.Tensor,
    weights: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    tokens: TokenLayout,
    scales: Any,
    like: list[torch.Tensor],
) -> None:
    """Fewer heads of keys and values than of queries, whose columns are behind the queries'."""
    from vivace.machinery.kernels.qk_norm_rope import qk_norm_rope

    batch, length, heads, channels = like[0].shape
    few = heads // 2
    width = (heads + 2 * few) * channels
    narrow = qkv[:, :width].contiguous()
    grouped = [
        torch.zeros_like(like[0]),
        *(like[0].new_zeros(batch, length, few, channels) for _ in range(2)),
    ]
    qk_norm_rope(narrow, None, weights, *angles, tokens, *grouped, scales, 1e-6, (heads, few))  # type: ignore[call-arg]
    expected = ref.qk_norm_rope(narrow.double(), None, weights.double(), *angles, tokens, heads, 1e-6, few)
    factors = (1, 1, 1) if scales is None else (*scales[0], scales[1])
    quantized = scales is not None
    for got, want, factor in zip(grouped[:2], expected[:2], factors[:2], strict=True):
        assert error(got.double() * float(factor), want) < allowed(quantized, str(qkv.device.type))
    values = (grouped[2].double() * float(factors[2])).clamp(-1e30, 1e30)
    assert error(values, expected[2]) < allowed(quantized, str(qkv.device.type))


def check_rms_norm_modulated(
    kind: str, tokens: TokenLayout, channels: int, quantize: bool, device: str
) -> None:
    """A branch whose rows have scales, and a norm without a mean."""
    from vivace.machinery.kernels.norm_modulate import residual_norm

    x = random(kind, tokens.num_rows, channels, device=device) + 2
    y = random("normal", tokens.num_rows, channels, device=device, seed=1)
    vectors = random("normal", tokens.batch, 3 * channels, device=device, seed=3).float()
    at = [Modulation(k * channels, k * channels) for k in range(3)]
    wanted_x = ref.add_gated(x.double(), y.double(), None, vectors.double(), at[0], tokens)
    dtype = eight_bits(device) if quantize else torch.bfloat16
    out = poisoned(tokens.num_rows, channels, dtype=dtype, device=device)
    scale = torch.tensor([1.3], device=device) if quantize else None
    residual_norm(x, Branch(y, at[0]), vectors, (at[1], at[2]), tokens, out, scale, 1e-5, False)
    assert error(x, wanted_x) < SIXTEEN_BITS
    expected = ref.norm_modulate(x.double(), vectors.double(), at[1], at[2], tokens, 1e-5, False)
    actual = out.double() * (1.0 if scale is None else 1.3)
    assert error(actual, expected) < allowed(quantize, device)


def check_sigmoid_gate(kind: str, rows: int, channels: int, quantize: bool, device: str) -> None:
    from vivace.machinery.kernels.gates import sigmoid_gate

    x = random(kind, rows, channels, device=device)
    gate = random("normal", rows, 2 * channels, device=device, seed=1)[:, channels:]
    expected = x.double() * gate.double().sigmoid()
    dtype = eight_bits(device) if quantize else torch.bfloat16
    wide = poisoned(rows, channels + 16, dtype=dtype, device=device)
    scale = ref.scale_of(x.float().abs().amax().reshape(1)) if quantize else None
    sigmoid_gate(x, gate, wide[:, :channels], scale)
    made = wide[:, :channels].double() * (1 if scale is None else scale.double())
    assert error(made, expected) < allowed(quantize, device)
    assert wide[:, channels:].float().isnan().all()
    if scale is not None:  # what is in e4m3 already keeps its scale
        eight = (x.float() / scale).clamp(-448, 448).to(dtype)
        sigmoid_gate(eight, gate, wide[:, :channels])
        expected = eight.double() * gate.double().sigmoid()
        assert error(wide[:, :channels], expected) < allowed(quantize, device)


def check_peer_barrier(device: str) -> None:
    """Three GPUs' memory on one device: the second GPU waits for what the first and third have written."""
    from vivace.machinery.kernels.peer_barrier import peer_barrier

    def counts(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device)

    count, slots = counts(4), (counts(0, 4, 0), counts(5, 0, 6), counts(5, 4, 0))
    peer_barrier(count, slots, counts(0), 1)
    assert count.tolist() == [5]
    assert [of.tolist() for of in slots] == [[0, 5, 0], [5, 0, 6], [5, 5, 0]]
    peer_barrier(count, slots, counts(1 << 62), 1)  # the first is not there, and will not come
    assert count.tolist() == [6]
    assert slots[2].tolist() == [5, 6, 0]


def check_scaled_branch(device: str) -> None:
    """A branch whose rows have scales, and a norm of another eps."""
    from vivace.machinery.kernels.norm_modulate import residual_norm

    tokens, channels = TokenLayout(2, 0, 6), 48
    x = random("normal", tokens.num_rows, channels, device=device)
    y = random("normal", tokens.num_rows, channels, device=device, seed=1)
    bias = random("normal", 1, channels, device=device, seed=2)
    modulations = random("normal", 1, 3 * channels, device=device, seed=3).expand(2, -1)
    scales = torch.rand(tokens.num_rows, generator=torch.Generator().manual_seed(4)).to(device)
    at = [Modulation(k * channels, k * channels) for k in range(3)]
    change = y.double() * scales.double()[:, None]
    wanted_x = ref.add_gated(x.double(), change, bias.double(), modulations.double(), at[0], tokens)
    out = poisoned(tokens.num_rows, channels, dtype=torch.bfloat16, device=device)
    residual_norm(x, Branch(y, at[0], bias, scales), modulations, (at[1], at[2]), tokens, out, eps=0.5)
    assert error(x, wanted_x) < SIXTEEN_BITS
    expected = ref.norm_modulate(x.double(), modulations.double(), at[1], at[2], tokens, 0.5)
    assert error(out, expected) < SIXTEEN_BITS


def part_of_wider(
    shape: tuple[int, ...], channels: int, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows (*shape, channels) that are part of wider ones, as with LoRAs, and what is behind them."""
    whole = poisoned(*shape, channels + 16, dtype=dtype, device=device)
    return whole[..., :channels], whole[..., channels:]


def check_group_norm(
    kind: str, batch: int, pixels: int, channels: int, groups: int, adds: bool, silu: bool, device: str
) -> None:
    from vivace.machinery.kernels.group_norm import group_norm

    x = random(kind, batch, pixels, channels, device=device)
    if kind == "normal":
        x = x + 100  # a mean that is large beside the deviations
    weight = random("normal", channels, device=device, seed=1)
    bias = random("normal", channels, device=device, seed=2)
    added = random("normal", batch, channels, device=device, seed=3) if adds else None
    wide = (weight.double(), bias.double(), 1e-5, None if added is None else added.double())
    expected = ref.group_norm(x.double(), groups, *wide, silu)
    scale = torch.full((1,), 0.5, device=device)
    for small in (0, 16384):  # in three kernels, and in one
        out = poisoned(batch, pixels, channels, dtype=torch.bfloat16, device=device)
        group_norm(x, out, groups, weight, bias, 1e-5, added, silu, small)
        assert error(out, expected) < SIXTEEN_BITS
        rounded = poisoned(batch, pixels, channels, dtype=eight_bits(device), device=device)
        group_norm(x, rounded, groups, weight, bias, 1e-5, added, silu, small, scale)
        assert error(rounded.double() * 0.5, expected) < allowed(True, device)
        wider, beyond = part_of_wider((batch, pixels), channels, eight_bits(device), device)
        group_norm(x, wider, groups, weight, bias, 1e-5, added, silu, small, scale)
        assert wider.float().equal(rounded.float())
        assert beyond.float().isnan().all()
        for width in (pixels, 5) if adds and pixels % 5 == 0 else ():
            height = pixels // width
            rows = poisoned(
                batch * (height + 1) * (width + 1), channels, dtype=eight_bits(device), device=device
            )
            images = PaddedImages(rows, batch, height, width, scale)
            group_norm(x, images, groups, weight, bias, 1e-5, added, silu, small)
            assert error(images.unpadded().double().flatten(1, 2) * 0.5, expected) < allowed(True, device)
            assert rows.float().count_nonzero() == images.unpadded().float().count_nonzero(), (
                "padding is zeros"
            )


def check_geglu(kind: str, rows: int, channels: int, biased: bool, quantize: bool, device: str) -> None:
    from vivace.machinery.kernels.gates import geglu
    from vivace.machinery.kernels.quantize_e4m3 import quantize_rows

    up = random(kind, rows, 2 * channels, device=device)
    bias = random("normal", 2 * channels, device=device, seed=1) if biased else None
    expected = ref.geglu(up.double(), None if bias is None else bias.double())
    out = poisoned(rows, channels, dtype=eight_bits(device) if quantize else torch.bfloat16, device=device)
    scales = torch.full((rows,), float("nan"), device=device) if quantize else None
    geglu(up, bias, out, scales)
    actual = out.double() if scales is None else out.double() * scales.double()[:, None]
    assert error(actual, expected) < allowed(quantize, device)
    wider, beyond = part_of_wider((rows,), channels, out.dtype, device)
    geglu(up, bias, wider, scales)
    assert wider.float().equal(out.float())
    assert beyond.float().isnan().all()
    if scales is not None:
        x = up[:, :channels].contiguous()
        out = poisoned(rows, channels, dtype=eight_bits(device), device=device)
        quantize_rows(x, out, scales)
        assert error(out.double() * scales.double()[:, None], x) < allowed(True, device)
        wider, beyond = part_of_wider((rows,), channels, out.dtype, device)
        quantize_rows(x, wider, scales)
        assert wider.float().equal(out.float())
        assert beyond.float().isnan().all()


def check_swiglu(kind: str, rows: int, hidden: int, channels: int, quantize: bool, device: str) -> None:
    """Alone without channels, else beside attention's output in bf16, and in e4m3 with a scale."""
    from vivace.machinery.kernels.gates import swiglu

    wide = random(kind, rows, 24 + 2 * hidden, device=device)
    up = wide[:, 24:]
    mean = random(kind, rows, channels, device=device, seed=1)
    for unit in (None, torch.full((1,), 3e-3, device=device)) if channels and quantize else (None,):
        eight = None if unit is None else (mean.float() / unit).clamp(-448, 448).to(eight_bits(device))
        attended = mean if eight is None else eight
        expected = ref.swiglu(up.double())
        if channels:
            expected = torch.cat(
                [attended.double() * (1 if unit is None else unit.double()), expected], dim=1
            )
        dtype = eight_bits(device) if quantize else torch.bfloat16
        out = poisoned(rows, channels + hidden, dtype=dtype, device=device)
        scales = torch.full((rows,), float("nan"), device=device) if quantize else None
        swiglu(up, out, scales, attended if channels else None, unit)
        assert error(out.double() * (1 if scales is None else scales.double()[:, None]), expected) < allowed(
            quantize, device
        )
        if scales is None:
            continue
        assert out.double().abs().amax() <= ref.E4M3_MAX * (1 + 1e-6)
        if unit is not None:
            assert (torch.frexp(scales / unit).mantissa == 0.5).all(), (
                "a power of two times attention's scale"
            )
            of_attention = out[:, :channels].double() * scales.double()[:, None]
            assert device == "cuda" or error(of_attention, expected[:, :channels]) < 1e-6, "not rounded twice"


def check_rms_residual(
    kind: str, images: int, length: int, channels: int, adds: bool, scaled: bool, quantize: bool, device: str
) -> None:
    from vivace.machinery.kernels.rms_residual import rms_residual

    rows = images * length
    x = random(kind, rows, channels, device=device)
    y = random(kind, rows, channels, device=device, seed=1)
    vectors = random("normal", images, 3 * channels, device=device, seed=2).float()
    row_scales = torch.linspace(0.1, 3, rows, device=device) if scaled else None
    scale = torch.tensor([0.05], device=device) if quantize else None
    change = y.double() if row_scales is None else y.double() * row_scales.double()[:, None]
    wanted_x = x.double()
    if adds:
        gate = ref.for_each_row(vectors.double(), channels, channels, rows)
        wanted_x = wanted_x + ref.rms_normal(change, 1e-5) * gate
    out = poisoned(rows, channels, dtype=eight_bits(device) if quantize else torch.bfloat16, device=device)
    rms_residual(x, y if adds else None, row_scales, vectors, channels, 2 * channels, out, scale, 1e-5)
    assert error(x, wanted_x) < SIXTEEN_BITS
    weight = ref.for_each_row(vectors.double(), 2 * channels, channels, rows)
    expected = ref.rms_normal(x.double(), 1e-5) * weight
    if scale is not None:
        expected = (expected / scale.double()).clamp(-ref.E4M3_MAX, ref.E4M3_MAX)
        out = out.float().clamp(-ref.E4M3_MAX, ref.E4M3_MAX)
    assert error(out, expected) < allowed(quantize, device)
    before = x.clone()
    rms_residual(x, y, row_scales, vectors, 0, 0, None, None, 1e-5)
    assert error(x, before.double() + ref.rms_normal(change, 1e-5) * ref.for_each_row(
        vectors.double(), 0, channels, rows
    )) < SIXTEEN_BITS  # fmt: skip


def check_cross_attention(
    kind: str, sizes: tuple[int, int, int], heads: int, channels: int, quantize: bool, device: str
) -> None:
    """Attention of (batch, tokens, words); "sharp": with logits of hundreds."""
    from vivace.machinery.kernels.cross_attention import cross_attention

    batch, tokens, words = sizes
    of_values = "normal" if kind == "sharp" else kind
    projected = random(of_values, batch, tokens, 2, heads, channels, device=device)
    texts = random(of_values, batch, words, 3, 2, heads, channels, device=device, seed=1)
    if device == "cpu":
        projected, texts = projected.float(), texts.float()  # the interpreter takes bf16's bits for integers
    q = projected[:, :, 1] * (100 if kind == "sharp" else 1)
    k, v = texts[:, :, 1].unbind(2)
    heads_first = [tensor.double().transpose(1, 2) for tensor in (q, k, v)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads_first).transpose(1, 2)
    dtype = eight_bits(device) if quantize else torch.bfloat16
    made = poisoned(batch * tokens + 64, heads, channels, dtype=dtype, device=device)
    out = made[: batch * tokens].unflatten(0, (batch, tokens))
    scale = ref.scale_of(v.float().abs().amax().reshape(1)) if quantize else None
    cross_attention(q, k, v, out, scale)
    assert error(out.double() * (1 if scale is None else scale.double()), expected) < allowed(
        quantize, device
    )
    assert made[batch * tokens :].float().isnan().all()
    wider, beyond = part_of_wider((batch, tokens), heads * channels, dtype, device)
    cross_attention(q, k, v, wider.unflatten(2, (heads, channels)), scale)
    assert wider.float().equal(out.flatten(2).float())
    assert beyond.float().isnan().all()


def check_add_biased(rows: int, channels: int, device: str) -> None:
    from vivace.machinery.kernels.convolution import add_biased

    x = random("normal", rows, channels, device=device)
    y = random("outliers", rows, channels, device=device, seed=1)
    bias = random("normal", channels, device=device, seed=2)
    out = poisoned(rows, channels, dtype=torch.bfloat16, device=device)
    add_biased(x, y, bias, out)
    assert error(out, x.double() + y.double() + bias.double()) < SIXTEEN_BITS


def check_convolve(
    kind: str,
    images: tuple[int, int, int],
    inputs: int,
    outputs: int,
    device: str,
    enlarges: bool = False,
    every_division: bool = False,
) -> None:
    """A convolution of (batch, height, width) in several divisions, on a GPU in e4m3, and in bf16 where it enlarges."""
    from vivace.machinery.kernels.convolution import convolve
    from vivace.machinery.kernels.convolution_tiles import Tiles, candidates

    dtype = eight_bits(device) if device == "cpu" or not enlarges else torch.bfloat16
    batch, height, width = images
    pixels = random(kind, batch, height * width, inputs, device=device) / 8
    x = ref.padded(pixels.clamp(-ref.E4M3_MAX, ref.E4M3_MAX).to(dtype), height, width)
    weight = random("normal", 9, outputs, inputs, device=device, seed=1)
    if enlarges:
        weight = ref.enlarging(weight.permute(1, 2, 0).unflatten(2, (3, 3)))
    weight = weight.to(dtype).contiguous()
    scales = torch.rand(outputs, generator=torch.Generator().manual_seed(2)).to(device)
    num_pixels = batch * height * width * (4 if enlarges else 1)
    bias = random("normal", outputs, device=device, seed=3)
    residual = random("normal", num_pixels, outputs, device=device, seed=4)
    wide = PaddedImages(x.rows.double(), *images)
    small = (
        Tiles(128, 32, 16, 32, 1),
        Tiles(128, 64, 0, 64, 2),
        Tiles(128, 32, 0, 32, 9),
        Tiles(256, 128, 32, 64, 1),
    )
    own = [tile for tile in candidates(weight) if tile.splits in (1, 3)] if every_division else small
    for tiles in (None, *own):
        for more in ((None, None), (bias, residual)):
            expected = ref.convolve(wide, weight.double(), scales.double(), *more)
            out = poisoned(num_pixels, outputs, dtype=torch.bfloat16, device=device)
            convolve(x, weight, scales, out, *more, tiles)  # type: ignore[call-arg]
            assert error(out, expected) < SIXTEEN_BITS, (tiles, more)


def check_of_unets(device: str) -> None:
    """Every kernel that UNets use and FLUX does not."""
    check_scaled_branch(device)
    for kind in KINDS:
        for adds, silu in ((False, False), (False, True), (True, True)):
            check_group_norm(kind, 2, 35, 96, 8, adds, silu, device)
        check_group_norm(kind, 1, 300, 40, 4, True, True, device)
        for quantize in (False, True):
            check_geglu(kind, 5, 72, True, quantize, device)
            check_geglu(kind, 3, 128, False, quantize, device)
        check_cross_attention(kind, (2, 70, 77), 2, 40, kind == "normal", device)
        check_cross_attention(kind, (2, 9, 231), 3, 8, kind != "normal", device)
    for channels in (5, 64, 80, 160):
        for words in (1, 154):
            check_cross_attention("sharp", (1, 65, words), 2, channels, words > 1, device)
    check_cross_attention("normal", (2, 129, 80), 33, 16, True, device)  # 128 queries a program
    check_group_norm("normal", 1, 1, 600, 2, False, False, device)
    check_add_biased(7, 600, device)
    check_add_biased(130, 40, device)


def check_quantize(kind: str, rows: int, channels: int, device: str) -> None:
    from vivace.machinery.kernels.quantize_e4m3 import quantize

    x = random(kind, rows, channels, device=device)
    scale = ref.quantize_whole(x)[1] * 2
    wide = poisoned(rows, channels + 16, dtype=eight_bits(device), device=device)
    quantize(x, wide[:, :channels], scale)
    assert error(wide[:, :channels].double() * scale.double(), x) < allowed(True, device)
    assert wide[:, channels:].float().isnan().all()


def check_skinny_product(rows: int, outputs: int, channels: int, quantize: bool, device: str) -> None:
    from vivace.machinery.kernels.skinny_product import skinny_product

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
    expected = x.double() @ wide.T + bias.double()
    out = poisoned(rows, outputs, dtype=torch.bfloat16, device=device)
    skip = torch.ones(1, dtype=torch.int32, device=device)
    skinny_product(x, weight, scale, bias, out, skip)
    assert out.isnan().all(), "nothing is written"
    skinny_product(x, weight, scale, bias, out, skip * 0)
    assert error(out, expected) < SIXTEEN_BITS
    out.fill_(float("nan"))
    skinny_product(x, weight, scale, bias, out)
    assert error(out, expected) < SIXTEEN_BITS


def cases() -> Iterator[tuple[str, TokenLayout]]:
    for kind in KINDS:
        for tokens in LAYOUTS:
            yield kind, tokens
