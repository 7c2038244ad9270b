"""Time FLUX.1's fp8 matmuls as PyTorch calls them, and as cuBLASLt computes them with other scales and epilogues.

    python -m benchmarks.flux_matmuls --record results/flux-matmuls.jsonl

Random values. Candidates take turns in a random order, so that all run at the clock which the GPU's power cap leaves.
A line for each shape, way and algorithm; docs/performance/flux.md tells what they mean.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.command import run
from vivace.errors import Unsupported
from vivace.machinery.fused.cublas_lt import Kind, Plan

SHAPES = {
    "single entry": (4608, 21504, 3072),
    "single qkv": (4608, 9216, 3072),
    "single up": (4608, 12288, 3072),
    "single out": (4608, 3072, 15360),
    "image qkv": (4096, 9216, 3072),
    "image out": (4096, 3072, 3072),
    "image up": (4096, 12288, 3072),
    "image down": (4096, 3072, 12288),
    "text qkv": (512, 9216, 3072),
    "text out": (512, 3072, 3072),
    "text up": (512, 12288, 3072),
    "text down": (512, 3072, 12288),
}
"""Rows, outputs, inputs of the matmuls of FLUX.1 at 1024 x 1024 with 512 tokens of text."""

_TURNS = 4
_TURN_S = 0.15
_CALLS = 20


@click.command("flux_matmuls")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option(
    "--algorithms", type=click.IntRange(1, 64), default=6, show_default=True, help="Tried for each way."
)
@click.option("--only", multiple=True, type=click.Choice(list(SHAPES)), help="These shapes. Default: all.")
def flux_matmuls(record: Path, algorithms: int, only: tuple[str, ...]) -> int:
    """Time FLUX.1's fp8 matmuls in several ways, on one GPU."""
    import torch

    for name in only or SHAPES:
        torch.manual_seed(0)
        timed = _timed(_ways(*SHAPES[name], algorithms))
        lines = [
            {
                "shape": name,
                "sizes": SHAPES[name],
                "way": way,
                "us": round(us, 2),
                **facts,
            }
            for way, us, facts in timed
        ]
        with record.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        for way in dict.fromkeys(line["way"] for line in lines):
            best = min((line for line in lines if line["way"] == way), key=lambda line: float(line["us"]))
            click.echo(f"{name}, {way}: {best['us']:.1f} us, {best['kernel']}")
    return 0


Way = tuple[str, Callable[[int], None], dict[str, Any]]  # its name, what it calls, facts


def _ways(rows: int, outputs: int, inputs: int, number: int) -> Iterator[Way]:
    import torch

    device = torch.device("cuda")
    # So many weights that none is found in the level-2 cache.
    copies = max(2, -(-200_000_000 // (outputs * inputs)))
    values = [_random(rows, inputs) for _ in range(2)]
    weights = [_random(outputs, inputs) for _ in range(copies)]
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16)
    wide = torch.empty(rows, outputs, device=device, dtype=torch.bfloat16)
    eight = torch.empty(rows, outputs, device=device, dtype=torch.float8_e4m3fn)
    of_rows = torch.full((rows, 1), 0.01, device=device)
    of_outputs = torch.full((1, outputs), 0.001, device=device)
    scales = [torch.full((1,), value, device=device) for value in (0.01, 0.001, 40.0)]

    def torch_rows(turn: int) -> None:
        weight = weights[turn % copies].t()
        torch._scaled_mm(
            values[turn % 2],
            weight,
            of_rows,
            of_outputs,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=wide,
        )

    def torch_one(turn: int) -> None:
        torch._scaled_mm(
            values[turn % 2],
            weights[turn % copies].t(),
            scales[0],
            scales[1],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
            out=wide,
        )

    yield "torch, by row", torch_rows, {}
    yield "torch, one scale, bias", torch_one, {}
    ways = {
        "by row": Kind(rows, outputs, inputs, inputs, outputs, quantizes=False, by_row=True),
        "one scale": Kind(rows, outputs, inputs, inputs, outputs, quantizes=False),
        "one scale, bias": Kind(rows, outputs, inputs, inputs, outputs, quantizes=False, epilogue="bias"),
        "one scale, no workspace": Kind(
            rows, outputs, inputs, inputs, outputs, quantizes=False, workspace_bytes=0
        ),
        "to e4m3, bias": Kind(rows, outputs, inputs, inputs, outputs, quantizes=True, epilogue="bias"),
        "to e4m3, bias, gelu": Kind(
            rows, outputs, inputs, inputs, outputs, quantizes=True, epilogue="gelu_bias"
        ),
    }
    for way, kind in ways.items():
        try:
            plan = Plan(kind, 0, number)
        except Unsupported as error:
            click.echo(f"{way}: {error}", err=True)
            continue
        scale_arguments = [of_rows, of_outputs] if kind.by_row else scales if kind.quantizes else scales[:2]
        for index, algorithm in enumerate(plan.algorithms):

            def call(
                turn: int,
                plan: Any = plan,
                scale_arguments: Any = scale_arguments,
                kind: Any = kind,
                index: int = index,
            ) -> None:
                plan(
                    values[turn % 2],
                    weights[turn % copies],
                    scale_arguments,
                    bias if kind.epilogue != "none" else None,
                    None,
                    eight if kind.quantizes else wide,
                    index,
                )

            yield way, call, {"algorithm": index, "workspace": algorithm.workspace_bytes}


def _timed(ways: Iterator[Way]) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield each way with the median over its turns, in microseconds a call."""
    import torch

    kept = []
    for way, call, facts in ways:
        try:
            call(0)
            torch.cuda.synchronize()
        except (RuntimeError, Unsupported) as error:
            click.echo(f"{way} {facts}: {str(error).splitlines()[0]}", err=True)
            continue
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for turn in range(_CALLS):
                call(turn)
        kept.append((way, graph, {**facts, "kernel": _kernel(call)}))
    times: list[list[float]] = [[] for _ in kept]
    order = list(range(len(kept)))
    for turn in range(_TURNS + 1):
        random.Random(turn).shuffle(order)
        for index in order:
            turn_s = _turn(kept[index][1])
            if turn:  # the first warms up
                times[index].append(turn_s)
    for (way, _, facts), turns in zip(kept, times, strict=True):
        yield way, statistics.median(turns), facts


def _turn(graph: Any) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    replays = max(1, int(_TURN_S * 1000 / max(begin.elapsed_time(end), 1e-3)))
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1000 / replays / _CALLS


def _kernel(call: Callable[[int], None]) -> str:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call(0)
        torch.cuda.synchronize()
    names = {event.key for event in profiled.key_averages() if event.device_time_total > 0}
    return " + ".join(sorted(names))


def _random(rows: int, columns: int) -> Any:
    """Values as quantising normally distributed ones gives them."""
    import torch

    return (torch.randn(rows, columns, device="cuda") * 100).clamp(-448, 448).to(torch.float8_e4m3fn)


if __name__ == "__main__":
    sys.exit(run(flux_matmuls))
