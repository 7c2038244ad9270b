"""Count what Triton would compile for each size of an image, without compiling, and without a GPU.

python -m tests.unit.kernels.compile_keys sdxl 1024x1024 832x1216 1024x1024*2

A model is applied and called on the meta device as on Hopper, and launches note their keys instead: the types, the
constants and what Triton specialises of integers (1, and multiples of 16). Prints the kernels that each size adds to
those before, as JSON; `*2` is two images at once, which guidance doubles.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.fused_unets import Pipe
from tests.targets import target_of
from tests.unit.kernels.compiled import NoDevice
from vivace.architectures import ARCHITECTURES
from vivace.machinery.fused import image_operations, operations
from vivace.machinery.kernels import convolution, convolution_tiles, cross_attention, norm_modulate
from vivace.machinery.technique import Machine
from vivace.models.synthetic import on_meta
from vivace.techniques.fused import Fused

HOPPER = Machine("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "c++", has_all_packages=True)
Key = tuple[str, str]


@contextlib.contextmanager
def noting_keys() -> Iterator[set[Key]]:
    """Have launches on meta tensors note what they would compile."""
    keys: set[Key] = set()

    def note(self: Any, key: Any, *_: Any) -> None:
        keys.add((self.fn.__name__, str(key)))

    def always(_: Any) -> bool:
        return True

    with (
        mock.patch.object(JITFunction, "_do_compile", note),
        mock.patch.object(operations, "takes_kernels", always),
        mock.patch.object(image_operations, "takes_kernels", always),
        mock.patch.object(convolution_tiles, "limits_of", return_value=convolution_tiles.HOPPER),
        _launching(),
    ):
        yield keys


@contextlib.contextmanager
def _launching() -> Iterator[None]:
    """Launch also what is left out of meta tensors, on the outputs that these get."""
    add_and_norm, attention, convolve = (
        operations.add_and_norm,
        image_operations.cross_attention,
        image_operations.convolve,
    )

    def added(
        x: Any,
        branch: Any,
        vectors: Any,
        norm: Any,
        tokens: Any,
        scale: Any,
        eps: float = 1e-6,
        room: Any = None,
    ) -> Any:
        rows = add_and_norm(x, branch, vectors, norm, tokens, scale, eps, room)
        out = None if norm is None else rows.values
        norm_modulate.residual_norm(x, branch, vectors, norm, tokens, out, scale, eps)
        return rows

    def attend(q: Any, k: Any, v: Any, scale: Any, room: Any = None) -> Any:
        made = attention(q, k, v, scale, room)
        cross_attention.cross_attention(q, k, v, made.view(q.shape), scale)
        return made

    def convolved(x: Any, weight: Any, scales: Any, bias: Any = None, residual: Any = None) -> Any:
        made = convolve(x, weight, scales, bias, residual)
        flat = [None if t is None else image_operations.pixels(t).flatten(0, 1) for t in (made, residual)]
        convolution.convolve(x, weight, scales, flat[0], bias, flat[1])
        return made

    with (
        mock.patch.object(operations, "add_and_norm", added),
        mock.patch.object(image_operations, "cross_attention", attend),
        mock.patch.object(image_operations, "convolve", convolved),
    ):
        yield


@torch.no_grad()
def keys_by_size(name: str, recipe: Fused, sizes: list[tuple[int, int, int]]) -> Iterator[set[Key]]:
    """Yield the keys that each (width, height, images) adds to those before, of a UNet and its guidance."""
    unet = on_meta(ARCHITECTURES[name].components["unet"]).to(torch.bfloat16)
    recipe.apply(target_of(HOPPER, Pipe(unet=unet)))
    before: set[Key] = set()
    with noting_keys() as keys:
        for width, height, images in sizes:
            unet(**_inputs(unet, width // 8, height // 8, 2 * images))
            yield keys - before
            before |= keys


def _inputs(unet: Any, width: int, height: int, batch: int) -> dict[str, Any]:
    def meta(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, device="meta", dtype=torch.bfloat16)

    channels = unet.config.cross_attention_dim
    more = {"text_embeds": meta(batch, 1280), "time_ids": meta(batch, 6)}
    return {
        "sample": meta(batch, 4, height, width).to(memory_format=torch.channels_last),
        "timestep": meta(1).float(),
        "encoder_hidden_states": meta(batch, 77, channels),
        "added_cond_kwargs": more if unet.config.addition_embed_type == "text_time" else None,
        "return_dict": False,
    }


RECIPES: dict[str, Callable[[], Fused]] = {
    "bf16": lambda: Fused(precision="bf16"),
    "fp8": lambda: Fused(precision="fp8"),
    "convolutions": lambda: Fused(precision="fp8", convolutions="fp8"),
}


def _size(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)(?:\*(\d+))?", text)
    if match is None:
        raise ValueError
    return int(match[1]), int(match[2]), int(match[3] or 1)


def main() -> int:
    parser = argparse.ArgumentParser(description="count what each size of an image would compile")
    parser.add_argument(
        "model", choices=[name for name, a in ARCHITECTURES.items() if "unet" in a.components]
    )
    parser.add_argument("sizes", nargs="+", type=_size)
    parser.add_argument("--recipe", choices=RECIPES, default="convolutions")
    parser.add_argument("--keys", action="store_true", help="print the keys, too")
    chosen = parser.parse_args()
    triton.runtime.driver.set_active(NoDevice())
    for size, keys in zip(
        chosen.sizes, keys_by_size(chosen.model, RECIPES[chosen.recipe](), chosen.sizes), strict=True
    ):
        counts = Counter(name for name, _ in keys)
        print(
            json.dumps({"size": size, "new": len(keys), "kernels": dict(sorted(counts.items()))}), flush=True
        )
        if chosen.keys:
            print("\n".join(sorted(f"  {name}: {key}" for name, key in keys)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
