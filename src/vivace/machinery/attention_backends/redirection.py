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

from vivace.machinery.attention_backends.fp8 import cudnn_fp8, flash3_fp8, flash3_function
from vivace.machinery.attention_backends.kernels import KERNELS

Function = Callable[..., Any]
_SERIALS = itertools.count()


class RedirectedAttention:
    """Redirects the attention calls of one component to a kernel, and counts them.

    num_redirected: calls that the kernel computed. num_compiled: calls traced into torch.compile graphs; their
    executions are not counted. left: calls that PyTorch computed, by reason. is_left: whether a layer is being computed
    whose calls stay PyTorch's.
    """

    def __init__(self, backend: str) -> None:
        import torch

        self._fp32 = torch.float32
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
        import torch

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
        """Leave the calls of these attention layers to PyTorch."""
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
        if self._kernel.half and query.dtype == self._fp32:
            return "fp32"
        if self._kernel.square and query.shape[-2] != key.shape[-2]:
            return "of other numbers of queries and keys"
        return None


class _Left:
    """Replaces an attention layer's forward, on the instance, by one whose calls stay PyTorch's.

    The redirection's state is as before between forwards, so that a graph carries none.
    """

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
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # One graph per shape, since kernels for symbolic shapes are slower. With fullgraph, since a graph break would
    # silently leave it uncompiled.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return compiled(query, key, value, scale=scale)

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return flex_attention(query, key, value, scale=scale)

    return eager, traced


def _flash3() -> tuple[Function, Function]:
    flash_attn_func = flash3_function()

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _first(flash_attn_func(query, key, value, softmax_scale=scale))

    return _opaque("flash3", call)


def _flash4() -> tuple[Function, Function]:
    from flash_attn.cute import flash_attn_func

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _first(flash_attn_func(query, key, value, softmax_scale=scale))

    return _opaque("flash4", call)


def _sage() -> tuple[Function, Function]:
    from sageattention import sageattn

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        # sageattn 1.0.6 would subtract the mean from the caller's key in place. It does not change the softmax.
        key = key - key.mean(dim=1, keepdim=True)
        return sageattn(query, key, value, tensor_layout="NHD", sm_scale=scale, smooth_k=False)

    return _opaque("sage", call)


def _xformers() -> tuple[Function, Function]:
    from xformers.ops import memory_efficient_attention

    def call(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return memory_efficient_attention(query, key, value, scale=scale)

    return _opaque("xformers", call)


_FUNCTIONS: dict[str, Callable[[], tuple[Function, Function]]] = {
    "flex": _flex,
    "flash3": _flash3,
    "flash3_fp8": lambda: (flash3_fp8(),) * 2,
    "cudnn_fp8": lambda: (cudnn_fp8(),) * 2,
    "flash4": _flash4,
    "sage": _sage,
    "xformers": _xformers,
}
_OPERATORS: dict[str, Any] = {}  # registered once per process


def _opaque(name: str, call: Function) -> tuple[Function, Function]:
    """Return a package's kernel for eager calls, and as a custom operator that is opaque to torch.compile.

    `call` takes and returns (batch, tokens, heads, channels), as these packages do; scaled_dot_product_attention has
    heads before tokens.
    """
    import torch

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return call(*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    if name not in _OPERATORS:

        def operator(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None
        ) -> torch.Tensor:
            return call(query, key, value, scale).contiguous()

        # For the registration, which does not support postponed annotations.
        operator.__annotations__ = {
            **dict.fromkeys(("query", "key", "value"), torch.Tensor),
            "scale": float | None,
            "return": torch.Tensor,
        }
        made = torch.library.custom_op(f"vivace::{name}_attention", operator, mutates_args=())
        made.register_fake(lambda query, key, value, scale: query.new_empty(query.shape))
        _OPERATORS[name] = made

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return _OPERATORS[name](*(x.transpose(1, 2) for x in (query, key, value)), scale).transpose(1, 2)

    return eager, traced


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
