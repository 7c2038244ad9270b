"""GGUF's schemes, named as GGUF names them: diffusers' GGUFLinear replaces Linear layers. An optional extra.

The `gguf` package quantises, as it does for files; GGUFLinear dequantises the weight in each call. GGUF's other kinds
(K, I) can be loaded from a file (`--model FILE.gguf`) and not made here: Python's `gguf` leaves that to llama.cpp.
Without `compile`, q8_0 is faster than torchao's int8 on SD 1.5 and SDXL, and slower on FLUX.1 [dev]
(docs/techniques-measured.md).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vivace.machinery.quantization.scheme import Scheme, SchemeSettings

if TYPE_CHECKING:
    import numpy as np
    import torch

_PACKAGE = ("gguf", "gguf")
_BLOCK = 32  # weights of a row that share a scale, and a minimum where there is one; both fp16
_BLOCK_BYTES = {"Q8_0": 34, "Q5_1": 24, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18}
_WEIGHTS_AT_ONCE = 1 << 18  # so that NumPy's intermediate arrays fit into a core's cache
_CAPTURABLE = {"Q8_0", "BF16"}
"""To unpack the others, diffusers copies constants from the host, which a CUDA graph cannot contain."""


def why_not_capturable(layer: torch.nn.Module) -> str | None:
    """Return why a CUDA graph cannot contain this layer because of its GGUF weights, or None."""
    quant_type = getattr(getattr(layer, "weight", None), "quant_type", None)
    if quant_type is None or quant_type.name in _CAPTURABLE:
        return None
    return f"to unpack {quant_type.name}, diffusers copies constants from the host in each call; take q8_0 instead"


def _convert(kind: str) -> Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module]:
    def convert(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
        from gguf import GGMLQuantizationType

        blocks = _quantized(layer.weight.detach(), GGMLQuantizationType[kind])
        return _gguf_linear(layer, blocks.to(layer.weight.device), kind)

    return convert


def _describe(kind: str) -> Callable[[torch.nn.Module, SchemeSettings], torch.nn.Module]:
    def describe(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
        import torch

        shape = (layer.out_features, layer.in_features // _BLOCK * _BLOCK_BYTES[kind])
        return _gguf_linear(layer, torch.empty(shape, dtype=torch.uint8, device=layer.weight.device), kind)

    return describe


def _gguf_linear(layer: torch.nn.Module, blocks: torch.Tensor, kind: str) -> torch.nn.Module:
    from diffusers.quantizers.gguf.utils import GGUFLinear, GGUFParameter
    from gguf import GGMLQuantizationType

    made = GGUFLinear(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        device="meta",
    )
    made.weight = GGUFParameter(blocks, quant_type=GGMLQuantizationType[kind])
    made.bias = layer.bias
    return made.eval().requires_grad_(False)


def _quantized(weight: torch.Tensor, quant_type: Any) -> torch.Tensor:
    """Quantise some rows at a time, on as many threads as PyTorch uses: NumPy takes one."""
    import numpy as np
    import torch
    from gguf.quants import quantize

    num_rows = max(1, _WEIGHTS_AT_ONCE // weight.shape[1])

    def part(start: int) -> np.ndarray[Any, Any]:
        blocks: np.ndarray[Any, Any] = quantize(
            weight[start : start + num_rows].cpu().float().numpy(), quant_type
        )
        return blocks

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.from_numpy(np.concatenate(list(pool.map(part, range(0, len(weight), num_rows)))))


def _skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    if layer.in_features % _BLOCK == 0:
        return None
    return f"{layer.in_features} inputs are not a multiple of {_BLOCK}"


def _scheme(kind: str, weights: str) -> Scheme:
    return Scheme(
        _PACKAGE,
        f"as {kind}: {weights} per {_BLOCK} weights, in fp16",
        "as before",
        _convert(kind),
        _describe(kind),
        _skips,
        cannot_be_cast=True,
        reports_storage_dtype=True,
    )


GGUF: dict[str, Scheme] = {
    "q8_0": _scheme("Q8_0", "8 bits, a scale"),
    "q5_1": _scheme("Q5_1", "5 bits, a scale and a minimum"),
    "q5_0": _scheme("Q5_0", "5 bits, a scale"),
    "q4_1": _scheme("Q4_1", "4 bits, a scale and a minimum"),
    "q4_0": _scheme("Q4_0", "4 bits, a scale"),
}
