"""cuBLASLt's matmuls in e4m3 and bf16, called through its C interface, for what PyTorch leaves out.

PyTorch passes no activation to fp8 matmuls, and takes the first algorithm that cuBLASLt proposes. Here GELU and the
rounding to e4m3 are part of the product: its output is written once, in one byte an element. cuBLASLt writes e4m3 only
where each factor has one scale. And of its algorithms the fastest is taken: FLUX.1's larger matmuls take 2 to 9 % less
than PyTorch's with a scale for each row (results/flux-matmuls.jsonl).

The library is the one that PyTorch has loaded. Source: NVIDIA, cuBLAS, "Using the cuBLASLt API".
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vivace.errors import Unsupported
from vivace.machinery.kernels import reference

Epilogue = Literal["none", "bias", "gelu_bias"]

# The values of cublasLt.h (CUDA 13) and library_types.h.
_COMPUTE_FP32, _FP32, _BF16, _E4M3 = 68, 0, 14, 28
_TRANSA, _EPILOGUE, _BIAS, _A_SCALE, _B_SCALE, _D_SCALE = 3, 7, 8, 17, 18, 20
_FAST_ACCUM, _BIAS_TYPE, _A_SCALE_MODE, _B_SCALE_MODE = 25, 26, 31, 32
_TRANSPOSED, _BY_ROW = 1, 3
_EPILOGUES = {"none": 1, "bias": 4, "gelu_bias": 36}
_WORKSPACE_PREFERENCE = 1
_WORKSPACE_BYTES = 32 << 20  # what PyTorch gives cuBLASLt on Hopper


class _Algorithm(ctypes.Structure):
    _fields_ = (
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace_bytes", ctypes.c_size_t),
        ("status", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    )


@dataclass(frozen=True)
class Kind:
    """A matmul: values (rows, inputs) by a weight (outputs, inputs).

    Attributes:
        values_stride, out_stride: from row to row, in elements.
        quantizes: write e4m3; else bf16.
        bf16: both factors are in bf16; else in e4m3.
        by_row: each row of both factors has a scale; else each factor has one.
        adds: add a matrix of the output's strides, in bf16, before rounding.
        workspace_bytes: the most that an algorithm may use.
    """

    rows: int
    outputs: int
    inputs: int
    values_stride: int
    out_stride: int
    quantizes: bool
    epilogue: Epilogue = "none"
    bf16: bool = False
    by_row: bool = False
    adds: bool = False
    workspace_bytes: int = _WORKSPACE_BYTES


@functools.cache
def _library() -> Any:
    major = (torch.version.cuda or "").split(".")[0]
    name = f"libcublasLt.so.{major}"
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        raise Unsupported(
            f"fused: {name}, which comes with PyTorch for CUDA, cannot be loaded: {error}"
        ) from error
    pointer = ctypes.c_void_p
    library.cublasLtGetStatusString.restype = ctypes.c_char_p
    library.cublasLtMatmul.argtypes = [*[pointer] * 14, ctypes.c_size_t, pointer]
    library.cublasLtMatmulDescSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
    library.cublasLtMatrixLayoutCreate.argtypes = [
        pointer, ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64,
    ]  # fmt: skip
    library.cublasLtMatmulPreferenceSetAttribute.argtypes = [pointer, ctypes.c_int, pointer, ctypes.c_size_t]
    library.cublasLtMatmulAlgoGetHeuristic.argtypes = [*[pointer] * 7, ctypes.c_int, pointer, pointer]
    return library


def _call(name: str, *args: Any) -> None:
    library = _library()
    if status := getattr(library, name)(*args):
        status_text = library.cublasLtGetStatusString(status).decode()
        raise Unsupported(f"fused: cuBLASLt does not take this matmul ({name}: {status_text})")


@functools.cache
def _handle(device: int) -> ctypes.c_void_p:
    handle = ctypes.c_void_p()
    _call("cublasLtCreate", ctypes.byref(handle))
    return handle


# One for all matmuls of a device: they run one after the other on a stream. Graphs captured earlier replay with it.
@functools.cache
def _workspace(device: int, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


class Plan:
    """What cuBLASLt needs to know of one kind of matmul, and its algorithms; Unsupported where it has no such
    matmul."""

    def __init__(self, kind: Kind, device: int, num_algorithms: int = 1) -> None:
        self._kind, self._device = kind, device
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._scaled = [] if kind.bf16 else [_B_SCALE, _A_SCALE]
        self._scaled += [_D_SCALE] if kind.quantizes else []
        self._description = self._described(kind)
        # cuBLASLt's matrices are column by column, so it computes out^T = weight values^T.
        written, read = (_E4M3 if kind.quantizes else _BF16), (_BF16 if kind.bf16 else _E4M3)
        self._weight = _layout(read, kind.inputs, kind.outputs, kind.inputs)
        self._values = _layout(read, kind.inputs, kind.rows, kind.values_stride)
        self._added = _layout(_BF16, kind.outputs, kind.rows, kind.out_stride)
        self._out = _layout(written, kind.outputs, kind.rows, kind.out_stride)
        self.algorithms = self._proposed(num_algorithms)

    def __call__(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        scales: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        onto: torch.Tensor | None,
        out: torch.Tensor,
        algorithm: int = 0,
    ) -> None:
        for attribute, scale in zip(self._scaled, scales, strict=True):
            self._set(attribute, ctypes.c_void_p(scale.data_ptr()))
        if bias is not None:
            self._set(_BIAS, ctypes.c_void_p(bias.data_ptr()))
        chosen = self.algorithms[algorithm]
        added = onto if onto is not None else None if self._kind.quantizes else out
        workspace = _workspace(self._device, max(self._kind.workspace_bytes, 1))
        _call(
            "cublasLtMatmul",
            _handle(self._device),
            self._description,
            ctypes.byref(self._one),
            weight.data_ptr(),
            self._weight,
            values.data_ptr(),
            self._values,
            ctypes.byref(self._one if self._kind.adds else self._zero),
            None if added is None else added.data_ptr(),
            self._added,
            out.data_ptr(),
            self._out,
            ctypes.byref(chosen.algorithm),
            workspace.data_ptr(),
            chosen.workspace_bytes,
            torch.cuda.current_stream(self._device).cuda_stream,
        )

    def _described(self, kind: Kind) -> ctypes.c_void_p:
        self._description = ctypes.c_void_p()
        _call("cublasLtMatmulDescCreate", ctypes.byref(self._description), _COMPUTE_FP32, _FP32)
        self._set(_TRANSA, ctypes.c_int32(_TRANSPOSED))
        if not kind.bf16:
            self._set(_FAST_ACCUM, ctypes.c_int8(1))
        self._set(_EPILOGUE, ctypes.c_int32(_EPILOGUES[kind.epilogue]))
        if kind.epilogue != "none":
            self._set(_BIAS_TYPE, ctypes.c_int32(_BF16))
        if kind.by_row:
            self._set(_A_SCALE_MODE, ctypes.c_int32(_BY_ROW))
            self._set(_B_SCALE_MODE, ctypes.c_int32(_BY_ROW))
        return self._description

    def _set(self, attribute: int, value: Any) -> None:
        _call(
            "cublasLtMatmulDescSetAttribute",
            self._description,
            attribute,
            ctypes.byref(value),
            ctypes.sizeof(value),
        )

    def _proposed(self, number: int) -> list[_Algorithm]:
        preference = ctypes.c_void_p()
        _call("cublasLtMatmulPreferenceCreate", ctypes.byref(preference))
        most = ctypes.c_uint64(self._kind.workspace_bytes)
        _call(
            "cublasLtMatmulPreferenceSetAttribute",
            preference,
            _WORKSPACE_PREFERENCE,
            ctypes.byref(most),
            ctypes.sizeof(most),
        )
        algorithms, count = (_Algorithm * number)(), ctypes.c_int()
        # The search wants to see pointers of the alignment that a call's will have.
        for attribute in [*self._scaled, *([_BIAS] if self._kind.epilogue != "none" else [])]:
            self._set(attribute, ctypes.c_void_p(_workspace(self._device, 256).data_ptr()))
        _call(
            "cublasLtMatmulAlgoGetHeuristic",
            _handle(self._device),
            self._description,
            self._weight,
            self._values,
            self._added,
            self._out,
            preference,
            number,
            ctypes.byref(algorithms),
            ctypes.byref(count),
        )
        _call("cublasLtMatmulPreferenceDestroy", preference)
        proposed = [algorithms[index] for index in range(count.value) if algorithms[index].status == 0]
        if not proposed:
            raise Unsupported(f"fused: cuBLASLt has no algorithm for this matmul: {self._kind}")
        return proposed


def multiply(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool = False,
    onto: torch.Tensor | None = None,
) -> None:
    """Write the product of two factors of one dtype, e4m3 or bf16, and a bias, or GELU of both, to `out`.

    Args:
        values: (rows, inputs), and out: (rows, outputs), e4m3 or bf16; rows may be part of wider ones.
        weight: (outputs, inputs), contiguous.
        scales: fp32, one element each, at a multiple of 16 bytes: of e4m3 values and weight, and with an e4m3 `out` the
            inverse of its scale.
        bias: (outputs,), bf16; GELU needs one.
        onto: (rows, outputs), bf16, is added. Its rows are as far apart as those of `out`.
    """
    (rows, inputs), outputs = values.shape, weight.shape[0]
    if not rows:
        return
    assert onto is None or onto.stride(0) == out.stride(0)
    assert all(scale.data_ptr() % 16 == 0 for scale in scales), "cuBLASLt takes no scale at another place"
    epilogue: Epilogue = "gelu_bias" if gelu else "none" if bias is None else "bias"
    kind = Kind(
        rows,
        outputs,
        inputs,
        values.stride(0),
        out.stride(0),
        quantizes=out.dtype == torch.float8_e4m3fn,
        epilogue=epilogue,
        bf16=values.dtype == torch.bfloat16,
        adds=onto is not None,
        workspace_bytes=0,
    )
    device = out.device.index or 0
    plan = _plan(kind, device)
    if plan is None:
        _multiply_in_passes(values, weight, scales, bias, out, gelu, onto)
        return
    index = _fastest.get((kind, device))
    if index is None and not torch.cuda.is_current_stream_capturing():
        index = _fastest[kind, device] = _fastest_of(
            plan, kind, device, (values, weight, scales, bias, onto, out)
        )
    plan(values, weight, scales, bias, onto, out, index or 0)


def _multiply_in_passes(
    values: torch.Tensor,
    weight: torch.Tensor,
    scales: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    out: torch.Tensor,
    gelu: bool = False,
    onto: torch.Tensor | None = None,
) -> None:
    """Write what `multiply` does by PyTorch's matmul and other passes, for what a GPU's cuBLASLt lacks, as Ada's
    may."""
    if values.dtype == torch.bfloat16:
        product = torch.nn.functional.linear(values, weight)
    else:
        of_values, of_weight = (scale.reshape(1) for scale in scales[:2])
        product = torch._scaled_mm(
            values, weight.t(), of_values, of_weight, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    made = product.float() if bias is None else product.float() + bias.float()
    if gelu:
        made = reference.gelu(made)
    if onto is not None:
        made = made + onto.float()
    if out.dtype == torch.float8_e4m3fn:
        made = reference.to_e4m3(made * scales[2].reshape(1))
    out.copy_(made)


def evidence() -> dict[str, int]:
    """Return how many kinds of matmuls took separate passes in this process, if any, for the record."""
    return {"matmuls_in_separate_passes": len(_in_passes)} if _in_passes else {}


_in_passes: set[Kind] = set()
_NUM_ALGORITHMS = 6
_ROUNDS, _CALLS = 3, 8
_HOPELESS = 1.2
"""Factor above the fastest time beyond which an algorithm is not timed again: a new image size waits for this."""
_fastest: dict[tuple[Kind, int], int] = {}
_TILE_ROWS = 128
"""Rows of a tile: kinds that fill as many tiles are computed alike, so prompts of other lengths need no timing."""
_fastest_alike: dict[tuple[Kind, int], bytes] = {}
"""The algorithm that was fastest, by kind with its rows rounded up to whole tiles, and device."""


@functools.cache
def _plan(kind: Kind, device: int) -> Plan | None:
    _library()
    try:
        return Plan(kind, device, _NUM_ALGORITHMS)
    except Unsupported:
        _in_passes.add(kind)
        return None


def _fastest_of(plan: Plan, kind: Kind, device: int, operands: tuple[Any, Any, Any, Any, Any, Any]) -> int:
    """Return the fastest bit-exact algorithm; reuse the choice for the same rounded-up row count."""
    alike = replace(kind, rows=-(-kind.rows // _TILE_ROWS) * _TILE_ROWS), device
    before = _fastest_alike.get(alike)
    proposed = [bytes(each.algorithm) for each in plan.algorithms]
    if before in proposed:
        index = proposed.index(before)
        if index in algorithms_like_the_first(plan, operands, (index,)):
            return index
    index = _timed(plan, operands)
    _fastest_alike[alike] = proposed[index]
    return index


def _timed(plan: Plan, operands: tuple[Any, Any, Any, Any, Any, Any]) -> int:
    """Return the fastest of a plan's algorithms that write the same bits, by its best round: no image depends on it."""
    best: dict[int, float] = {}
    candidates = algorithms_like_the_first(plan, operands)
    for _ in range(_ROUNDS):
        for index in candidates:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            plan(*operands, index)
            begin.record()
            for _ in range(_CALLS):
                plan(*operands, index)
            end.record()
            end.synchronize()
            best[index] = min(best.get(index, float("inf")), begin.elapsed_time(end))
        candidates = [index for index in candidates if best[index] <= _HOPELESS * min(best.values())]
    return min(best, key=best.__getitem__)


def algorithms_like_the_first(
    plan: Any, operands: tuple[Any, Any, Any, Any, Any, Any], indices: Sequence[int] | None = None
) -> list[int]:
    """Return which of a plan's algorithms write the first one's bits: one that splits sums rounds in another order."""
    out = operands[-1]
    bits = torch.uint8 if out.element_size() == 1 else torch.int16

    def written(index: int) -> torch.Tensor:
        plan(*operands, index)
        return out.view(bits).clone()

    tried = range(len(plan.algorithms)) if indices is None else indices
    first = written(0)
    return [index for index in tried if not index or written(index).equal(first)]


def _layout(kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
    layout = ctypes.c_void_p()
    _call("cublasLtMatrixLayoutCreate", ctypes.byref(layout), kind, rows, columns, stride)
    return layout
