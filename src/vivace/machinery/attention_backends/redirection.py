"""Redirect attention calls to kernels that PyTorch does not dispatch to.

All attention of diffusers' models ends in `torch.nn.functional.scaled_dot_product_attention`. It is replaced while
a component's forward runs, and restored afterwards, so that adapters, fused projections and processors of any kind
keep working. torch.compile guards the function and traces into the replacement.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from vivace.machinery.attention_backends.cudnn_fp8 import attend
from vivace.machinery.attention_backends.kernels import KERNELS

Function = Callable[..., Any]
_SERIALS = itertools.count()
_LARGEST = 448.0  # of e4m3
_LEAST_SCALE = 1e-12  # all zeros have no scale of their own


class RedirectedAttention:
    """Redirects the attention calls of one component to a kernel, and counts them.

    num_redirected: calls that the kernel computed. num_compiled: calls traced into torch.compile graphs; their
    executions are not counted. left: calls that PyTorch computed, by reason. is_left: whether a layer is being computed
    whose calls stay PyTorch's.
    """

    def __init__(self, backend: str) -> None:
        self.num_redirected = 0
        self.num_compiled = 0
        self.left: dict[str, int] = {}
        self.is_left = False
        # A graph guards it: another session's code would compute the same, and count there.
        self._serial = str(next(_SERIALS))
        self._kernel = KERNELS[backend]
        self._attention = self._function(backend)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        import torch.nn.functional as functional
        from torch._dynamo import config

        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention
        try:
            # UNets have more attention shapes than dynamo's default limit of eight, beyond which flex would fail.
            with config.patch(recompile_limit=64):
                yield
        finally:
            functional.scaled_dot_product_attention = before

    def _function(self, backend: str) -> Function:
        plain = torch.nn.functional.scaled_dot_product_attention
        eager, traced = _FUNCTIONS[backend]()
        label = f"vivace::{backend}_attention"

        # Runs once per call site while a graph is traced; it is not part of the graph.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_compiled(serial: str) -> int:
            self.num_compiled += 1
            return self.num_compiled

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_left(reason: str, serial: str) -> int:
            self.left[reason] = self.left.get(reason, 0) + 1
            return 0

        def attention(
            query: Any,
            key: Any,
            value: Any,
            attn_mask: Any = None,
            dropout_p: float = 0.0,
            is_causal: bool = False,
            scale: float | None = None,
            enable_gqa: bool = False,
        ) -> Any:
            reason = self._left_to_pytorch(query, key, attn_mask, dropout_p, is_causal, enable_gqa)
            if reason is None and scale is not None and self._kernel.fixed_scale:
                reason = "with a softmax scale of its own"
            if reason is not None:
                count_left(reason, self._serial)
                return plain(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if torch.compiler.is_compiling():
                count_compiled(self._serial)
                return traced(query, key, value, scale)
            self.num_redirected += 1
            if torch.autograd._profiler_enabled():  # so that the kernel has a name in traces
                with torch.profiler.record_function(label):
                    return eager(query, key, value, scale)
            return eager(query, key, value, scale)

        return attention

    def leave_out(self, attentions: Iterable[Any]) -> None:
        for attention in attentions:
            _Left(attention, self)

    def _left_to_pytorch(
        self, query: Any, key: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool
    ) -> str | None:
        if self.is_left:
            return "in blocks that were to be left"
        if mask is not None:
            return "masked"
        if dropout_p or is_causal or enable_gqa:
            return "causal, grouped or with dropout"
        if query.is_cuda and not self._kernel.takes_head(query.shape[-1]):
            return f"heads of {query.shape[-1]}"
        if self._kernel.half and query.dtype == torch.float32:
            return "fp32"
        if self._kernel.square and query.shape[-2] != key.shape[-2]:
            return "of other numbers of queries and keys"
        return None


class _Left:
    """Replaces an attention layer's forward by one whose calls stay PyTorch's; between forwards nothing has changed."""

    def __init__(self, attention: Any, redirected: RedirectedAttention) -> None:
        self._whole: Function = attention.forward
        self._redirected = redirected
        # A bound method, since torch.compile takes callable objects for different code in each block.
        attention.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._redirected.is_left = True
        try:
            return self._whole(*args, **kwargs)
        finally:
            self._redirected.is_left = False


def _flex() -> tuple[Function, Function]:
    from torch.nn.attention.flex_attention import flex_attention

    # One graph per shape, since kernels for symbolic shapes are slower. With fullgraph, since a graph break would
    # silently leave it uncompiled.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return compiled(query, key, value, scale=scale)

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return flex_attention(query, key, value, scale=scale)

    return eager, traced


def _flash3_function() -> Function:
    import importlib.util

    if importlib.util.find_spec("fa3_fwd_interface") is not None:
        from fa3_fwd_interface import flash_attn_func
    else:
        from flash_attn_interface import flash_attn_func
    function: Function = flash_attn_func
    return function


def _flash3() -> tuple[Function, Function]:
    flash_attn_func = _flash3_function()
    return _package("flash3", lambda q, k, v, scale: _first(flash_attn_func(q, k, v, softmax_scale=scale)))


def _flash4() -> tuple[Function, Function]:
    from flash_attn.cute import flash_attn_func

    return _package("flash4", lambda q, k, v, scale: _first(flash_attn_func(q, k, v, softmax_scale=scale)))


def _sage() -> tuple[Function, Function]:
    from sageattention import sageattn

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        # sageattn 1.0.6 would subtract the mean from the caller's key in place. It does not change the softmax.
        key = key - key.mean(dim=1, keepdim=True)
        return sageattn(query, key, value, tensor_layout="NHD", sm_scale=scale, smooth_k=False)

    return _package("sage", call)


def _xformers() -> tuple[Function, Function]:
    from xformers.ops import memory_efficient_attention

    return _package("xformers", lambda q, k, v, scale: memory_efficient_attention(q, k, v, scale=scale))


# In fp8 queries, keys and values are quantised here, in PyTorch's own operators, so that torch.compile fuses them with
# what comes before. Only the kernel is opaque to it.


def _cudnn_fp8() -> tuple[Function, Function]:
    """Attend by cuDNN: a scale for each tensor; the output is e4m3 with the values' scale."""

    def call(query: Any, key: Any, value: Any, scale: float | None, of_q: Any, of_k: Any, of_v: Any) -> Any:
        out = torch.empty_like(query)
        attend(query, key, value, torch.cat([of_q, of_k]), torch.cat([of_v, 1 / of_v]), out)
        return out

    operator = _operator("cudnn_fp8", call, num_scales=3)

    def attention(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        rows, scales = zip(*(_quantised(x, (0, 1, 2, 3)) for x in (query, key, value)), strict=True)
        out = operator(*rows, scale, *(each.reshape(1) for each in scales))
        return (out.float() * scales[2]).to(query.dtype).transpose(1, 2)

    return attention, attention


def _flash3_fp8() -> tuple[Function, Function]:
    """Attend by FlashAttention-3: a scale for each head; the output is bf16."""

    def call(query: Any, key: Any, value: Any, scale: float | None, of_q: Any, of_k: Any, of_v: Any) -> Any:
        scales = {"q_descale": of_q, "k_descale": of_k, "v_descale": of_v}
        return _first(_flash3_function()(query, key, value, softmax_scale=scale, **scales))

    operator = _operator("flash3_fp8", call, num_scales=3, dtype=torch.bfloat16)

    def attention(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        rows, scales = zip(*(_quantised(x, (1, 3)) for x in (query, key, value)), strict=True)
        made = operator(*rows, scale, *(each.reshape(each.shape[0], each.shape[2]) for each in scales))
        return made.to(query.dtype).transpose(1, 2)

    return attention, attention


def _quantised(x: Any, over: tuple[int, ...]) -> tuple[Any, Any]:
    """Quantise (batch, heads, tokens, channels); return it tokens first, and scales, which dimensions `over` share."""
    x = x.transpose(1, 2).contiguous()
    scale = (x.abs().amax(dim=over, keepdim=True).float() / _LARGEST).clamp_min(_LEAST_SCALE)
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


_FUNCTIONS: dict[str, Callable[[], tuple[Function, Function]]] = {
    "flex": _flex,
    "flash3": _flash3,
    "flash3_fp8": _flash3_fp8,
    "cudnn_fp8": _cudnn_fp8,
    "flash4": _flash4,
    "sage": _sage,
    "xformers": _xformers,
}
_OPERATORS: dict[str, Any] = {}  # registered once per process


def _package(name: str, call: Function) -> tuple[Function, Function]:
    """Return a package's kernel for eager calls, and as a custom operator; in scaled_dot_product_attention, other than
    in these packages, heads come before tokens."""
    operator = _operator(name, call)

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return call(*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return operator(*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    return eager, traced


def _operator(name: str, call: Function, num_scales: int = 0, dtype: Any = None) -> Any:
    """Return a kernel of (batch, tokens, heads, channels) as a custom operator, which torch.compile does not look into;
    `dtype` is the output's, if not the query's."""
    if name not in _OPERATORS:
        scales = "".join(f", Tensor scale_{k}" for k in range(num_scales))
        made = torch.library.custom_op(
            f"vivace::{name}_attention",
            lambda *args: call(*args).contiguous(),
            mutates_args=(),
            schema=f"(Tensor query, Tensor key, Tensor value, float? scale{scales}) -> Tensor",
        )
        made.register_fake(lambda query, *_: query.new_empty(query.shape, dtype=dtype))
        _OPERATORS[name] = made
    return _OPERATORS[name]


def _first(result: Any) -> Any:
    """Return the output of a kernel of which some versions return the log-sum-exp, too."""
    return result[0] if isinstance(result, tuple) else result
