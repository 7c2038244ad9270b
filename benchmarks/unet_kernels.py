"""Time what was chosen by measuring for fused UNets: GroupNorm in one kernel or in three, kernels that take a token
each, convolutions of vivace's own by their divisions and beside cuDNN's, attention, whether cuDNN times its own
convolutions, and whole steps.

    python -m benchmarks.unet_kernels --record results/unet-kernels.jsonl

`--only KIND` times one of them, and keeps the record's lines of the others.

Shapes are those of SD 1.5 and SDXL with guidance, values random. Each case is captured in a CUDA graph, so that
launches by Python do not count, and the shortest of five replays is taken. A UNet's step is timed twice with each
setting, in turns. A line a case; docs/performance/unets.md tells what they mean.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, astuple
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

import vivace
from benchmarks.command import run
from benchmarks.record_files import write_text
from vivace.errors import Unsupported

if TYPE_CHECKING:
    import torch

NORMS = {
    64: (1280, 2560),
    256: (640, 1280, 1920, 2560),
    1024: (320, 640, 960, 1280, 1920, 2560),
    4096: (320, 640, 960, 1280),
}
"""Channels by pixels."""
TOKENS = {"fp8": ((2048, 1280), (8192, 640)), "bf16": ((8192, 320), (2048, 640), (512, 1280), (128, 1280))}
"""Rows and channels: of SDXL in fp8, of SD 1.5 in bf16."""
VAE_CONVOLUTIONS = {
    128: ((512, 512),),
    256: ((512, 512),),
    512: ((512, 256), (256, 256)),
    1024: ((256, 128), (128, 128)),
}
CONVOLUTIONS = {
    8: ((1280, 1280), (2560, 1280)),
    16: ((640, 1280), (1280, 1280), (1920, 1280), (2560, 1280)),
    32: ((320, 640), (640, 640), (960, 640), (1280, 640), (1920, 640), (1280, 1280), (2560, 1280)),
    64: ((320, 320), (640, 320), (960, 320), (640, 640), (1280, 640), (1920, 640)),
    128: ((320, 320), (640, 320), (960, 320)),
}
"""Input and output channels of residual blocks by height; widths are the same."""
ENLARGED = (
    *((2, height, 1280) for height in (8, 16, 32)),
    *((2, height, 640) for height in (32, 64)),
    *((1, height, 512) for height in (64, 128, 256)),
    *((1, height, 256) for height in (256, 512)),
)
"""Batch, height and channels in UNets and, one image at a time, in VAEs."""
WORDS = 77
"""Of a prompt."""
ATTENTION = (
    *((4096, keys, 8, 40) for keys in (4096, WORDS)),
    *((1024, keys, 8, 80) for keys in (1024, WORDS)),
    *((256, keys, 8, 160) for keys in (256, WORDS)),
    *((4096, keys, 10, 64) for keys in (4096, WORDS)),
    *((1024, keys, 20, 64) for keys in (1024, WORDS)),
)
"""Queries, keys, heads and channels of a head: of SD 1.5 at 512 px and of SDXL at 1024."""
MODELS = {"synthetic:sd15": ("fused", 64), "synthetic:sdxl": ("fused(fp8)", 128)}
"""Recipes, and the height of the latents."""
RECIPES = ("fused", "fused(fp8)", "fused(fp8, convolutions=fp8)")
_WHAT = {
    "norms": ("group_norm",),
    "tokens": ("residual_norm", "geglu", "quantize_rows"),
    "convolutions": ("convolution",),
    "enlarging": ("enlarging convolution",),
    "attention": ("attention",),
    "steps": ("step",),
    "recipes": ("step of a recipe",),
}
"""What lines of each kind are of."""
_GROUPS = 32
_CALLS = 20
_REPLAYS = 5
_LARGEST_TILE = 32768  # elements that one program can hold


@click.command("unet_kernels")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option(
    "--only",
    type=click.Choice(list(_WHAT)),
    multiple=True,
)
def unet_kernels(record: Path, only: tuple[str, ...]) -> int:
    """Time UNets' kernels and convolutions, and their steps with and without cuDNN's own timing, on one GPU."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("these are kernels of a GPU, and PyTorch sees none")
    import triton

    where = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    kinds = {
        "norms": _norms,
        "tokens": _tokens,
        "convolutions": _convolutions,
        "enlarging": _enlarging,
        "attention": _attention,
        "steps": _steps,
        "recipes": _recipes,
    }
    lines: list[str] = []
    if only and record.exists():
        selected = {what for kind in only for what in _WHAT[kind]}
        lines = [
            line
            for line in record.read_text(encoding="utf-8").splitlines()
            if json.loads(line)["what"] not in selected
        ]
    for figures in itertools.chain.from_iterable(kinds[kind]() for kind in only or kinds):
        lines.append(json.dumps(figures | where))
        click.echo(lines[-1])
        write_text(record, "\n".join(lines) + "\n")
    return 0


