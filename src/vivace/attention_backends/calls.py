"""Attention calls led to kernels that PyTorch does not choose from by itself.

diffusers' UNets and VAEs call `torch.nn.functional.scaled_dot_product_attention`, as its transformers do in the end, so
that function is what is exchanged while a component's forward runs, and put back behind it: adapters, fused
projections and processors of any kind stay as they are. torch.compile guards the function, and traces into ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from vivace.attention_backends.kernels import KERNELS

Function = Callable[..., Any]


class Led:
    """Calls of one component that are led to a kernel, counted.

    num_led: calls that the kernel computed. num_compiled: places in graphs of torch.compile that hold it; their calls
    pass here no more. left: calls that stayed PyTorch's, by the reason.
    """

    def __init__(self, backend: str) -> None:
        import torch

        self._fp32 = torch.float32
        self.num_led = 0
        self.num_compiled = 0
        self.left: dict[str, int] = {}
        self._kernel = KERNELS[backend]
        self._attention = self._function(backend)

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Lead calls while the context lasts."""
        import torch.nn.functional as functional
        from torch._dynamo import config

        before = functional.scaled_dot_product_attention
        functional.scaled_dot_product_attention = self._attention
        try:
            # UNets have more shapes of attention than dynamo's usual eight. Beyond the limit flex would give up.
            with config.patch(recompile_limit=64):
                yield
        finally:
            functional.scaled_dot_product_attention = before

    def _function(self, backend: str) -> Function:
        """A stand-in for scaled_dot_product_attention."""
        import torch

        plain = torch.nn.functional.scaled_dot_product_attention
        eager, traced = _FUNCTIONS[backend]()
        label = f"vivace::{backend}_attention"

        # Runs while a graph is traced, once a place; the graph itself holds nothing of it.
        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_compiled() -> int:
            self.num_compiled += 1
            return self.num_compiled

        @torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
        def count_left(reason: str) -> int:
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
            reason = self._misfit(query, attn_mask, dropout_p, is_causal, enable_gqa)
            if reason is not None:
                count_left(reason)
                return plain(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
            if torch.compiler.is_compiling():
                count_compiled()
                return traced(query, key, value, scale)
            self.num_led += 1
            if torch.autograd._profiler_enabled():  # so that a trace names it
                with torch.profiler.record_function(label):
                    return eager(query, key, value, scale)
            return eager(query, key, value, scale)

        return attention

    def _misfit(
        self, query: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool
    ) -> str | None:
        """Why a call is left to PyTorch."""
        if mask is not None:
            return "masked"
        if dropout_p or is_causal or enable_gqa:
            return "causal, grouped or with dropout"
        if query.is_cuda and not self._kernel.takes_head(query.shape[-1]):
            return f"heads of {query.shape[-1]}"
        if self._kernel.half and query.dtype == self._fp32:
            return "fp32"
        return None


def _flex() -> tuple[Function, Function]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    # A graph for each shape: kernels for symbolic shapes are slower. Whole, or else it would silently not be compiled.
    compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)

    def eager(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return compiled(query, key, value, scale=scale)

    def traced(query: Any, key: Any, value: Any, scale: float | None) -> Any:
        return flex_attention(query, key, value, scale=scale)

    return eager, traced


def _flash3() -> tuple[Function, Function]:
    from flash_attn_interface import flash_attn_func

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
        # It would subtract the mean from the caller's own key, in place (1.0.6). Softmax does not see the difference.
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
    "flash4": _flash4,
    "sage": _sage,
    "xformers": _xformers,
}
_OPERATORS: dict[str, Any] = {}  # registered once a process


def _opaque(name: str, call: Function) -> tuple[Function, Function]:
    """A package's kernel, called as it is, and as an operator that torch.compile leaves whole.

    `call` takes and gives (batch, tokens, heads, channels), as these packages do; scaled_dot_product_attention has
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

        # Read by the registration, which does not understand postponed annotations.
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
    """The output alone: some versions also return the logarithms of the sums."""
    return result[0] if isinstance(result, tuple) else result
