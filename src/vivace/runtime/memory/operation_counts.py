"""Count the operations of a call by component, on meta tensors, in the pass that also counts its memory.

A call is run at all of its steps, since only that tells how often the denoiser is called. After the first two steps a
call with inputs of known shapes is not traced again: its operations are those of the first call with such inputs. So a
step cache's hits count as if they were computed. One multiply-add is 2 FLOP. As usual, only matmuls, convolutions and
attention are counted, attention in full even with a causal mask; everything else is memory-bound.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vivace.foundation.spec.ceilings import ComponentWork, Work
from vivace.machinery.technique import COMPONENTS, Stage, Technique, component_of, working_part

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

Kind = Literal["gemm", "conv", "attention"]
VAE_ENCODER = "vae_encoder"
"""Component that encodes the source images of a call. Techniques know the VAE as one component."""
CONTROLNET = "controlnet"
_TRACED_STEPS = 2
_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class Operations:
    """FLOP of the operations so far, by component and kind."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self._flop: Counter[tuple[str, Kind]] = Counter()
        self._dtypes: Counter[tuple[str, str]] = Counter()
        self._component = ""
        self._in_attention = False
        self._paused = False
        self._formulas: dict[Any, Callable[..., int] | None] = {}

    def called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Count an operator overload such as aten.mm.default: matmuls, convolutions and attention."""
        if func not in self._formulas:
            self._formulas[func] = _formula_of(func)
        formula = self._formulas[func]
        if formula is None or self._paused:
            return
        name = str(func)
        is_attention = self._in_attention or "fused_attention" in name
        kind: Kind = "attention" if is_attention else "conv" if "convolution" in name else "gemm"
        self._add(kind, formula(*args, **kwargs, out_val=result), args)

    def attended(self, query: Any, key: Any, value: Any) -> None:
        """Count fused attention on tensors (..., tokens, channels)."""
        both = query.shape[-1] + value.shape[-1]
        self._add("attention", 2 * query.shape[:-1].numel() * key.shape[-2] * both, (query,))

    @contextmanager
    def attending(self) -> Iterator[None]:
        """Count matmuls inside the context as attention's."""
        before, self._in_attention = self._in_attention, True
        try:
            yield
        finally:
            self._in_attention = before

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside the context: it was counted already."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def enter(self, component: str) -> None:
        """Count operations from now on as a component's; "" for no component."""
        self._component = component

    @contextmanager
    def inside(self, component: str) -> Iterator[None]:
        """Count operations inside the context as a call of a component."""
        before, self._component = self._component, component
        self.calls[component] += 1
        try:
            yield
        finally:
            self._component = before

    def snapshot(self) -> Counter[tuple[str, Kind]]:
        return Counter(self._flop)

    def repeat(self, added: Counter[tuple[str, Kind]]) -> None:
        """Count operations again that are not executed again."""
        self._flop.update(added)

    def flop(self, component: str, kind: Kind) -> int:
        return self._flop[component, kind]

    def dtype(self, component: str) -> str:
        """Return the dtype of most of a component's operations, e.g. "bf16"."""
        flop_by_dtype = Counter({name: flop for (of, name), flop in self._dtypes.items() if of == component})
        return flop_by_dtype.most_common(1)[0][0] if flop_by_dtype else ""

    def _add(self, kind: Kind, flop: int, args: Sequence[Any]) -> None:
        self._flop[self._component, kind] += flop
        # Not the operands in 8 bits of a quantised layer: its technique says how it computes.
        floating = next((a for a in args[:2] if _is_floating(a)), None)
        if floating is not None:
            name = str(floating.dtype).removeprefix("torch.")
            self._dtypes[self._component, _NAMES.get(name, name)] += flop


