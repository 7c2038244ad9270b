"""The schemes of optional extras, which replace layers by their library's own: bitsandbytes, SDNQ and GGUF."""

from __future__ import annotations

import functools
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from vivace.machinery.quantization.scheme import (
    Scheme,
    SchemeSettings,
    meta_layer,
    no_fp8_on_apple,
)

if TYPE_CHECKING:
    import numpy as np
    import torch


# bitsandbytes is the only backend of LLM.int8(), int8 matmuls that keep outliers in fp16, and of QLoRA's NF4 with or
# without double quantisation. No record in results/ compares its speed with another backend's.
_BNB_PACKAGE = ("bitsandbytes", "bitsandbytes")
_BNB_BLOCK = 64  # weights that share a scale in NF4
_BNB_SCALES = 256  # scales that share a second scale
_BNB_OUTLIER = 6.0  # inputs above this are multiplied in fp16; the paper's threshold


def _bnb_int8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    made = Linear8bitLt(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        has_fp16_weights=False,
        threshold=_BNB_OUTLIER,
        device="meta",
    )
    # `Int8Params.to` quantises only what comes from the CPU; a weight on the GPU it silently leaves as it is.
    values, scales, _ = int8_vectorwise_quant(layer.weight.detach().to(torch.float16))
    made.weight = Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)
    made.bias = layer.bias
    return made


def _bnb_int8_on_meta(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch

    weight = (tuple(layer.weight.shape), torch.int8)
    return meta_layer(layer, weight, ((layer.out_features,), torch.float32), dequantises=False)


def _bnb_nf4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    from bitsandbytes.nn import Linear4bit, Params4bit

    made = Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=layer.weight.dtype,
        compress_statistics=settings.double_quantization,
        quant_type="nf4",
        device="meta",
    )
    weight = Params4bit(
        layer.weight.detach(),
        requires_grad=False,
        blocksize=_BNB_BLOCK,
        compress_statistics=settings.double_quantization,
        quant_type="nf4",
        module=made,
    )
    made.weight = weight.to(layer.weight.device)  # quantises
    made.bias = layer.bias
    return made