def _norms() -> Iterator[dict[str, Any]]:
    import torch
    import triton

    from vivace.machinery.kernels.group_norm import group_norm

    for pixels, widths in NORMS.items():
        for channels in widths:
            x = torch.randn(2, pixels, channels, device="cuda", dtype=torch.bfloat16)
            out, vector, added = torch.empty_like(x), x[0, 0].clone(), x[:, 0].clone()

            norm = partial(group_norm, x, out, _GROUPS, vector, vector, 1e-5, added, True)
            figures = {"what": "group_norm", "batch": 2, "pixels": pixels, "channels": channels}
            figures["three_kernels_us"] = round(_microseconds(partial(norm, 0)), 1)
            if pixels * triton.next_power_of_2(channels // _GROUPS) <= _LARGEST_TILE:
                figures["one_kernel_us"] = round(_microseconds(partial(norm, _LARGEST_TILE)), 1)
            yield figures


def _tokens() -> Iterator[dict[str, Any]]:
    import torch

    from vivace.machinery.kernels.gates import geglu
    from vivace.machinery.kernels.norm_modulate import residual_norm
    from vivace.machinery.kernels.quantize_e4m3 import quantize_rows
    from vivace.machinery.kernels.reference import Branch, Modulation, TokenLayout

    for precision, shapes in TOKENS.items():
        is_fp8 = precision == "fp8"
        for rows, channels in shapes:
            x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
            up = torch.randn(rows, 8 * channels, device="cuda", dtype=torch.bfloat16)
            out = torch.empty_like(x, dtype=torch.float8_e4m3fn if is_fp8 else x.dtype)
            wide = torch.empty(rows, 4 * channels, device="cuda", dtype=out.dtype)
            vectors = torch.randn(1, 7 * channels, device="cuda")
            scales, bias = (
                (x[:, 0].float().abs(), vectors[:, :channels].bfloat16()) if is_fp8 else (None, None)
            )
            shift, scale, gate = (Modulation(at * channels, at * channels) for at in (0, 1, 6))
            branch = Branch(x.clone(), gate, bias, scales)
            more = (TokenLayout(2, 0, rows // 2), out, vectors[0, :1] if is_fp8 else None)
            work = {
                "residual_norm": partial(
                    residual_norm, x, branch, vectors.expand(2, -1), (shift, scale), *more
                ),
                "geglu": partial(geglu, up, up[0] if is_fp8 else None, wide, scales),
            }
            if is_fp8:
                work["quantize_rows"] = partial(quantize_rows, x, out, scales)
            for what, call in work.items():
                took = round(_microseconds(call), 1)
                yield {"what": what, "precision": precision, "rows": rows, "channels": channels, "us": took}


def _convolutions() -> Iterator[dict[str, Any]]:
    import torch

    from vivace.machinery.kernels import reference
    from vivace.machinery.kernels.group_norm import group_norm

    for batch, shapes in ((2, CONVOLUTIONS), (1, VAE_CONVOLUTIONS)):
        for height, inputs, outputs in ((side, *pair) for side, pairs in shapes.items() for pair in pairs):
            image, weight, bias = _image(batch, inputs, height), _image(outputs, inputs, 3), _vector(outputs)
            residual = _image(batch, outputs, height)
            pixels = image.permute(0, 2, 3, 1).flatten(1, 2)
            planes = weight.flatten(2).permute(2, 0, 1).contiguous()
            rows = residual.permute(0, 2, 3, 1).flatten(0, 2)

            cudnn = partial(torch.nn.functional.conv2d, image, weight, padding=1)
            figures = {
                "what": "convolution",
                "batch": batch,
                "height": height,
                "inputs": inputs,
                "outputs": outputs,
            }
            figures["cudnn_bf16_us"] = round(_microseconds(cudnn), 1)
            figures["cudnn_bf16_and_sum_us"] = round(_microseconds(partial(_onto, residual, cudnn, bias)), 1)
            x = reference.padded(pixels.to(torch.float8_e4m3fn), height, height, torch.ones(1, device="cuda"))
            figures |= _own(x, planes.to(torch.float8_e4m3fn), bias, rows)
            norm = (_GROUPS, _vector(inputs), _vector(inputs), 1e-5, None, True)
            for name, out in (("norm_bf16_us", torch.empty_like(pixels)), ("norm_e4m3_us", x)):
                figures[name] = round(_microseconds(partial(group_norm, pixels, out, *norm)), 1)
            yield figures


def _enlarging() -> Iterator[dict[str, Any]]:
    """Convolutions of images that are enlarged twofold."""
    from vivace.machinery.fused.image_operations import pixels
    from vivace.machinery.kernels import reference

    for batch, height, channels in ENLARGED:
        image, weight, bias = (
            _image(batch, channels, height),
            _image(channels, channels, 3),
            _vector(channels),
        )
        planes = reference.enlarging(weight).to(weight.dtype).contiguous()
        figures = {"what": "enlarging convolution", "batch": batch, "height": height, "channels": channels}
        figures["cudnn_bf16_us"] = round(_microseconds(partial(_enlarge, image, weight, bias)), 1)
        pad = partial(reference.padded, pixels(image), height, height)
        figures["padding_us"] = round(_microseconds(pad), 1)
        yield figures | _own(pad(), planes, bias, None)


def _attention() -> Iterator[dict[str, Any]]:
    """Attention by PyTorch's kernels, by cuDNN's in e4m3, with heads of 48 channels instead of 40, and to a text by
    vivace's, with an output in bf16 and in e4m3."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from vivace.machinery.attention_backends.cudnn_fp8 import attend
    from vivace.machinery.kernels.cross_attention import cross_attention

    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    for queries, keys, heads, channels in ATTENTION:
        figures: dict[str, Any] = {"what": "attention", "batch": 2, "queries": queries, "keys": keys}
        figures |= {"heads": heads, "channels": channels}
        make = {"device": "cuda", "dtype": torch.bfloat16}
        q, k, v = (torch.randn(2, n, heads, channels, **make) for n in (queries, keys, keys))
        call = partial(
            torch.nn.functional.scaled_dot_product_attention,
            *(tensor.transpose(1, 2) for tensor in (q, k, v)),
        )
        figures["default_us"] = round(_microseconds(call), 1)
        for name, backend in backends.items():
            with sdpa_kernel(backend):
                figures[f"{name}_us"] = round(_microseconds(call), 1)
        wide = -(-channels // 16) * 16
        eight = [
            torch.zeros(2, n, heads, wide, **make).to(torch.float8_e4m3fn) for n in (queries, keys, keys)
        ]
        unit = torch.ones(2, device="cuda")
        in_fp8 = partial(attend, eight[0], eight[1], eight[2], unit, unit, torch.empty_like(eight[0]))
        figures["cudnn_e4m3_us"] = round(_microseconds(in_fp8), 1)
        if keys == WORDS:
            for name, dtype, scale in (("vivace", q.dtype, None), ("vivace_e4m3", torch.float8_e4m3fn, unit)):
                own = partial(cross_attention, q, k, v, torch.empty_like(q, dtype=dtype), scale)
                figures[f"{name}_us"] = round(_microseconds(own), 1)
        yield figures


def _own(x: Any, weight: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor | None) -> dict[str, Any]:
    """Time a convolution by each division of it; return the chosen and the fastest, and what each takes."""
    import torch

    from vivace.machinery.kernels.convolution import convolve
    from vivace.machinery.kernels.convolution_tiles import candidates, choose
    from vivace.machinery.kernels.reference import side_and_scale

    outputs = weight.shape[1]
    scales = torch.ones(outputs, device="cuda")
    num_pixels = x.num_pixels * side_and_scale(len(weight))[1] ** 2
    out = torch.empty(num_pixels, outputs, device="cuda", dtype=torch.bfloat16)
    took = {
        tiles: _microseconds(partial(convolve, x, weight, scales, out, bias, residual, tiles))
        for tiles in candidates(weight)
    }
    best, chosen = min(took, key=lambda tiles: took[tiles]), choose(x, weight)
    return {
        "chosen_us": round(took[chosen], 1),
        "best_us": round(took[best], 1),
        "chosen": asdict(chosen),
        "best": asdict(best),
        "divisions": [[*astuple(tiles), round(us, 1)] for tiles, us in took.items()],
    }


def _image(batch: int, channels: int, height: int) -> torch.Tensor:
    import torch

    made = torch.randn(batch, channels, height, height, device="cuda", dtype=torch.bfloat16)
    return made.contiguous(memory_format=torch.channels_last)


def _vector(channels: int) -> torch.Tensor:
    import torch

    return torch.randn(channels, device="cuda", dtype=torch.bfloat16)


def _enlarge(image: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    import torch

    large = torch.nn.functional.interpolate(image, scale_factor=2.0, mode="nearest")
    return torch.nn.functional.conv2d(large, weight, bias, padding=1)


def _onto(residual: torch.Tensor, convolve: Callable[[], torch.Tensor], bias: torch.Tensor) -> torch.Tensor:
    from vivace.machinery.fused.image_operations import add_biased

    return add_biased(residual, convolve(), bias)


def _steps() -> Iterator[dict[str, Any]]:
    """Steps with and without cuDNN's own timing."""
    import torch

    for model, (recipe, height) in MODELS.items():
        for chosen_by_time in (False, True, False, True):
            torch.backends.cudnn.benchmark = chosen_by_time
            took = _step(model, recipe, height)
            figures = {"what": "step", "model": model, "recipe": recipe}
            yield figures | {"cudnn_benchmark": chosen_by_time, "step_us": took}
    torch.backends.cudnn.benchmark = False


def _recipes() -> Iterator[dict[str, Any]]:
    """Steps of several recipes, in turns."""
    for model, (_, height) in MODELS.items():
        for recipe in RECIPES * 2:
            figures = {"what": "step of a recipe", "model": model, "recipe": recipe}
            yield figures | {"step_us": _step(model, recipe, height)}


def _step(model: str, recipe: str, height: int) -> float:
    """Return the microseconds of a step with guidance."""
    import torch

    unet = vivace.load(model, recipe, device="cuda").pipe.unet
    make = {"device": "cuda", "dtype": torch.bfloat16}
    latents = torch.randn(2, 4, height, height, **make)
    text = torch.randn(2, WORDS, unet.config.cross_attention_dim, **make)
    more = {"text_embeds": torch.randn(2, 1280, **make), "time_ids": torch.zeros(2, 6, **make)}
    timestep = torch.tensor(500, device="cuda")
    step = partial(unet, latents, timestep, encoder_hidden_states=text, added_cond_kwargs=more)
    return round(_microseconds(step, calls=1), 1)


def _microseconds(work: Callable[[], object], calls: int = _CALLS) -> float:
    """Return what a call of `work` takes within a CUDA graph."""
    import torch

    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        for _ in range(calls):
            work()
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        torch.cuda.synchronize()
        before = time.perf_counter()
        graph.replay()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - before)
    return min(times) / calls * 1e6


if __name__ == "__main__":
    raise SystemExit(run(unet_kernels))
