"""Try attention in fp8 that visits only some blocks of keys, chosen by content, at 2048 px: its time, beside cuDNN's
attention in fp8 and in bf16, and what it changes.

    python -m benchmarks.sparse_attention --record results/sparse-attention-h200.jsonl
    python -m benchmarks.sparse_attention --record results/sparse-attention-cpu.jsonl --device cpu

On a GPU: the kernel's divisions of its work, its time by density with random blocks, the time of the choice, the
density at which both together take as long as cuDNN's fp8, what a call gains at most, and the error on structured
queries, keys and values. Ways take turns in a random order, each captured in a CUDA graph.

On a CPU: images of trained models whose whole call attends to the chosen blocks, beside the same call with all of them.
Their images have few tokens, so blocks are smaller. `chosen by` says whether blocks' means choose, or attention itself,
which no cheap choice can beat.

`--only KIND` measures one of them, and keeps the record's lines of the others. A line a case.
"""

from __future__ import annotations

import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from benchmarks.command import run
from benchmarks.record_files import write_text
from vivace.errors import Unsupported
from vivace.measure.machine import choose_device, this_machine
from vivace.measure.this_environment import environment

if TYPE_CHECKING:
    import torch

    from benchmarks.sparse_attention_kernels import Division
    from benchmarks.sparse_attention_reference import Layout

SIDE = 128
"""Tokens of a side of 2048 px."""
CHANNELS = 128
HEADS = {"flux-dev": (24, 512), "z-image-turbo": (30, 256)}
"""Heads, and tokens of a text."""
CALLS = {"flux-dev": (57 * 28, 11.7), "z-image-turbo": (32 * 9, 3.12)}
"""Attentions of a call, and its seconds (results/large-images-h200.json)."""
DENSITIES = (1.0, 0.75, 0.5, 0.35, 0.25)
SHARES = (0.9, 0.95, 0.98, 0.99)
TRAINED = (("tiny-z-image", 128, 2), ("tiny-z-image", 256, 4), ("tiny-flux", 128, 2), ("tiny-flux", 256, 4))
"""Models, pixels, and tokens of a tile's side. 128 px is what they were trained on."""
TEXTS = {"tiny-z-image": (0, 32), "tiny-flux": (512,)}
"""Tokens of a text beside an image: none in blocks that refine the image alone."""
CHOICES = (
    *(("means", "tiles", share) for share in SHARES),
    ("means", "lines", 0.95),
    ("attention", "tiles", 0.95),
)
PROMPTS = ("a red circle above a blue square", "a small yellow star left of a purple diamond")
_TILES = {128: (8, 16), 64: (8, 8)}
"""By tokens of a block of keys; a block of queries is two neighbours of the smaller ones."""
_CALLS = 3
_TURNS = 9
_LARGEST = 448.0


@click.command("sparse_attention")
@click.option("--record", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--only", type=click.Choice(["rates", "structured", "trained"]), multiple=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--prompts",
    type=click.IntRange(1, len(PROMPTS)),
    default=len(PROMPTS),
    show_default=True,
    help="Of trained models.",
)
@click.option("--model", "models", multiple=True, type=click.Choice([*HEADS, *TEXTS]), help="Default: all.")
def sparse_attention(
    record: Path, only: tuple[str, ...], device: str, prompts: int, models: tuple[str, ...]
) -> int:
    """Time sparse attention in fp8 on a GPU, and see on a CPU what it changes."""
    chosen = choose_device(device)
    here = environment(chosen).model_dump(mode="json")
    kinds: dict[str, Callable[[], Iterator[dict[str, Any]]]]
    if chosen == "cpu":
        kinds = {
            "structured": _structured_on_cpu,
            "trained": partial(_trained, models or tuple(TEXTS), PROMPTS[:prompts]),
        }
    else:
        kinds = {"rates": partial(_rates, models or tuple(HEADS)), "structured": _structured}
    selected = only or tuple(kinds)
    if not set(selected) <= set(kinds):
        raise Unsupported(
            f"--only on this device ({chosen}) is one of {', '.join(kinds)}, got {', '.join(only)}"
        )
    lines = []
    if only and record.exists():
        stored = record.read_text(encoding="utf-8").splitlines()
        lines = [line for line in stored if json.loads(line)["kind"] not in only]
    for kind in selected:
        for figures in kinds[kind]():
            lines.append(json.dumps({"kind": kind} | figures | {"environment": here}))
            click.echo(json.dumps(figures))
            write_text(record, "\n".join(lines) + "\n")
    return 0


