"""What launches every kernel that runs on a GPU of some compute capability, with the shapes of models.

Models are applied on a CPU. Whoever calls this has replaced Triton's launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from tests import fused_unets
from tests.unit.fused import test_flux as flux
from tests.unit.fused import test_flux2 as flux2
from tests.unit.fused import test_krea2 as krea2
from tests.unit.fused import test_later_models as later
from tests.unit.fused import test_qwen_image as qwen_image
from tests.unit.fused import test_qwen_image21 as qwen_image21
from tests.unit.fused import test_sd3 as sd3
from tests.unit.fused import test_z_image as z_image
from vivace.foundation.hardware import shared_memory_bytes
from vivace.machinery.fused import image_operations, modulations, operations
from vivace.machinery.kernels import (
    convolution,
    convolution_tiles,
    cross_attention,
    dequantize_int4,
    gates,
    group_norm,
    peer_barrier,
    qk_norm_rope,
    reference,
    rms_residual,
    rotate_rows,
)
from vivace.machinery.quantization.rotated_int8 import block_of
from vivace.machinery.technique import Machine, Target
from vivace.techniques import fused
from vivace.techniques.fused import Fused

Capability = tuple[int, int]
_RECIPES = {
    "fused(bf16)": Fused(precision="bf16"),
    "fused(fp8)": Fused(precision="fp8"),
    "fused(fp8, convolutions=fp8)": Fused(precision="fp8", convolutions="fp8"),
}


def recipes(capability: Capability) -> dict[str, Fused]:
    """Return the recipes that launch kernels and are supported on a GPU of this capability."""
    target = Target.of_machine(Machine("cuda", "the GPU", capability, "c++", has_all_packages=True))
    return {text: technique for text, technique in _RECIPES.items() if technique.unsupported(target) is None}


def launch_all(capability: Capability) -> None:
    """Launch every kernel that runs on a GPU of this capability."""
    allowed = recipes(capability)
    has_fp8 = "fused(fp8)" in allowed
    with _as_on(capability):
        fused_models(allowed)
        group_norms_of_sd15("fused(fp8, convolutions=fp8)" in allowed)
        all_divisions("fused(fp8, convolutions=fp8)" in allowed, fused.enlarges_on(capability))
        attention_to_texts(has_fp8)
        mlps_of_flux2(has_fp8)
        norms_of_z_image(has_fp8)
        gates_of_krea2(has_fp8)
        if has_fp8:
            queries_apart()
        int4_weights()
        rotated_rows()
        barriers()


@contextmanager
def _as_on(capability: Capability) -> Iterator[None]:
    """Have models on a CPU launch what they launch on a GPU of this capability."""
    num_bytes = shared_memory_bytes(capability)
    assert num_bytes is not None
    limits = convolution_tiles.BlockLimits(num_bytes, capability)
    with (
        mock.patch.object(operations, "takes_kernels", lambda x: not x.is_meta),
        mock.patch.object(image_operations, "takes_kernels", lambda x: not x.is_meta),
        mock.patch.object(modulations, "takes_kernels", lambda x: not x.is_meta),
        mock.patch.object(convolution_tiles, "limits_of", return_value=limits),
        mock.patch.object(fused, "_enlarges", return_value=fused.enlarges_on(capability)),
    ):
        yield


@torch.no_grad()
def fused_models(allowed: dict[str, Fused]) -> None:
    for text, technique in allowed.items():
        model = fused_unets.unet()
        technique.apply(fused_unets.target(unet=model))
        model(**fused_unets.inputs(2, 7, 96, 64))  # GroupNorms of small groups and of large ones
        if "convolutions" in text:
            continue  # transformers have none
        model = flux.transformer()
        technique.apply(flux.target(model))
        model(**flux.inputs(1, 7, 5, 4))
        model = flux2.transformer()
        technique.apply(flux.target(model))
        model(**flux2.inputs(1, 7, 5, 4))
        model = z_image.transformer()
        technique.apply(flux.target(model))
        model(**z_image.inputs((7, 40), 4, 8))
        model = qwen_image.transformer(zero_cond_t=True)
        technique.apply(flux.target(model))
        model(**qwen_image.inputs((7,), (4, 8), (3, 5)))
        model = sd3.transformer(channels=64)
        technique.apply(flux.target(model))
        model(**sd3.inputs(1, 7, 4, 5))
        model = krea2.transformer()
        technique.apply(flux.target(model))
        model(**krea2.inputs((7,), 9, 4, 8))
        model = qwen_image21.transformer()
        technique.apply(flux.target(model))
        qwen_image21.steps(model, qwen_image21.inputs((7,), (4, 4), (4, 8)))
        for form in later.FORMS:
            model = later.transformer(form)
            technique.apply(flux.target(model))
            model(**later.FORMS[form][2]((7,), 4, 8))


def group_norms_of_sd15(is_padded_in_fp8: bool) -> None:
    for pixels, channels in ((4096, 320), (4096, 960), (1024, 640)):
        x = torch.zeros(2, pixels, channels, dtype=torch.bfloat16)
        rows = torch.zeros(2 * (pixels // 64 + 1) * 65, channels, dtype=torch.float8_e4m3fn)
        images = reference.PaddedImages(rows, 2, pixels // 64, 64, torch.ones(1))
        for out, silu in ((x, False), (images, True))[: 1 + is_padded_in_fp8]:
            group_norm.group_norm(x, out, 32, x[0, 0], x[0, 0], 1e-5, None, silu)


def all_divisions(in_fp8: bool, enlarges: bool) -> None:
    """Of convolutions in e4m3, and of those in bf16 that enlarge."""
    kinds = [(torch.float8_e4m3fn, 9)] * in_fp8 + [(torch.bfloat16, 16)] * enlarges
    for dtype, planes in kinds:
        for pixels, channels in ((64, 320), (32, 640)):
            x = reference.padded(torch.zeros(2, pixels * pixels, channels, dtype=dtype), pixels, pixels)
            weight = torch.zeros(planes, channels, channels, dtype=dtype)
            out = torch.zeros(x.num_pixels * (1 if planes == 9 else 4), channels, dtype=torch.bfloat16)
            residual = out if planes == 9 else None
            for tiles in convolution_tiles.candidates(weight):
                if tiles.splits in (1, 3):
                    convolution.convolve(x, weight, torch.ones(channels), out, out[0], residual, tiles)


def attention_to_texts(has_fp8: bool) -> None:
    """Of SD 1.5's heads and SDXL's, to one prompt and to two."""
    for tokens, heads, channels in ((4096, 8, 40), (4096, 10, 64), (4096, 8, 80), (256, 8, 160)):
        q = torch.zeros(2, tokens, heads, channels, dtype=torch.bfloat16)
        for words in (77, 154):
            k, v = torch.zeros(2, words, 2, heads, channels, dtype=torch.bfloat16).unbind(2)
            cross_attention.cross_attention(q, k, v, torch.empty_like(q))
            if has_fp8:
                rounded = torch.empty_like(q, dtype=torch.float8_e4m3fn)
                cross_attention.cross_attention(q, k, v, rounded, torch.ones(1))


def queries_apart() -> None:
    """As among several GPUs, where keys and values are sent meanwhile."""
    tokens, qkv = reference.TokenLayout(1, 128, 1024), torch.zeros(1152, 9216, dtype=torch.bfloat16)
    norms, angles = torch.zeros(2, 2, 128, dtype=torch.bfloat16), torch.zeros(1152, 64)
    q = torch.zeros(1, 1152, 24, 128, dtype=torch.float8_e4m3fn)
    k, v = torch.zeros(1, 1152, 2, 24, 128, dtype=torch.float8_e4m3fn).unbind(2)
    scales = (torch.ones(2), torch.ones(2))
    for onto in ((q, None, None), (None, k, v), (q, k, v)):
        qk_norm_rope.qk_norm_rope(qkv, qkv[:2], norms, angles, angles, tokens, *onto, scales)  # type: ignore[call-arg]


def mlps_of_flux2(has_fp8: bool) -> None:
    """Of [klein] 4B and 9B and of [dev], alone and beside attention's output in e4m3."""
    for channels in (3072, 4096, 6144):
        hidden = 3 * channels
        up = torch.zeros(2, 3 * channels + 2 * hidden, dtype=torch.bfloat16)[:, 3 * channels :]
        if not has_fp8:
            gates.swiglu(up, torch.zeros(2, hidden, dtype=torch.bfloat16), None)
            continue
        attended, unit = torch.zeros(2, channels, dtype=torch.float8_e4m3fn), torch.ones(1)
        for beside in ((), (attended, unit)):
            out = torch.zeros(2, hidden + (channels if beside else 0), dtype=torch.float8_e4m3fn)
            gates.swiglu(up, out, torch.zeros(2), *beside)


