"""Attention in fp8 (e4m3) for calls that come in fp16 or bf16: cuDNN's, and FlashAttention-3's.

Queries, keys and values are quantised here, in PyTorch's own operators, so that torch.compile fuses them with what
comes before. Only the kernel is opaque to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.machinery.attention_backends.cudnn_fp8 import attend

Function = Callable[..., Any]
_LARGEST = 448.0  # of e4m3
_LEAST_SCALE = 1e-12  # all zeros have no scale of their own
_OPERATORS: dict[str, Any] = {}  # registered once per process


def cudnn_fp8() -> Function:
    """Attend by cuDNN: a scale for each tensor; the output is e4m3 with the values' scale."""
    operator = _operator("cudnn_fp8", _cudnn, lambda query: query.new_empty(query.shape))

    def attention(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        (q, q_scale), (k, k_scale), (v, v_scale) = (_quantised(x, (0, 1, 2, 3)) for x in (query, key, value))
        scales = [x.reshape(1) for x in (q_scale, k_scale, v_scale)]
        out = operator(q, k, v, *scales, scale)
        return (out.float() * v_scale).to(query.dtype).transpose(1, 2)

    return attention


def flash3_fp8() -> Function:
    """Attend by FlashAttention-3: a scale for each head; the output is bf16."""
    import torch

    operator = _operator(
        "flash3_fp8", _flash3, lambda query: query.new_empty(query.shape, dtype=torch.bfloat16)
    )

    def attention(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        (q, q_scale), (k, k_scale), (v, v_scale) = (_quantised(x, (1, 3)) for x in (query, key, value))
        scales = [x.reshape(x.shape[0], x.shape[2]) for x in (q_scale, k_scale, v_scale)]
        return operator(q, k, v, *scales, scale).to(query.dtype).transpose(1, 2)

    return attention


def flash3_function() -> Function:
    """Return FlashAttention-3's function, from the wheel or from a local build; else ImportError."""
    import importlib.util

    if importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_func
    else:
        from flash_attn_interface import flash_attn_func
    function: Function = flash_attn_func
    return function


def _quantised(x: Any, over: tuple[int, ...]) -> tuple[Any, Any]:
    """Quantise (batch, heads, tokens, channels); return it as (batch, tokens, heads, channels), and the scales, which
    the dimensions `over` share."""
    import torch

    x = x.transpose(1, 2).contiguous()
    scale = (x.abs().amax(dim=over, keepdim=True).float() / _LARGEST).clamp_min(_LEAST_SCALE)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def _cudnn(
    query: Any, key: Any, value: Any, q_scale: Any, k_scale: Any, v_scale: Any, scale: float | None
) -> Any:
    import torch

    out = torch.empty_like(query)
    attend(query, key, value, torch.cat([q_scale, k_scale]), torch.cat([v_scale, 1 / v_scale]), out)
    return out


def _flash3(
    query: Any, key: Any, value: Any, q_scale: Any, k_scale: Any, v_scale: Any, scale: float | None
) -> Any:
    output = flash3_function()(
        query, key, value, softmax_scale=scale, q_descale=q_scale, k_descale=k_scale, v_descale=v_scale
    )
    out = output[0] if isinstance(output, tuple) else output  # some versions also return the log-sum-exp
    return out.contiguous()


def _operator(name: str, call: Function, shaped: Function) -> Any:
    """Return a custom operator, which torch.compile does not look into; `shaped` makes an output of the query."""
    import torch

    if name not in _OPERATORS:

        def operator(query, key, value, q_scale, k_scale, v_scale, scale):  # type: ignore[no-untyped-def]
            return call(query, key, value, q_scale, k_scale, v_scale, scale)

        # For the registration, which does not support postponed annotations.
        tensors = ("query", "key", "value", "q_scale", "k_scale", "v_scale")
        operator.__annotations__ = {
            **dict.fromkeys(tensors, torch.Tensor),
            "scale": float | None,
            "return": torch.Tensor,
        }
        made = torch.library.custom_op(f"vivace::{name}_attention", operator, mutates_args=())
        made.register_fake(lambda query, *_: shaped(query))
        _OPERATORS[name] = made
    return _OPERATORS[name]