def _is_floating(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1


def _formula_of(func: Any) -> Callable[..., int] | None:
    import torch
    from torch.utils.flop_counter import flop_registry

    if func is torch.ops.aten._int_mm.default:
        return flop_registry[torch.ops.aten.mm]  # type: ignore[no-any-return]
    return flop_registry.get(func._overloadpacket)  # type: ignore[no-any-return]


def watch(pipe: DiffusionPipeline, operations: Operations, *, traces_all: bool = False) -> None:
    """Patch the components, as instances, so that their operations are counted.

    Args:
        traces_all: also calls with inputs of known shapes, so that hits of a step cache count as such.
    """
    for name, module in _parts(pipe).items():
        module.forward = _counted(name, module.forward, operations)
        # Techniques may compute in hooks around the forward.
        module.register_forward_pre_hook(functools.partial(_enter, operations, name), prepend=True)
        module.register_forward_hook(functools.partial(_enter, operations, ""))
    if traces_all:
        return
    steps = _count_steps(pipe)
    for module in (component_of(pipe, "denoiser"), getattr(pipe, "controlnet", None)):
        if module is not None:
            module.forward = _repeated(module.forward, operations, steps)


def work_of(
    pipe: DiffusionPipeline, operations: Operations, recipe: Sequence[Technique], device: str = "cuda"
) -> Work:
    """Return the work on a device, with the precision of operations under the techniques."""
    work = []
    for name, module in _parts(pipe).items():
        if not operations.calls[name]:
            continue
        dtype = operations.dtype(name)
        # PyTorch's default on a GPU is TF32 for convolutions, not for matmuls.
        before = "tf32" if dtype == "fp32" and device == "cuda" else dtype
        gemm, conv, attention = precisions(name, dtype, before, recipe)
        work.append(
            ComponentWork(
                component=name,
                calls=operations.calls[name],
                computed=operations.calls[name],
                gemm_flop=operations.flop(name, "gemm"),
                conv_flop=operations.flop(name, "conv"),
                attention_flop=operations.flop(name, "attention"),
                gemm=gemm,
                conv=conv,
                attention=attention,
                weights_bytes=_weights_bytes(module),
            )
        )
    return Work(components=tuple(work))


def _weights_bytes(module: Any) -> int:
    """Return the bytes of a module's parameters, without embeddings' tables, which a call reads in part."""
    import torch

    tables = {id(m.weight) for m in module.modules() if isinstance(m, torch.nn.Embedding)}
    return sum(p.numel() * p.element_size() for p in module.parameters() if id(p) not in tables)


def precisions(name: str, dtype: str, conv: str, recipe: Sequence[Technique]) -> tuple[str, str, str]:
    """Return the precision of a component's matmuls, convolutions and attention under a recipe."""
    gemm, attention = dtype, dtype
    part = "vae" if name == VAE_ENCODER else name
    for technique in recipe:
        if technique.facts.stage is Stage.PRECISION or (technique.targets and part not in technique.targets):
            continue
        precision = technique.facts.arithmetic.precision
        if precision == "tf32":
            gemm, conv, attention = (precision if p == "fp32" else p for p in (gemm, conv, attention))
        elif precision is not None:
            gemm = precision
            conv = precision if technique.values.get("convolutions") else conv
        attention = technique.facts.attention_precision or attention
    return gemm, conv, attention


def skips_work(recipe: Sequence[Technique]) -> bool:
    """Whether hits of a step cache make a recipe compute less than is counted."""
    return any(technique.facts.stage is Stage.CACHE for technique in recipe)


def _parts(pipe: DiffusionPipeline) -> dict[str, Any]:
    parts: dict[str, Any] = {
        name: working_part(name, module)
        for name in COMPONENTS
        if (module := component_of(pipe, name)) is not None
    }
    if hasattr(getattr(pipe, "vae", None), "encoder"):
        parts[VAE_ENCODER] = pipe.vae.encoder
    if getattr(pipe, "controlnet", None) is not None:
        parts[CONTROLNET] = pipe.controlnet
    return parts


def _counted(name: str, forward: Callable[..., Any], operations: Operations) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with operations.inside(name):
            return forward(*args, **kwargs)

    return counted


def _enter(operations: Operations, component: str, *_: Any) -> None:
    operations.enter(component)


def _count_steps(pipe: DiffusionPipeline) -> Callable[[], int]:
    number = 0
    step = pipe.scheduler.step

    @functools.wraps(step)
    def stepped(*args: Any, **kwargs: Any) -> Any:
        nonlocal number
        number += 1
        return step(*args, **kwargs)

    pipe.scheduler.step = stepped
    return lambda: number


def _repeated(
    forward: Callable[..., Any], operations: Operations, steps: Callable[[], int]
) -> Callable[..., Any]:
    """Call the forward in the first steps, and where shapes are new; else return tensors like its first output."""
    import torch
    from torch.utils._pytree import tree_leaves, tree_map_only

    counted: dict[tuple[str, ...], tuple[Any, Counter[tuple[str, Kind]], Counter[str]]] = {}

    @functools.wraps(forward)
    def repeated(*args: Any, **kwargs: Any) -> Any:
        named = [*args, *(part for item in sorted(kwargs.items()) for part in item)]
        key = tuple(map(_shape_text, tree_leaves(named)))
        if key in counted and steps() >= _TRACED_STEPS:
            layout, flop, calls = counted[key]
            operations.repeat(flop)
            operations.calls.update(calls)
            return tree_map_only(_Layout, _Layout.make, layout)
        before, called = operations.snapshot(), Counter(operations.calls)
        output = forward(*args, **kwargs)
        added = operations.snapshot()
        added.subtract(before)
        calls = Counter(operations.calls)
        calls.subtract(called)
        if key not in counted:
            counted[key] = tree_map_only(torch.Tensor, _Layout.of, output), added, calls
        return output

    return repeated


def _shape_text(value: Any) -> str:
    """Return an input's shape, or the value itself if it is not a tensor."""
    return f"{tuple(value.shape)} {value.dtype}" if hasattr(value, "dtype") else repr(value)


@dataclass(frozen=True)
class _Layout:
    """Layout of a tensor on the meta device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: Any

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype)

    def make(self) -> torch.Tensor:
        import torch

        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
