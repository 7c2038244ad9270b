"""bitsandbytes' schemes, which replace Linear layers by the library's own. An optional extra.

It is the only backend of LLM.int8(), int8 matmuls that keep outliers in fp16, and of QLoRA's NF4 with or without double
quantisation. No record in results/ compares its speed with another backend's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.machinery.quantization.scheme import Scheme, SchemeSettings, meta_layer

if TYPE_CHECKING:
    import torch

_PACKAGE = ("bitsandbytes", "bitsandbytes")
_BLOCK = 64  # weights that share a scale in NF4
_SCALES = 256  # scales that share a second scale
_OUTLIER = 6.0  # inputs above this are multiplied in fp16; the paper's threshold


def _int8(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    made = Linear8bitLt(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        has_fp16_weights=False,
        threshold=_OUTLIER,
        device="meta",
    )
    # `Int8Params.to` quantises only what comes from the CPU; a weight on the GPU it silently leaves as it is.
    values, scales, _ = int8_vectorwise_quant(layer.weight.detach().to(torch.float16))
    made.weight = Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)
    made.bias = layer.bias
    return made


def _int8_on_meta(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch

    weight = (tuple(layer.weight.shape), torch.int8)
    return meta_layer(layer, weight, ((layer.out_features,), torch.float32), dequantises=False)


def _nf4(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
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
        blocksize=_BLOCK,
        compress_statistics=settings.double_quantization,
        quant_type="nf4",
        module=made,
    )
    made.weight = weight.to(layer.weight.device)  # quantises
    made.bias = layer.bias
    return made


def _nf4_on_meta(layer: torch.nn.Module, settings: SchemeSettings) -> torch.nn.Module:
    import torch

    blocks = -(-layer.weight.numel() // _BLOCK)
    weight = ((-(-layer.weight.numel() // 2), 1), torch.uint8)
    levels = ((16,), torch.float32)
    if not settings.double_quantization:
        return meta_layer(layer, weight, levels, ((blocks,), torch.float32))
    # Double quantisation adds the 256 levels of the first scales, their second scales and their mean.
    second = [((size,), torch.float32) for size in (-(-blocks // _SCALES), 256, 1)]
    return meta_layer(layer, weight, levels, ((blocks,), torch.uint8), *second)


def _unsupported(settings: SchemeSettings) -> str | None:
    if settings.machine.backend == "mps":
        return "bitsandbytes has no kernels for Apple's GPUs; torchao's int8 and nf4 are PyTorch's own operations"
    return None


BITSANDBYTES: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "in int8, inputs scaled in each call, outliers among them in fp16 (LLM.int8())",
        _int8,
        _int8_on_meta,
        unsupported=_unsupported,
    ),
    "nf4": Scheme(
        _PACKAGE,
        f"in 4 bits, quantiles of a normal distribution, a scale per {_BLOCK} weights, in 8 or 32 bits",
        "as before",
        _nf4,
        _nf4_on_meta,
        unsupported=_unsupported,
        has_single_scales=True,
        reports_storage_dtype=True,
    ),
}