def _rates(models: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Times of the kernel by density, of the choice, and what follows for a call."""
    import torch

    from benchmarks.sparse_attention_reference import Layout
    from vivace.machinery.attention_backends.cudnn_fp8 import unsupported_on

    if (why := unsupported_on(this_machine("cuda"))) is not None:
        raise Unsupported(why)
    divisions: dict[int, Division] = {}
    for model in models:
        heads, text = HEADS[model]
        torch.manual_seed(0)
        wide = [
            torch.randn(text + SIDE**2, heads, CHANNELS, device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        ]
        for keys in (128, 64):
            layout = Layout(text, 128, keys)
            inputs = _Inputs(wide, layout)
            if keys not in divisions:
                took = _divisions(inputs)
                divisions[keys] = min(took, key=lambda division: took[division])
                for division, ms in took.items():
                    yield (
                        {"what": "division", "model": model, "key_block": keys}
                        | asdict(division)
                        | {
                            "density": 0.5,
                            "ms": round(ms, 3),
                        }
                    )
            yield from _rate(model, inputs, divisions[keys])


class _Inputs:
    """Queries, keys and values in bf16 and in e4m3, as cuDNN and as the sparse kernel read them.

    Attributes:
        wide: (tokens, heads, channels) each, bf16.
        eight: the same in e4m3, divided by `scales` (3,).
        transposed: the values' channels, (heads, channels, tokens).
    """

    def __init__(self, wide: list[torch.Tensor], layout: Layout) -> None:
        import torch

        self.wide = wide
        self.layout = layout
        self.scales = torch.stack([x.abs().amax().float() / _LARGEST for x in wide])
        self.eight = [
            (x.float() / scale).to(torch.float8_e4m3fn) for x, scale in zip(wide, self.scales, strict=True)
        ]
        self.transposed = self.eight[2].permute(1, 2, 0).contiguous()
        self.out = torch.empty_like(self.eight[0])

    @property
    def size(self) -> tuple[int, int]:
        tokens, heads, _ = self.wide[0].shape
        return heads, tokens

    def random_lists(self, density: float) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        from benchmarks.sparse_attention_reference import lists_of, random_blocks

        blocks = random_blocks(*self.size, self.layout, density, torch.Generator().manual_seed(0))
        counts, lists = lists_of(blocks)
        return counts.cuda(), lists.cuda()

    def sparse(
        self, counts: torch.Tensor, lists: torch.Tensor, division: Division
    ) -> Callable[[], torch.Tensor]:
        """Return what computes attention to listed blocks, in fp8."""
        from benchmarks.sparse_attention_kernels import attend

        def call() -> torch.Tensor:
            attend(
                self.eight[0],
                self.eight[1],
                self.transposed,
                self.scales[:2],
                counts,
                lists,
                self.out,
                self.layout,
                division,
            )
            return self.out

        return call

    def cudnn_fp8(self) -> Callable[[], torch.Tensor]:
        import torch

        from vivace.machinery.attention_backends.cudnn_fp8 import attend

        out = torch.empty_like(self.out)
        q, k, v = (x[None] for x in self.eight)
        of_values = torch.stack([self.scales[2], 1 / self.scales[2]])

        def call() -> torch.Tensor:
            attend(q, k, v, self.scales[:2], of_values, out[None])
            return out

        return call

    def cudnn_bf16(self) -> Callable[[], torch.Tensor]:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def call() -> torch.Tensor:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                made = torch.nn.functional.scaled_dot_product_attention(
                    *(x.transpose(0, 1)[None] for x in self.wide)
                )
            return made[0].transpose(0, 1)

        return call

    def error(self, made: torch.Tensor, exact: torch.Tensor) -> float:
        """Return how far an output is off, relative to the exact one."""
        if made.element_size() == 1:
            made = made.float() * self.scales[2]
        return round(float((made.float() - exact.float()).norm() / exact.float().norm()), 4)


def _divisions(inputs: _Inputs) -> dict[Division, float]:
    """Time each division at half of the blocks; return milliseconds."""
    import torch
    from triton.errors import TritonError

    from benchmarks.sparse_attention_kernels import DIVISIONS

    counts, lists = inputs.random_lists(0.5)
    took = {}
    for division in DIVISIONS:
        if division.keys > inputs.layout.keys:
            continue
        call = inputs.sparse(counts, lists, division)
        try:
            call()
        except (TritonError, RuntimeError) as error:
            click.echo(f"{division}: {str(error).splitlines()[0]}", err=True)
            continue
        turns = []
        for _ in range(4):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            end.synchronize()
            turns.append(begin.elapsed_time(end))
        took[division] = statistics.median(turns)
    return took


def _rate(model: str, inputs: _Inputs, division: Division) -> Iterator[dict[str, Any]]:
    import torch

    from benchmarks import sparse_attention_kernels as kernels
    from benchmarks.sparse_attention_reference import attend, blocks_of

    layout, (heads, tokens) = inputs.layout, inputs.size
    case = {"model": model, "heads": heads, "tokens": tokens, "key_block": layout.keys}
    order = torch.arange(tokens, device="cuda", dtype=torch.int32)
    moved = torch.empty_like(inputs.eight[0])
    lists = {density: inputs.random_lists(density) for density in DENSITIES}
    q, k, v = inputs.eight
    choice = partial(kernels.choose, q, k, inputs.scales[:2], layout, 0.9)
    ways: dict[str, Callable[[], Any]] = {
        "cudnn fp8": inputs.cudnn_fp8(),
        "cudnn bf16": inputs.cudnn_bf16(),
        "choice": choice,
        "values transposed": partial(kernels.arrange, v, order, inputs.transposed, True),
        "one tensor in tiles": partial(kernels.arrange, q, order, moved),
    }
    ways |= {f"sparse {density}": inputs.sparse(*lists[density], division) for density in DENSITIES}
    times = _timed(ways)
    ms = {way: statistics.median(turns) for way, turns in times.items()}
    flop = 4 * tokens**2 * heads * CHANNELS
    for way in ways:
        if not way.startswith("sparse"):
            yield {
                "what": way,
                **case,
                "ms": round(ms[way], 4),
                "turns_ms": [round(t, 4) for t in times[way]],
            }

    few_q, few_k, few_v = (x[:, :2] for x in inputs.wide)
    exact = ways["cudnn bf16"]()
    for density in DENSITIES:
        blocks = blocks_of(*lists[density])
        visited = float(blocks.float().mean())
        ratios = [s / c for s, c in zip(times[f"sparse {density}"], times["cudnn fp8"], strict=True)]
        made = ways[f"sparse {density}"]()
        expected = attend(few_q, few_k, few_v, blocks[:2], layout)  # of the same blocks, in bf16
        yield {
            "what": "sparse",
            **case,
            "density": round(visited, 4),
            "ms": round(ms[f"sparse {density}"], 4),
            "turns_ms": [round(t, 4) for t in times[f"sparse {density}"]],
            "tflop_per_s": round(flop * visited / ms[f"sparse {density}"] / 1e9, 1),
            "of_cudnn_fp8": round(statistics.median(ratios), 4),
            "error_from_bf16_of_the_same_blocks": inputs.error(made[:, :2], expected),
        }
    yield {
        "what": "all blocks",
        **case,
        "sparse_error": inputs.error(ways["sparse 1.0"](), exact),
        "cudnn_fp8_error": inputs.error(ways["cudnn fp8"](), exact),
    }
    yield {"what": "break-even", **case, "division": asdict(division)} | break_even(model, ms)


def break_even(model: str, ms: dict[str, float]) -> dict[str, Any]:
    """Return at which density the kernel, the choice and the transposed values take as long as cuDNN's fp8, and what a
    call gains at each density if every attention in it has that one."""
    fixed, per_density = statistics.linear_regression(DENSITIES, [ms[f"sparse {d}"] for d in DENSITIES])[::-1]
    extra = ms["choice"] + ms["values transposed"]
    number, seconds = CALLS[model]
    gains = {}
    for density in DENSITIES:
        saved_s = number * (ms["cudnn fp8"] - ms[f"sparse {density}"] - extra) / 1000
        gains[str(density)] = round(seconds / (seconds - saved_s), 3)
    return {
        "break_even_density": round((ms["cudnn fp8"] - extra - fixed) / per_density, 3),
        "attention_share_of_call": round(number * ms["cudnn fp8"] / 1000 / seconds, 3),
        "call_s": seconds,
        "times_as_fast": gains,
    }


def _structured() -> Iterator[dict[str, Any]]:
    """Density, time and error with the blocks that are chosen for structured queries and keys."""
    import torch

    from benchmarks import sparse_attention_kernels as kernels
    from benchmarks.sparse_attention_reference import Layout, blocks_of, structured

    heads, text = HEADS["flux-dev"]
    made = structured(text, SIDE, heads, CHANNELS, torch.Generator().manual_seed(0))
    tensors = [x.to("cuda", torch.bfloat16) for x in made]
    division: dict[int, Division] = {}
    for keys, order in ((128, "lines"), (128, "tiles"), (64, "tiles")):
        layout = Layout(text, 128, keys)
        tokens = _order(text, SIDE, order, _TILES[keys]).to("cuda")
        inputs = _Inputs([x[tokens] for x in tensors], layout)
        if keys not in division:
            took = _divisions(inputs)
            division[keys] = min(took, key=lambda each: took[each])
        exact, cudnn = inputs.cudnn_bf16()(), inputs.cudnn_fp8()
        cudnn_error = inputs.error(cudnn(), exact)
        q, k, _ = inputs.eight
        for share in (0.8, *SHARES):
            choose = partial(kernels.choose, q, k, inputs.scales[:2], layout, share)
            counts, lists = choose()
            call = inputs.sparse(counts, lists, division[keys])
            times = _timed({"sparse": call, "choice": choose, "cudnn": cudnn}, turns=5)
            took_ms = {way: statistics.median(turns) for way, turns in times.items()}
            blocks = blocks_of(counts, lists)
            image = blocks[:, text // layout.queries :, text // layout.keys :]
            yield {
                "what": "structured",
                "key_block": keys,
                "order": order,
                "share": share,
                "density": round(float(blocks.float().mean()), 4),
                "density_of_image": round(float(image.float().mean()), 4),
                "density_by_head": [round(float(each), 3) for each in blocks.float().mean((1, 2))],
                "sparse_ms": round(took_ms["sparse"], 4),
                "choice_ms": round(took_ms["choice"], 4),
                "cudnn_fp8_ms": round(took_ms["cudnn"], 4),
                "error": inputs.error(call(), exact),
                "cudnn_fp8_error": cudnn_error,
            }


def _structured_on_cpu() -> Iterator[dict[str, Any]]:
    """The same choice for a smaller image, by the reference, in fp32."""
    import torch

    from benchmarks.sparse_attention_reference import Layout, attend, choose, structured

    text, side, layout = 32, 48, Layout(32, 16, 16)
    for order in ("lines", "tiles"):
        tokens = _order(text, side, order, (4, 4))
        generator = torch.Generator().manual_seed(0)
        q, k, v = (x[tokens] for x in structured(text, side, 6, 64, generator))
        exact = attend(q, k, v, choose(q, k, layout, 2.0), layout)
        for share in (0.8, *SHARES):
            blocks = choose(q, k, layout, share)
            made = attend(q, k, v, blocks, layout)
            yield {
                "what": "structured",
                "tokens": text + side**2,
                "key_block": layout.keys,
                "order": order,
                "share": share,
                "density": round(float(blocks.float().mean()), 4),
                "error": round(float((made - exact).norm() / exact.norm()), 4),
            }


def _timed(ways: dict[str, Callable[[], Any]], turns: int = _TURNS) -> dict[str, list[float]]:
    """Return the times of ways in turns, in milliseconds a call."""
    import torch

    graphs = {}
    for way, call in ways.items():
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(_CALLS):
                call()
        graphs[way] = graph
    times: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for turn in range(turns + 1):
        random.Random(turn).shuffle(names)
        for way in names:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[way].replay()
            end.record()
            end.synchronize()
            if turn:  # the first warms up
                times[way].append(begin.elapsed_time(end) / _CALLS)
    return times


def _order(text: int, side: int, order: str, tile: tuple[int, int]) -> torch.Tensor:
    """Return which token comes where: those of the text, then the image's by lines or by tiles."""
    import torch

    from benchmarks.sparse_attention_reference import tile_order

    image = tile_order(side, side, tile) if order == "tiles" else torch.arange(side**2)
    return torch.cat([torch.arange(text), text + image])


def _trained(models: Sequence[str], prompts: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Images of trained models whose image blocks attend sparsely, beside those that attend to everything."""
    import numpy as np
    import torch

    from vivace.measure.image_metrics import paired_metrics
    from vivace.models import CATALOGUE, find_model, load_pipeline

    for model, pixels, tile in TRAINED:
        if model not in models:
            continue
        pipe = load_pipeline(find_model(model), "cpu")
        pipe.set_progress_bar_config(disable=True)
        entry = CATALOGUE[model]

        def image(prompt: str, seed: int, pipe: Any = pipe, entry: Any = entry, pixels: int = pixels) -> Any:
            made = pipe(
                prompt,
                height=pixels,
                width=pixels,
                num_inference_steps=entry.num_inference_steps,
                guidance_scale=entry.guidance_scale,
                generator=torch.Generator().manual_seed(seed),
            )
            return np.asarray(made.images[0])

        dense = [image(prompt, seed) for seed, prompt in enumerate(prompts)]
        for chosen_by, order, share in CHOICES:
            sparse = _Sparse(chosen_by, order, share, pixels // 16, tile, TEXTS[model])
            begun = time.monotonic()
            with sparse.inside():
                made = [image(prompt, seed) for seed, prompt in enumerate(prompts)]
            pairs = [paired_metrics(a, b) for a, b in zip(made, dense, strict=True)]
            yield {
                "what": "trained",
                "model": model,
                "pixels": pixels,
                "steps": entry.num_inference_steps,
                "image_tokens": (pixels // 16) ** 2,
                "block": tile**2,
                "chosen by": chosen_by,
                "order": order,
                "share": share,
                **sparse.figures(),
                "ssim": [round(pair["ssim"], 4) for pair in pairs],
                "psnr_db": [round(pair["psnr_db"], 2) for pair in pairs],
                "match": [round(pair["match"], 4) for pair in pairs],
                "seconds": round(time.monotonic() - begun, 1),
            }


class _Sparse:
    """Attention of image tokens to chosen blocks, in place of PyTorch's."""

    def __init__(
        self, chosen_by: str, order: str, share: float, side: int, tile: int, texts: tuple[int, ...]
    ) -> None:
        self._chosen_by, self._order, self._share, self._side = chosen_by, order, share, side
        self._tile, self._texts = tile, texts
        self._densities: list[float] = []
        self._all_densities: list[float] = []
        self._reached: list[float] = []

    def figures(self) -> dict[str, Any]:
        """Return how much was visited: of blocks of the image for the image, and of all; and how much of the image's
        attention went there."""
        if not self._densities:
            raise Unsupported("no attention had the tokens of this image; its text may be longer")
        return {
            "calls": len(self._densities),
            "density_of_image": round(statistics.mean(self._densities), 4),
            "density": round(statistics.mean(self._all_densities), 4),
            "reached_share": round(statistics.mean(self._reached), 4),
            "least_reached_share": round(min(self._reached), 4),
        }

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        import torch.nn.functional as functional

        plain = functional.scaled_dot_product_attention

        def attention(query: Any, key: Any, value: Any, *args: Any, **more: Any) -> Any:
            text = query.shape[2] - self._side**2
            is_own = text in self._texts and query.shape == key.shape
            if is_own and not args and more.get("attn_mask") is None:
                more["attn_mask"] = self._mask(query, key, text)
            return plain(query, key, value, *args, **more)

        functional.scaled_dot_product_attention = attention
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = plain

    def _mask(self, query: torch.Tensor, key: torch.Tensor, text: int) -> torch.Tensor:
        from benchmarks.sparse_attention_reference import Layout, estimates, exact, of_tokens, visited

        layout = Layout(text, self._tile**2, self._tile**2)
        order = self._tokens(text)
        q, k = (x.flatten(0, 1).transpose(0, 1)[order] for x in (query, key))
        true = exact(q, k, layout)
        portions = true if self._chosen_by == "attention" else estimates(q, k, layout)
        blocks = visited(portions, layout, self._share)
        first = text // layout.queries
        self._densities.append(float(blocks[:, first:, first:].float().mean()))
        self._all_densities.append(float(blocks.float().mean()))
        self._reached.append(float((true * blocks)[:, first:].sum(-1).mean()))
        back = order.argsort()
        mask = of_tokens(blocks, layout, len(order))[:, back][:, :, back]
        return mask.unflatten(0, query.shape[:2])

    def _tokens(self, text: int) -> torch.Tensor:
        """Return the order in which the text comes first: Z-Image has it last."""
        ordered = _order(text, self._side, self._order, (self._tile, self._tile))
        if self._texts == TEXTS["tiny-z-image"]:
            ordered = (ordered - text) % (text + self._side**2)
        return ordered


if __name__ == "__main__":
    sys.exit(run(sparse_attention))
