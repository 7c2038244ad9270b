"""Count the floating-point operations of a forward pass while it runs, or on meta tensors, without computing.

One multiply-add is 2 FLOP. As usual, only matmuls, convolutions and attention are counted; everything else is
memory-bound. Attention is counted in full even with a causal mask.

PyTorch's FlopCounterMode cannot tell attention from GEMMs: on meta tensors attention is decomposed into the same `bmm`
as `linear` on transposed inputs (three layers of every VAE), and the CPU's flash kernel is not counted at all. So
attention is counted at its call, from the shapes of its inputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["gemm", "conv", "attention"]


def kind_of(operator: object) -> Kind:
    """Return the kind of an operator that PyTorch counts; matmuls may still be those of attention."""
    name = str(operator)
    return "attention" if "fused_attention" in name else "conv" if "convolution" in name else "gemm"


@dataclass(frozen=True)
class Flops:
    """FLOP by kind: matmuls of linear layers, convolutions, and the two matmuls of attention."""

    gemm: int
    conv: int
    attention: int

    @property
    def total(self) -> int:
        return self.gemm + self.conv + self.attention

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.gemm + other.gemm, self.conv + other.conv, self.attention + other.attention)

    def __sub__(self, other: Flops) -> Flops:
        return Flops(self.gemm - other.gemm, self.conv - other.conv, self.attention - other.attention)


@dataclass(frozen=True)
class Calls:
    """The calls of one module.

    Attributes:
        dtype: of most of its parameters, while it was called last.
        weights_bytes: of its parameters then, without tables that a call reads in part.
    """

    number: int = 0
    flops: Flops = Flops(0, 0, 0)
    dtype: str = ""
    weights_bytes: int = 0


def count_calls(
    call: Callable[[], Any], modules: Mapping[str, Any], *, stateless: Collection[str] = ()
) -> dict[str, Calls]:
    """Run `call` once without gradients, and count the operations of each of these modules.

    Args:
        modules: by name; none inside another. Their forward hooks count as well.
        stateless: names of modules that compute the same whenever their inputs have the same shapes. Each shape is
            computed once, and its count and output are used again: for tensors without values.
    """
    calls = {name: Calls() for name in modules}

    def add(name: str, flops: Flops) -> None:
        before, (dtype, num_bytes) = calls[name], weights_of(modules[name])
        calls[name] = Calls(before.number + 1, before.flops + flops, dtype, num_bytes)

    with counting() as so_far, ExitStack() as stack:
        for name, module in modules.items():
            repeated = stack.enter_context(_remembering(module, so_far)) if name in stateless else _none
            stack.enter_context(_watching(module, so_far, repeated, functools.partial(add, name)))
        call()
    return calls


def _none() -> Flops:
    return Flops(0, 0, 0)


@contextmanager
def _remembering(module: Any, so_far: Callable[[], Flops]) -> Iterator[Callable[[], Flops]]:
    """Compute the module's forward once for inputs of the same shapes; yield the FLOP that were not computed again."""
    from torch.utils._pytree import tree_leaves

    counted: dict[tuple[str, ...], tuple[Any, Flops]] = {}
    saved = _none()
    forward = module.forward

    def remembered(*args: Any, **kwargs: Any) -> Any:
        nonlocal saved
        named = [*args, *(part for item in sorted(kwargs.items()) for part in item)]
        key = tuple(map(shape_text, tree_leaves(named)))
        if key in counted:
            output, flops = counted[key]
            saved += flops
            return output
        before = so_far()
        output = forward(*args, **kwargs)
        counted[key] = output, so_far() - before
        return output

    module.forward = remembered
    try:
        yield lambda: saved
    finally:
        module.forward = forward


def shape_text(value: Any) -> str:
    """Return an input's shape, or the value itself if it is not a tensor."""
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "dtype") else repr(value)


@contextmanager
def counting() -> Iterator[Callable[[], Flops]]:
    """Count operations inside the context, without gradients; yield a function that returns the FLOP so far."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    attention = _attention_mode(counter.get_total_flops)

    def so_far() -> Flops:
        by_kind: Counter[Kind] = Counter()
        for operator, flop in counter.get_flop_counts().get("Global", {}).items():
            by_kind[kind_of(operator)] += flop
        gemm = by_kind["gemm"] - attention.counted_below
        return Flops(gemm, by_kind["conv"], attention.flop + by_kind["attention"])

    with torch.no_grad(), counter, attention:
        yield so_far


@contextmanager
def _watching(
    module: Any,
    so_far: Callable[[], Flops],
    repeated: Callable[[], Flops],
    called: Callable[[Flops], None],
) -> Iterator[None]:
    """Call `called` at the end of each call of the module with the increase of `so_far` and `repeated`."""
    before = _none()

    def begin(*_: Any) -> None:
        nonlocal before
        before = so_far() + repeated()

    def end(*_: Any) -> None:
        called(so_far() + repeated() - before)

    # Around all other hooks: techniques may compute in theirs.
    hooks = [module.register_forward_pre_hook(begin, prepend=True), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def weights_of(module: Any) -> tuple[str, int]:
    """Return the dtype of most of a module's parameters, e.g. "float16", and their bytes without embeddings' tables."""
    import torch

    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    read = [p for p in module.parameters() if id(p) not in tables]
    sizes: Counter[str] = Counter()
    for parameter in read:
        sizes[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    num_bytes = sum(p.numel() * p.element_size() for p in read)
    return (sizes.most_common(1)[0][0] if sizes else ""), num_bytes


def _attention_mode(total: Callable[[], int]) -> Any:
    """Return a mode that counts attention from its inputs, and the increase of `total` inside (`counted_below`)."""
    import torch
    from torch.overrides import TorchFunctionMode

    fused = {torch.nn.functional.scaled_dot_product_attention}
    # Unfused attention multiplies two tensors of (batch, heads, tokens, channels); linear layers never do.
    matmuls = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}

    class CountAttention(TorchFunctionMode):  # type: ignore[misc]
        flop = 0
        counted_below = 0

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func in fused:
                query, key, value = (
                    args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
                )
                flop = 2 * query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            elif func in matmuls and args[0].dim() == 4 and args[1].dim() == 4:
                flop = 2 * args[0].numel() * args[1].shape[-1]
            else:
                return func(*args, **kwargs)
            before = total()
            result = func(*args, **kwargs)
            self.flop += flop
            self.counted_below += total() - before
            return result

    return CountAttention()
