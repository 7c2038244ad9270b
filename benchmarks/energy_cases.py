"""What `python -m benchmarks.energy` measures: products of FLUX.1's shapes whose operands differ in what their bits do,
and its attention.

All operands of a shape are as large and are read as often; only their values differ. Weights are several copies in
turn, more than the level-2 cache holds, as in a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Call = Callable[[int], None]
Way = Literal["tensor", "rows", "vivace", "bf16", "attention fp8", "attention bf16", "idle"]

SHAPES = {"down": (4608, 3072, 12288), "up": (4608, 12288, 3072), "qkv": (4608, 9216, 3072)}
"""Rows, outputs and inputs."""
ATTENTION = (4608, 24, 128)
"""Tokens, heads and channels of a head."""
LARGEST = 448.0
"""Of e4m3."""
_COPIES_BYTES = 200_000_000
_CHANNELS_SD = 1.0
"""Standard deviation of the logarithm of channels' norms."""


@dataclass(frozen=True)
class Case:
    """One loop of calls.

    Attributes:
        way: what computes: `_scaled_mm` with one scale a tensor or one a row, vivace's product, matmuls in bf16,
            attention, nothing.
        operands: a key of `OPERANDS`.
        is_fast: sums are accumulated fast.
        is_cached: one weight alone, which the level-2 cache may keep.
        predicted: joules a call over those of the case `against`, before any was measured.
    """

    way: Way
    shape: str = "down"
    operands: str = "normal"
    is_fast: bool = True
    is_cached: bool = False
    predicted: float | None = None
    against: Way = "tensor"
    operands_against: str = "normal"

    @property
    def name(self) -> str:
        parts = [self.way, *([] if self.way == "idle" or self.way.startswith("attention") else [self.shape])]
        parts += [] if self.way == "idle" else [self.operands]
        parts += [] if self.is_fast else ["exact sums"]
        return ", ".join([*parts, *(["one weight"] if self.is_cached else [])])

    @property
    def reference(self) -> str:
        """Name of the case that its joules are divided by."""
        return Case(self.against, self.shape, self.operands_against).name


CASES = (
    Case("idle"),
    Case("tensor"),
    Case("tensor", operands="bounded", predicted=1.0),
    Case("tensor", operands="few values", predicted=0.75),
    Case("tensor", operands="one exponent", predicted=0.95),
    Case("tensor", operands="powers of two", predicted=0.85),
    Case("tensor", operands="weights >= 0", predicted=0.95),
    Case("tensor", operands="both >= 0", predicted=0.88),
    Case("tensor", operands="half zero", predicted=0.7),
    Case("tensor", operands="every second zero", predicted=0.75),
    Case("tensor", operands="zeros", predicted=0.4),
    Case("tensor", operands="ones", predicted=0.45),
    Case("tensor", operands="channels", predicted=1.0),
    Case("tensor", operands="channels sorted", predicted=0.98, operands_against="channels"),
    Case("tensor", is_fast=False, predicted=1.25),
    Case("tensor", is_cached=True, predicted=0.98),
    Case("rows", predicted=1.02),
    Case("rows", operands="zeros", predicted=0.4),
    Case("rows", is_fast=False, predicted=1.25),
    Case("vivace", predicted=0.98),
    Case("vivace", operands="bounded", predicted=0.98),
    Case("bf16", predicted=2.05),
    Case("bf16", operands="zeros", predicted=0.9),
    Case("tensor", "up"),
    Case("vivace", "up", predicted=0.98),
    Case("bf16", "up", predicted=2.05),
    Case("tensor", "qkv"),
    Case("vivace", "qkv", predicted=0.98),
    Case("attention bf16"),
    Case("attention fp8", predicted=0.7, against="attention bf16"),
    Case("attention fp8", operands="zeros", predicted=0.45, against="attention bf16"),
)