def _bnb_nf4_on_meta(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch

    blocks = -(-layer.weight.numel() // _BNB_BLOCK)
    weight = ((-(-layer.weight.numel() // 2), 1), torch.uint8)
    levels = ((16,), torch.float32)
    if not settings.double_quantization:
        return meta_layer(layer, weight, levels, ((blocks,), torch.float32))
    # Double quantisation adds the 256 levels of the first scales, their second scales and their mean.
    second = [((size,), torch.float32) for size in (-(-blocks // _BNB_SCALES), 256, 1)]
    return meta_layer(layer, weight, levels, ((blocks,), torch.uint8), *second)


def _bnb_unsupported(settings: SchemeSettings) -> str | None:
    if settings.machine.backend == "mps":
        return "bitsandbytes has no kernels for Apple's GPUs; torchao's int8 and nf4 are PyTorch's own operations"
    return None


BITSANDBYTES: dict[str, Scheme] = {
    "int8": Scheme(
        _BNB_PACKAGE,
        "in int8, a scale per output row",
        "in int8, inputs scaled in each call, outliers among them in fp16 (LLM.int8())",
        _bnb_int8,
        _bnb_int8_on_meta,
        unsupported=_bnb_unsupported,
    ),
    "nf4": Scheme(
        _BNB_PACKAGE,
        f"in 4 bits, quantiles of a normal distribution, a scale per {_BNB_BLOCK} weights, in 8 or 32 bits",
        "as before",
        _bnb_nf4,
        _bnb_nf4_on_meta,
        unsupported=_bnb_unsupported,
        has_single_scales=True,
        reports_storage_dtype=True,
    ),
}


# SDNQ is under GPL-3.0. Without `compile` its int8 is the fastest on FLUX.1 [dev]: 5.18 s an image on an H200, where
# torchao's int8 takes 6.65 s for the same 21.9 GB (docs/techniques-measured.md); on SD 1.5 and SDXL it is slower than
# torchao's. It is the only backend that stores convolutions in fp8 or in 4 bits.
_SDNQ_GROUP = 64  # weights that share a scale in uint4
_SDNQ_MIN_CHANNELS = 32  # SDNQ skips layers of fewer channels


def _sdnq_convert(layer: torch.nn.Module, settings: SchemeSettings, kind: str) -> torch.nn.Module:
    from sdnq import SDNQConfig
    from sdnq.quantizer import sdnq_quantize_layer

    # vivace has chosen the layers, so SDNQ's own lists and thresholds are off.
    config = SDNQConfig(
        weights_dtype=kind,
        quant_conv=True,
        add_skip_keys=False,
        minimum_allowed_numel=0,
        minimum_allowed_channel_size=0,
    )
    made, _ = sdnq_quantize_layer(layer, config, torch_dtype=layer.weight.dtype)
    return made


def _sdnq_describe(layer: torch.nn.Module, settings: SchemeSettings, kind: str) -> torch.nn.Module:
    """Hold weights, and scales per output row and position of a convolution, or per group in uint4."""
    import torch

    shape, num = tuple(layer.weight.shape), layer.weight.numel()
    positions = num // (shape[0] * shape[1])
    if kind == "uint4":
        groups = (shape[0] * (shape[1] // _SDNQ_GROUP) * positions,)
        scales = (groups, torch.float32)
        return meta_layer(layer, ((num // 2,), torch.uint8), scales, scales)
    stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return meta_layer(layer, (shape, stored), ((shape[0] * positions,), torch.float32))


def _sdnq_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    rows, columns = layer.weight.shape[:2]
    return None if min(rows, columns) >= _SDNQ_MIN_CHANNELS else f"fewer than {_SDNQ_MIN_CHANNELS} channels"


def _sdnq_uint4_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    columns = layer.weight.shape[1]
    reason = None if columns % _SDNQ_GROUP == 0 else f"{columns} inputs are not a multiple of {_SDNQ_GROUP}"
    return _sdnq_skips(layer, name, settings) or reason


def _sdnq_scheme(kind: str, weights: str, skips: Any = _sdnq_skips, **how: Any) -> Scheme:
    convert, describe = (functools.partial(make, kind=kind) for make in (_sdnq_convert, _sdnq_describe))
    how = {"takes_convolutions": True, "cannot_be_cast": True} | how
    return Scheme(("sdnq", "sdnq"), weights, "as before", convert, describe, skips, **how)


SDNQ: dict[str, Scheme] = {
    "int8": _sdnq_scheme("int8", "in int8, a scale per output row"),
    "fp8_weight": _sdnq_scheme(
        "float8_e4m3fn", "in fp8 (e4m3), a scale per output row", unsupported=no_fp8_on_apple
    ),
    "int4": _sdnq_scheme(
        "uint4", f"in 4 bits, a scale and a zero per {_SDNQ_GROUP} weights", _sdnq_uint4_skips
    ),
}


# The `gguf` package quantises, as it does for files; diffusers' GGUFLinear dequantises the weight in each call. GGUF's
# other kinds (K, I) can be loaded from a file (`--model FILE.gguf`) and not made here: Python's `gguf` leaves that to
# llama.cpp. Without `compile`, q8_0 is faster than torchao's int8 on SD 1.5 and SDXL, and slower on FLUX.1 [dev]
# (docs/techniques-measured.md).
_GGUF_PACKAGE = ("gguf", "gguf")
_GGUF_BLOCK = 32  # weights of a row that share a scale, and a minimum where there is one; both fp16
_GGUF_BLOCK_BYTES = {"Q8_0": 34, "Q5_1": 24, "Q5_0": 22, "Q4_1": 20, "Q4_0": 18}
_GGUF_WEIGHTS_AT_ONCE = 1 << 18  # so that NumPy's intermediate arrays fit into a core's cache
_GGUF_CAPTURABLE = {"Q8_0", "BF16"}
"""To unpack the others, diffusers copies constants from the host, which a CUDA graph cannot contain."""


def why_not_capturable(layer: torch.nn.Module) -> str | None:
    """Return why a CUDA graph cannot contain this layer because of its GGUF weights, or None."""
    quant_type = getattr(getattr(layer, "weight", None), "quant_type", None)
    if quant_type is None or quant_type.name in _GGUF_CAPTURABLE:
        return None
    return f"to unpack {quant_type.name}, diffusers copies constants from the host in each call; take q8_0 instead"


def _gguf_convert(layer: torch.nn.Module, settings: SchemeSettings, kind: str) -> torch.nn.Module:
    from gguf import GGMLQuantizationType

    blocks = _gguf_quantized(layer.weight.detach(), GGMLQuantizationType[kind])
    return _gguf_linear(layer, blocks.to(layer.weight.device), kind)


def _gguf_describe(layer: torch.nn.Module, settings: SchemeSettings, kind: str) -> torch.nn.Module:
    import torch

    shape = (layer.out_features, layer.in_features // _GGUF_BLOCK * _GGUF_BLOCK_BYTES[kind])
    return _gguf_linear(layer, torch.empty(shape, dtype=torch.uint8, device=layer.weight.device), kind)


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


def _gguf_quantized(weight: torch.Tensor, quant_type: Any) -> torch.Tensor:
    """Quantise some rows at a time, on as many threads as PyTorch uses: NumPy takes one."""
    import numpy as np
    import torch
    from gguf.quants import quantize

    num_rows = max(1, _GGUF_WEIGHTS_AT_ONCE // weight.shape[1])

    def part(start: int) -> np.ndarray[Any, Any]:
        blocks: np.ndarray[Any, Any] = quantize(
            weight[start : start + num_rows].cpu().float().numpy(), quant_type
        )
        return blocks

    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return torch.from_numpy(np.concatenate(list(pool.map(part, range(0, len(weight), num_rows)))))


def _gguf_skips(layer: torch.nn.Module, name: str, settings: SchemeSettings) -> str | None:
    if layer.in_features % _GGUF_BLOCK == 0:
        return None
    return f"{layer.in_features} inputs are not a multiple of {_GGUF_BLOCK}"


def _gguf_scheme(kind: str, weights: str) -> Scheme:
    return Scheme(
        _GGUF_PACKAGE,
        f"as {kind}: {weights} per {_GGUF_BLOCK} weights, in fp16",
        "as before",
        functools.partial(_gguf_convert, kind=kind),
        functools.partial(_gguf_describe, kind=kind),
        _gguf_skips,
        cannot_be_cast=True,
        reports_storage_dtype=True,
    )


GGUF: dict[str, Scheme] = {
    "q8_0": _gguf_scheme("Q8_0", "8 bits, a scale"),
    "q5_1": _gguf_scheme("Q5_1", "5 bits, a scale and a minimum"),
    "q5_0": _gguf_scheme("Q5_0", "5 bits, a scale"),
    "q4_1": _gguf_scheme("Q4_1", "4 bits, a scale and a minimum"),
    "q4_0": _gguf_scheme("Q4_0", "4 bits, a scale"),
}
