"""Division of a convolution into tiles: the divisions that fit a GPU's shared memory, and the fastest of them.

A step copies a tile's pixels and weights to shared memory, and the copies of the next steps run ahead of the matmuls,
so that each has a buffer of its own. How many the compiler keeps differs by generation (Triton 3.6, compiled for each):
one for every step in flight on Hopper and on Blackwell's data centre chips, whose matmuls read shared memory, one less
on an RTX 50, which has two fifths of their shared memory, and a single one on Ada, where nothing is copied ahead.
Times are measured on Hopper, and a guess elsewhere: only the number of multiprocessors is the GPU's own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vivace.foundation.hardware import shared_memory_bytes
from vivace.machinery.kernels.reference import side_and_scale

if TYPE_CHECKING:
    import torch

    from vivace.machinery.kernels.reference import PaddedImages

_LINE = 128
"""The bytes of a row that are copied to shared memory in a step, at best."""
_SPLITS = (1, 2, 3, 5, 9)
_STEPS_US = {
    (128, 64, 0): 0.332,
    (128, 128, 0): 0.437,
    (128, 128, 32): 0.566,
    (128, 128, 128): 0.823,
    (256, 64, 0): 0.539,
    (256, 128, 0): 0.824,
    (256, 128, 32): 1.126,
}
"""Microseconds of a step over 128 bytes of channels, by a tile's rows and its two blocks of output channels."""
_HALF_LINE = 0.627
"""Share of that time which a step over 64 bytes takes."""
_BARRIERS = 128
"""Bytes for the barriers of the copies; up to 88 were observed."""
_MOST_SUMS = 65_536
"""Bytes of sums in fp32 that are rearranged at a time on Ada."""
_LAUNCH_US, _EPILOGUE_US = 2.325, 2.779
"""Of a kernel, and to write a tile of 128 x 128."""
_SUM_US, _SUM_US_A_MEGABYTE = 1.189, 0.511
"""To add the partial sums that splits leave. All of these are fitted to 1,540 measurements on an H100; what is
chosen by them takes at most 12 % longer there than the best (`python -m benchmarks.unet_kernels`,
results/unet-kernels.jsonl)."""


@dataclass(frozen=True)
class Tiles:
    """How a convolution is divided.

    Attributes:
        rows: of a tile.
        main, extra: output channels of a tile, as two powers of two; the second may be 0.
        block: input channels of a step.
        splits: programs that share a tile's sum.
    """

    rows: int
    main: int
    extra: int
    block: int
    splits: int

    @property
    def channels(self) -> int:
        return self.main + self.extra

    @property
    def stages(self) -> int:
        """Steps in flight: the one that is multiplied, and those that are copied meanwhile."""
        return 4 if self.rows + self.channels <= 288 else 3

    def shared_memory(self, element_bytes: int, capability: tuple[int, int]) -> int:
        """Return the bytes of shared memory that the compiler needs for it, rounded up.

        Below Hopper, Triton has no TMA, and copies no step ahead. What is left is a step, or the sums on their way to
        threads that store neighbours.
        """
        step = (self.rows + self.channels) * self.block * element_bytes
        if capability[0] < 9:
            return max(step, min(4 * self.rows * self.main, _MOST_SUMS)) + _BARRIERS
        is_read_by_matmuls = capability[0] in (9, 10)
        return (self.stages if is_read_by_matmuls else self.stages - 1) * step + _BARRIERS


@dataclass(frozen=True)
class BlockLimits:
    """What a GPU gives to one program: bytes of shared memory. Compute capability, which says what it makes of them.

    multiprocessors: programs that run at a time.
    """

    shared_memory: int
    capability: tuple[int, int]
    multiprocessors: int = 132


HOPPER = BlockLimits(232_448, (9, 0))


def limits_of(device: torch.device) -> BlockLimits:
    """Return a GPU's limits; Hopper's for a CPU, where Triton interprets or only compiles."""
    return HOPPER if device.type != "cuda" else _limits_of_gpu(device.index or 0)


@functools.cache
def _limits_of_gpu(index: int) -> BlockLimits:
    import torch

    gpu = torch.cuda.get_device_properties(index)
    capability = (int(gpu.major), int(gpu.minor))
    # AMD's builds of PyTorch do not say it.
    optin = getattr(gpu, "shared_memory_per_block_optin", None) or shared_memory_bytes(capability)
    return BlockLimits(optin or HOPPER.shared_memory, capability, int(gpu.multi_processor_count))


def candidates(weight: torch.Tensor, limits: BlockLimits | None = None) -> list[Tiles]:
    """Return the divisions for a number of input channels that a GPU has memory for."""
    limits = limits or limits_of(weight.device)
    width = weight.element_size()
    line = _LINE // width
    blocks = (line, line // 2) if weight.shape[-1] % line else (line,)  # the last one may be partly empty
    divisions = [Tiles(*size, block, splits) for size in _STEPS_US for block in blocks for splits in _SPLITS]
    return [t for t in divisions if t.shared_memory(width, limits.capability) <= limits.shared_memory]


def choose(x: PaddedImages, weight: torch.Tensor, limits: BlockLimits | None = None) -> Tiles:
    """Return the division that should take the least time, of those that a GPU has memory for.

    Copies from the L2 cache, not tensor cores, are the limit, so tiles differ in what a step takes.
    """
    limits = limits or limits_of(weight.device)
    planes, channels, inputs = weight.shape
    side, scale = side_and_scale(planes)
    places = scale * scale

    def cost(tiles: Tiles) -> float:
        num_steps = side * side * _ceil(inputs, tiles.block)
        steps = _ceil(num_steps, tiles.splits)
        splits = _ceil(num_steps, steps)
        columns = _ceil(channels, tiles.channels)
        programs = _ceil(x.num_needed_rows, tiles.rows) * columns * splits * places
        step = _STEPS_US[tiles.rows, tiles.main, tiles.extra]
        if tiles.block * weight.element_size() < _LINE:
            step *= _HALF_LINE
        epilogue = _EPILOGUE_US * tiles.rows * tiles.channels / 128**2
        took = _LAUNCH_US + _ceil(programs, limits.multiprocessors) * (steps * step + epilogue)
        if splits > 1:
            megabytes = x.num_pixels * places * channels * (4 * splits + 2) / 1e6
            took += _SUM_US + _SUM_US_A_MEGABYTE * megabytes
        return float(took)

    return min(candidates(weight, limits), key=cost)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
