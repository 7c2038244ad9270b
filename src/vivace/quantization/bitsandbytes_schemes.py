"""bitsandbytes' schemes: its layers in the place of Linear ones. An optional extra."""

from __future__ import annotations

from typing import Any

from vivace.quantization.meta_weights import held
from vivace.quantization.scheme import Scheme, Settings

_PACKAGE = ("bitsandbytes", "bitsandbytes")
_BLOCK = 64  # weights that share a scale in NF4
_SCALES = 256  # scales that share a second scale
_OUTLIER = 6.0  # inputs above this are multiplied in full precision, as the paper has it


def _int8(layer: Any, settings: Settings) -> Any:
    import torch

    rows = layer.out_features
    if not settings.has_data:
        weight = (tuple(layer.weight.shape), torch.int8)
        return held(layer, weight, ((rows,), torch.float32), widens=False)
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params, Linear8bitLt

    made = Linear8bitLt(
        layer.in_features,
        rows,
        bias=layer.bias is not None,
        has_fp16_weights=False,
        threshold=_OUTLIER,
        device="meta",
    )
    # `Int8Params.to` quantises what comes from the CPU alone; what is on the GPU already it silently leaves as it is.
    values, scales, _ = int8_vectorwise_quant(layer.weight.detach().to(torch.float16))
    made.weight = Int8Params(values, requires_grad=False, has_fp16_weights=False, CB=values, SCB=scales)
    made.bias = layer.bias
    return made


def _nf4(layer: Any, settings: Settings) -> Any:
    import torch

    if not settings.has_data:
        blocks = -(-layer.weight.numel() // _BLOCK)
        weight = ((-(-layer.weight.numel() // 2), 1), torch.uint8)
        levels = ((16,), torch.float32)
        if not settings.double_quantization:
            return held(layer, weight, levels, ((blocks,), torch.float32))
        # With the second scales come the 256 levels of the first ones, and their mean.
        second = [((size,), torch.float32) for size in (-(-blocks // _SCALES), 256, 1)]
        return held(layer, weight, levels, ((blocks,), torch.uint8), *second)
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


BITSANDBYTES: dict[str, Scheme] = {
    "int8": Scheme(
        _PACKAGE,
        "in int8, a scale per output row",
        "in int8, inputs scaled anew in each call, outliers among them in fp16 (LLM.int8())",
        _int8,
    ),
    "nf4": Scheme(
        _PACKAGE,
        f"in 4 bits, quantiles of a normal distribution, a scale per {_BLOCK} weights which is itself in 8 bits or not",
        "as before",
        _nf4,
        has_single_scales=True,
        hides_dtype=True,
    ),
}