def call_of(case: Case, device: str, shrink: int = 1) -> Call:
    """Return what a case calls, its argument being how often it was called before.

    Args:
        shrink: divides the sizes, to try the script on a CPU.

    Raises:
        Unsupported, RuntimeError: this device or PyTorch has no such operation.
    """
    import torch

    torch.manual_seed(0)
    if case.way == "idle":
        return lambda _: time.sleep(0.005)
    if case.way in ("attention fp8", "attention bf16"):
        return _attention(case, device, shrink)
    rows, outputs, inputs = (size // shrink for size in SHAPES[case.shape])
    dtype = torch.bfloat16 if case.way == "bf16" else torch.float8_e4m3fn
    copies = (
        1 if case.is_cached else max(2, -(-_COPIES_BYTES // (shrink**2 * outputs * inputs * dtype.itemsize)))
    )
    values, weights = OPERANDS[case.operands](rows, outputs, inputs, device)
    values, weight = values.to(dtype), weights.to(dtype)
    # The same bits in other places: a copy is as good as another weight of its kind.
    weights_in_turn = [weight.clone() for _ in range(copies)]
    out = torch.empty(rows, outputs, device=device, dtype=torch.bfloat16)
    return _product(case, values, weights_in_turn, out)


def _product(case: Case, values: Any, weights: Sequence[Any], out: Any) -> Call:
    import torch

    device, copies = values.device, len(weights)
    # So small that no output overflows; both ways get the same.
    scale = torch.full((1,), 1e-3, device=device)
    if case.way == "bf16":
        return lambda turn: torch.mm(values, weights[turn % copies].t(), out=out)
    if case.way == "vivace":
        from vivace.machinery.fused.products import multiply

        return lambda turn: multiply(values, weights[turn % copies], (scale, scale), None, out)
    of_rows, of_outputs = scale, scale
    if case.way == "rows":
        of_rows = scale.expand(len(values), 1).contiguous()
        of_outputs = scale.expand(1, len(weights[0])).contiguous()

    def multiply_scaled(turn: int) -> None:
        torch._scaled_mm(
            values,
            weights[turn % copies].t(),
            of_rows,
            of_outputs,
            out_dtype=torch.bfloat16,
            use_fast_accum=case.is_fast,
            out=out,
        )

    return multiply_scaled


def _attention(case: Case, device: str, shrink: int) -> Call:
    import torch

    from vivace.errors import Unsupported

    tokens, heads, channels = ATTENTION
    shape = (1, tokens // shrink, heads, channels)
    make = torch.zeros if case.operands == "zeros" else torch.randn
    parts = [make(shape, device=device) for _ in range(3)]
    if case.way == "attention bf16":
        q, k, v = (part.bfloat16().transpose(1, 2) for part in parts)
        return lambda _: _attend_in_bf16(q, k, v)
    from vivace.machinery.attention_backends.cudnn_fp8 import attend, unsupported_on
    from vivace.measure.machine import this_machine

    if reason := unsupported_on(this_machine(device)):
        raise Unsupported(reason)
    q, k, v = (part.mul(40).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn) for part in parts)
    scales = torch.tensor([1 / 40, 1 / 40, 1 / 40, 40.0], device=device)
    out = torch.empty_like(q)
    return lambda _: attend(q, k, v, scales[:2], scales[2:], out)


def _attend_in_bf16(q: Any, k: Any, v: Any) -> None:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION if q.is_cuda else SDPBackend.MATH):
        torch.nn.functional.scaled_dot_product_attention(q, k, v)


def _normal(rows: int, outputs: int, inputs: int, device: str) -> tuple[Any, Any]:
    import torch

    return tuple(_filling(torch.randn(num, inputs, device=device)) for num in (rows, outputs))


def _filling(values: Any) -> Any:
    """Scale values so that the largest is e4m3's."""
    return values * (LARGEST / values.abs().amax())


def _both(change: Callable[[Any], Any]) -> Callable[..., tuple[Any, Any]]:
    def make(*sizes: Any) -> tuple[Any, Any]:
        values, weights = _normal(*sizes)
        return change(values), change(weights)

    return make


def _one_exponent(values: Any) -> Any:
    """Magnitudes from 1 to 2: e4m3's eight fractions of one exponent."""
    import torch

    return (1 + 0.999 * torch.rand_like(values)).clamp(max=1.875) * values.sign()


def _powers(values: Any) -> Any:
    import torch

    return values.sign() * torch.exp2(values.abs().clamp(min=2.0**-6).log2().floor())


def _half(values: Any) -> Any:
    values[:, values.shape[1] // 2 :] = 0
    return values


def _every_second(values: Any) -> Any:
    values[:, 1::2] = 0
    return values


def _weights_positive(*sizes: Any) -> tuple[Any, Any]:
    values, weights = _normal(*sizes)
    return values, weights.abs()


def _channels(is_sorted: bool) -> Callable[..., tuple[Any, Any]]:
    """Inputs whose channels differ in size; sorted by it, in both factors, which leaves the product as it is."""

    def make(rows: int, outputs: int, inputs: int, device: str) -> tuple[Any, Any]:
        import torch

        values, weights = _normal(rows, outputs, inputs, device)
        sizes = torch.randn(inputs, device=device).mul(_CHANNELS_SD).exp()
        values = _filling(values * sizes)
        order = sizes.argsort() if is_sorted else torch.arange(inputs, device=device)
        return values[:, order], weights[:, order]

    return make


OPERANDS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "normal": _normal,
    "bounded": _both(lambda values: values * (9 / values.std())),
    "few values": _both(lambda values: values * (2.0**-8 / values.std())),
    "one exponent": _both(_one_exponent),
    "powers of two": _both(_powers),
    "weights >= 0": _weights_positive,
    "both >= 0": _both(lambda values: values.abs()),
    "half zero": _both(_half),
    "every second zero": _both(_every_second),
    "zeros": _both(lambda values: values.abs() * 0),  # no negative zeros, whose sign is a bit
    "ones": _both(lambda values: values.abs() * 0 + 1),
    "channels": _channels(is_sorted=False),
    "channels sorted": _channels(is_sorted=True),
}
"""Values (rows, inputs) and weights (outputs, inputs), in fp32, before they are rounded: of the sizes and a device."""
