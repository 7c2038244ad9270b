"""Time what was chosen by measuring for fused UNets: GroupNorm in one kernel or in three, kernels that take a token
each, and how cuDNN chooses.

    python -m benchmarks.unet_kernels --record results/unet-kernels.jsonl

Shapes are those of SD 1.5 and SDXL with guidance, values random. Each case is captured in a CUDA graph, so that
launches by Python do not count, and the shortest of five replays is taken. A UNet's step is timed twice with each
setting, in turns. A line a case; docs/performance/unets.md tells what they mean.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

import vivace
from benchmarks.command import run
from benchmarks.record_files import write_text
from vivace.errors import Unsupported

NORMS = {
    64: (1280, 2560),
    256: (640, 1280, 1920, 2560),
    1024: (320, 640, 960, 1280, 1920, 2560),
    4096: (320, 640, 960, 1280),
}
"""Channels by pixels."""
TOKENS = {"fp8": ((2048, 1280), (8192, 640)), "bf16": ((8192, 320), (2048, 640), (512, 1280), (128, 1280))}
"""Rows and channels: of SDXL in fp8, of SD 1.5 in bf16."""
MODELS = {"synthetic:sd15": ("fused", 64), "synthetic:sdxl": ("fused(fp8)", 128)}
"""Recipes, and the height of the latents."""
_GROUPS = 32
_CALLS = 20
_REPLAYS = 5
_LARGEST_TILE = 32768  # elements that one program can hold


@click.command("unet_kernels")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), required=True)
def unet_kernels(record: Path) -> int:
    """Time GroupNorms, and UNets' steps with and without cuDNN's own timing, on one GPU."""
    import torch

    if not torch.cuda.is_available():
        raise Unsupported("these are kernels of a GPU, and PyTorch sees none")
    import triton

    where = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    lines: list[str] = []
    for found in itertools.chain(_norms(), _tokens(), _steps()):
        lines.append(json.dumps(found | where))
        click.echo(lines[-1])
        write_text(record, "\n".join(lines) + "\n")
    return 0


def _norms() -> Iterator[dict[str, Any]]:
    import torch
    import triton

    from vivace.kernels.group_norm import group_norm

    for pixels, widths in NORMS.items():
        for channels in widths:
            x = torch.randn(2, pixels, channels, device="cuda", dtype=torch.bfloat16)
            out, vector, added = torch.empty_like(x), x[0, 0].clone(), x[:, 0].clone()

            norm = partial(group_norm, x, out, _GROUPS, vector, vector, 1e-5, added, True)
            found = {"what": "group_norm", "batch": 2, "pixels": pixels, "channels": channels}
            found["three_kernels_us"] = round(_microseconds(partial(norm, 0)), 1)
            if pixels * triton.next_power_of_2(channels // _GROUPS) <= _LARGEST_TILE:
                found["one_kernel_us"] = round(_microseconds(partial(norm, _LARGEST_TILE)), 1)
            yield found


def _tokens() -> Iterator[dict[str, Any]]:
    import torch

    from vivace.kernels.geglu import geglu
    from vivace.kernels.norm_modulate import residual_norm
    from vivace.kernels.quantize import quantize_rows
    from vivace.kernels.reference import Branch, Modulation, Tokens

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
            given = (Tokens(2, 0, rows // 2), out, vectors[0, :1] if is_fp8 else None)
            work = {
                "residual_norm": partial(
                    residual_norm, x, branch, vectors.expand(2, -1), (shift, scale), *given
                ),
                "geglu": partial(geglu, up, up[0] if is_fp8 else None, wide, scales),
            }
            if is_fp8:
                work["quantize_rows"] = partial(quantize_rows, x, out, scales)
            for what, call in work.items():
                took = round(_microseconds(call), 1)
                yield {"what": what, "precision": precision, "rows": rows, "channels": channels, "us": took}


def _steps() -> Iterator[dict[str, Any]]:
    import torch

    for model, (recipe, height) in MODELS.items():
        for chosen_by_time in (False, True, False, True):
            torch.backends.cudnn.benchmark = chosen_by_time
            unet = vivace.load(model, recipe, device="cuda").pipe.unet
            make = {"device": "cuda", "dtype": torch.bfloat16}
            latents = torch.randn(2, 4, height, height, **make)
            text = torch.randn(2, 77, unet.config.cross_attention_dim, **make)
            more = {"text_embeds": torch.randn(2, 1280, **make), "time_ids": torch.zeros(2, 6, **make)}
            timestep = torch.tensor(500, device="cuda")

            step = partial(unet, latents, timestep, encoder_hidden_states=text, added_cond_kwargs=more)
            took = round(_microseconds(step, calls=1))
            yield {
                "what": "step",
                "model": model,
                "recipe": recipe,
                "cudnn_benchmark": chosen_by_time,
                "step_us": took,
            }
    torch.backends.cudnn.benchmark = False


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