def norms_of_z_image(has_fp8: bool) -> None:
    x, vectors = torch.zeros(4, 3840, dtype=torch.bfloat16), torch.zeros(1, 4 * 3840)
    out, scale = torch.zeros_like(x), None
    if has_fp8:
        out, scale = torch.zeros(4, 3840, dtype=torch.float8_e4m3fn), torch.ones(1)
    for row_scales in (None, torch.ones(4)):
        rms_residual.rms_residual(x, x, row_scales, vectors, 0, 3840, out, scale, 1e-5)


def gates_of_krea2(has_fp8: bool) -> None:
    """Of attention in bf16, rounded and not, and of attention in e4m3."""
    x = torch.zeros(4, 6144, dtype=torch.bfloat16)
    gates.sigmoid_gate(x, x, torch.empty_like(x))
    if has_fp8:
        eight = torch.zeros(4, 6144, dtype=torch.float8_e4m3fn)
        gates.sigmoid_gate(x, x, eight, torch.ones(1))
        gates.sigmoid_gate(eight, x, torch.empty_like(eight))


def int4_weights() -> None:
    for channels in (3072, 12_288):
        packed = torch.zeros(channels, 1536, dtype=torch.uint8)
        scale = zero = torch.zeros(channels, 24, dtype=torch.bfloat16)
        dequantize_int4.dequantize(packed, scale, zero, torch.bfloat16)


def rotated_rows() -> None:
    """Of the widths of models, in the precisions of inputs."""
    for channels in (640, 15_360):
        for dtype in (torch.float16, torch.bfloat16):
            rotate_rows.rotate_rows(torch.zeros(4, channels, dtype=dtype), block_of(channels))


def barriers() -> None:
    for gpus in (2, 4):
        count, abandoned = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
        slots = tuple(torch.zeros(gpus, dtype=torch.int64) for _ in range(gpus))
        peer_barrier.peer_barrier(count, slots, abandoned, 1)
