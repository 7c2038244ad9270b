"""Compile fused models' kernels for a Hopper GPU, without one: `python -m tests.unit.kernels.compiled_for_hopper`.

Models are applied on a CPU, and launches compile instead. So what the interpreter accepts and the compiler does not is
found where there is no GPU: types that differ between branches, blocks that no layout fits, more shared memory than a
multiprocessor has. Prints each kernel's registers, its stack (bytes of registers that were spilled) and its shared
memory.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tests import fused_unets
from tests.unit.fused import test_flux2_forward as flux2
from tests.unit.fused import test_flux_forward as flux
from tests.unit.fused import test_z_image_blocks as z_image
from tests.unit.kernels.stored_in_place import assert_all_threads_have_loaded
from vivace.machinery.fused import image_operations, operations
from vivace.machinery.kernels import (
    convolution,
    convolution_tiles,
    cross_attention,
    group_norm,
    peer_barrier,
    qk_norm_rope,
    reference,
    rms_residual,
    swiglu,
)
from vivace.techniques.fused import Fused

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 232_448
"""Bytes of a multiprocessor that one program can have."""


class NoDevice:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0


class Compiled:
    """The kernels that were compiled, each once."""

    def __init__(self) -> None:
        self.by_hash: dict[str, Any] = {}
        self._launch = JITFunction.run

    def run(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> Any:
        made = self._launch(kernel, *args, grid=grid, warmup=True, **more)
        if made.hash not in self.by_hash:
            self.by_hash[made.hash] = made
            print(
                f"{made.name}: {_resources(made)}, {made.metadata.shared} bytes of shared memory", flush=True
            )
            assert made.metadata.shared <= SHARED_MEMORY, "more than there is"
            assert_all_threads_have_loaded(made.name, made.asm["ttgir"])
        return made


def _resources(kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.check_output(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name], text=True
        )
    registers, stack = re.findall(r"REG:(\d+) STACK:(\d+)", told)[-1]
    return f"{registers} registers, {stack} bytes of stack"


@torch.no_grad()
def fused_models() -> None:
    for given in (
        Fused(precision="bf16"),
        Fused(precision="fp8", convolutions="fp8"),
    ):
        made = fused_unets.unet()
        given.apply(fused_unets.target(unet=made))
        made(**fused_unets.inputs(2, 7, 96, 64))  # GroupNorms of small groups and of large ones
    for given in (Fused(precision="bf16"), Fused(precision="fp8")):
        made = flux.transformer()
        given.apply(flux.target(made))
        made(**flux.inputs(1, 7, 5, 4))
        made = flux2.transformer()
        given.apply(flux.target(made))
        made(**flux2.inputs(1, 7, 5, 4))
        made = z_image.transformer()
        given.apply(flux.target(made))
        made(**z_image.inputs((7, 40), 4, 8))


def group_norms_of_sd15() -> None:
    for pixels, channels in ((4096, 320), (4096, 960), (1024, 640)):
        x = torch.zeros(2, pixels, channels, dtype=torch.bfloat16)
        rows = torch.zeros(2 * (pixels // 64 + 1) * 65, channels, dtype=torch.float8_e4m3fn)
        images = reference.PaddedImages(rows, 2, pixels // 64, 64, torch.ones(1))
        for out, silu in ((x, False), (images, True)):
            group_norm.group_norm(x, out, 32, x[0, 0], x[0, 0], 1e-5, None, silu)


def all_divisions() -> None:
    for dtype, planes in ((torch.float8_e4m3fn, 9), (torch.bfloat16, 16)):
        for pixels, channels in ((64, 320), (32, 640)):
            x = reference.padded(torch.zeros(2, pixels * pixels, channels, dtype=dtype), pixels, pixels)
            weight = torch.zeros(planes, channels, channels, dtype=dtype)
            out = torch.zeros(x.num_pixels * (1 if planes == 9 else 4), channels, dtype=torch.bfloat16)
            residual = out if planes == 9 else None
            for tiles in (one for one in convolution_tiles.candidates(weight) if one.splits in (1, 3)):
                convolution.convolve(x, weight, torch.ones(channels), out, out[0], residual, tiles)


def attention_to_texts() -> None:
    """Of SD 1.5's heads and SDXL's, to one prompt and to two."""
    for tokens, heads, channels in ((4096, 8, 40), (4096, 10, 64), (4096, 8, 80), (256, 8, 160)):
        q = torch.zeros(2, tokens, heads, channels, dtype=torch.bfloat16)
        for words in (77, 154):
            k, v = torch.zeros(2, words, 2, heads, channels, dtype=torch.bfloat16).unbind(2)
            for dtype, scale in ((torch.bfloat16, None), (torch.float8_e4m3fn, torch.ones(1))):
                print(f"{channels} channels, {words} words, {dtype}:", flush=True)
                cross_attention.cross_attention(q, k, v, torch.empty_like(q, dtype=dtype), scale)


def queries_apart() -> None:
    """As among several GPUs, where keys and values are sent meanwhile."""
    tokens, qkv = reference.TokenLayout(1, 128, 1024), torch.zeros(1152, 9216, dtype=torch.bfloat16)
    norms, angles = torch.zeros(2, 2, 128, dtype=torch.bfloat16), torch.zeros(1152, 64)
    q = torch.zeros(1, 1152, 24, 128, dtype=torch.float8_e4m3fn)
    k, v = torch.zeros(1, 1152, 2, 24, 128, dtype=torch.float8_e4m3fn).unbind(2)
    scales = (torch.ones(2), torch.ones(2))
    for onto in ((q, None, None), (None, k, v), (q, k, v)):
        qk_norm_rope.qk_norm_rope(qkv, qkv[:2], norms, angles, angles, tokens, *onto, scales)  # type: ignore[call-arg]


def mlps_of_flux2() -> None:
    """Of [klein] 4B and 9B and of [dev], alone and beside attention's output in e4m3."""
    for channels in (3072, 4096, 6144):
        hidden = 3 * channels
        up = torch.zeros(2, 3 * channels + 2 * hidden, dtype=torch.bfloat16)[:, 3 * channels :]
        attended, unit = torch.zeros(2, channels, dtype=torch.float8_e4m3fn), torch.ones(1)
        for beside in ((), (attended, unit)):
            out = torch.zeros(2, hidden + (channels if beside else 0), dtype=torch.float8_e4m3fn)
            print(f"{channels} channels:", flush=True)
            swiglu.swiglu(up, out, torch.zeros(2), *beside)


