"""GGUF's schemes, named as GGUF names them: diffusers' layers in the place of Linear ones. An optional extra.

The `gguf` package quantises, as it does for files; diffusers' GGUFLinear widens the weight anew in each call. GGUF's
other kinds (K, I) can be read from a file (`--model FILE.gguf`), but Python cannot make them: `gguf` leaves that to
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vivace.quantization.scheme import Scheme, Settings

_PACKAGE = ("gguf", "gguf")
_BLOCK = 32  # weights of a row that share a scale, and a minimum where there is one; both fp16
_BYTES = {"Q8_0": 34, "Q5_1": 24, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18}  # of a block
_AT_ONCE = 1 << 18  # weights: what NumPy makes on the way then fits into a core's cache
_RECORDABLE = {"Q8_0", "BF16"}
"""The others diffusers unpacks with numbers that it copies from the host, which a CUDA graph cannot contain."""


def unrecordable(layer: Any) -> str | None:
    """Why a CUDA graph cannot contain a layer whose weights are stored in one of GGUF's kinds, or None."""
    quant_type = getattr(getattr(layer, "weight", None), "quant_type", None)
    if quant_type is None or quant_type.name in _RECORDABLE:
        return None
    return f"diffusers unpacks {quant_type.name} with numbers that it copies from the host in each call; take q8_0"


def _change(kind: str) -> Callable[[Any, Settings], Any]:
    def change(layer: Any, settings: Settings) -> Any:
        import torch
        from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
        from gguf import GGMLQuantizationType

        quant_type = GGMLQuantizationType[kind]
        made = GGUFLinear(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=layer.weight.dtype,
            device="meta",
        )
        if settings.has_data:
            blocks = _quantized(layer.weight.detach(), quant_type)
        else:
            blocks = torch.empty(_stored_shape(layer, kind), dtype=torch.uint8)
        made.weight = GGUFParameter(blocks.to(layer.weight.device), quant_type=quant_type)
        made.bias = layer.bias
        return made.eval().requires_grad_(False)

    return change


def _quantized(weight: Any, quant_type: Any) -> Any:
    """Some rows at a time, on all of this process's threads: NumPy takes one."""
    import numpy as np
    import torch
    from gguf.quants import quantize

    def part(start: int) -> Any:
        return quantize(weight[start : start + step].cpu().float().numpy(), quant_type)

    step = max(1, _AT_ONCE // weight.shape[1])
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.from_numpy(np.concatenate(list(pool.map(part, range(0, len(weight), step)))))


def _stored_shape(layer: Any, kind: str) -> tuple[int, int]:
    return layer.out_features, layer.in_features // _BLOCK * _BYTES[kind]


def _keeps(layer: Any, name: str, settings: Settings) -> str | None:
    return (
        None if layer.in_features % _BLOCK == 0 else f"{layer.in_features} inputs are no multiple of {_BLOCK}"
    )


def _scheme(kind: str, about: str) -> Scheme:
    return Scheme(
        _PACKAGE,
        f"as {kind}: {about} per 32 weights, in fp16",
        "as before",
        _change(kind),
        _keeps,
        keeps_dtype=True,
        hides_dtype=True,
    )


GGUF: dict[str, Scheme] = {
    "q8_0": _scheme("Q8_0", "8 bits, a scale"),
    "q5_1": _scheme("Q5_1", "5 bits, a scale and a minimum"),
    "q5_0": _scheme("Q5_0", "5 bits, a scale"),
    "q4_1": _scheme("Q4_1", "4 bits, a scale and a minimum"),
    "q4_0": _scheme("Q4_0", "4 bits, a scale"),
}