def norms_of_z_image() -> None:
    x, vectors = torch.zeros(4, 3840, dtype=torch.bfloat16), torch.zeros(1, 4 * 3840)
    out = torch.zeros(4, 3840, dtype=torch.float8_e4m3fn)
    for scales in (None, torch.ones(4)):
        rms_residual.rms_residual(x, x, scales, vectors, 0, 3840, out, torch.ones(1), 1e-5)


def barriers() -> None:
    for gpus in (2, 4):
        count, abandoned = (torch.zeros(1, dtype=torch.int64) for _ in range(2))
        slots = tuple(torch.zeros(gpus, dtype=torch.int64) for _ in range(gpus))
        peer_barrier.peer_barrier(count, slots, abandoned, 1)


if __name__ == "__main__":
    triton.runtime.driver.set_active(NoDevice())
    compiled = Compiled()
    with (
        mock.patch.object(
            JITFunction, "run", lambda kernel, *args, **more: compiled.run(kernel, *args, **more)
        ),
        mock.patch.object(operations, "takes_kernels", lambda x: not x.is_meta),
        mock.patch.object(image_operations, "takes_kernels", lambda x: not x.is_meta),
    ):
        fused_models()
        group_norms_of_sd15()
        all_divisions()
        attention_to_texts()
        queries_apart()
        mlps_of_flux2()
        norms_of_z_image()
        barriers()
    print(f"{len(compiled.by_hash)} kernels")
