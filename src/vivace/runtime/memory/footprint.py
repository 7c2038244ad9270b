"""Track the bytes that a call would allocate on a GPU, while it runs on meta tensors: nothing is computed or stored.

Every tensor that an operation returns is counted by the rules of the caching allocator until its storage is freed. So
tensors that a caller's frame still references count, and in-place operations add nothing. Three allocations inside
operations are not visible and are added by rules:

- On meta tensors attention is decomposed into matmuls with the whole score matrix. Fused kernels never write it, so
  they count as one operation; `attention(math)` does, and is tracked as it is.
- cuDNN allocates a workspace for convolutions in NCHW (`conv_workspace`). With weights in channels_last, PyTorch first
  copies an input in another format.
- cuBLAS allocates one workspace at the first matmul and keeps it (`CUBLAS_WORKSPACE`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from vivace.measure.memory import plain_tensors
from vivace.runtime.memory.allocator import Block, CachingAllocator
from vivace.runtime.memory.meta_outputs import MetaOutputs
from vivace.runtime.memory.operation_counts import Operations

CUBLAS_WORKSPACE = 32 * 2**20
"""Bytes on Hopper; 8 MiB on older GPUs. Source: PyTorch, aten/src/ATen/cuda/CublasHandlePool.cpp."""
NCHW_WORKSPACE = 1.5
"""Workspace of a convolution in NCHW, as a multiple of its input and output together. The kernels work on NHWC, so at
least both are transposed. The factor is fitted, not derived: with it the peaks of SD 1.5, SDXL and FLUX.1-dev measured
on one H200 (PyTorch 2.11, cuDNN 9.19) are predicted within 0.5 %; with 1.0 the error is 1.5 to 8 %. In channels_last
there was no workspace. Other GPUs and other versions of cuDNN may differ."""
_INDEXED_IN_32_BITS = 2**31
"""Bytes from which on cuDNN's transposing kernels cannot address a tensor; the kernels used instead have no workspace.
With it the peak of SDXL at batch 2 is predicted within 1 %, without it 10 % too high (one H200, cuDNN 9.19)."""
_EFFICIENT_IN_REGISTERS = 128
"""Head size above which memory-efficient attention accumulates its output in a separate fp32 buffer (PyTorch's
mem_eff_attention kernels)."""
_OUTPUTS = MetaOutputs()


class Footprint:
    """Tracks the live bytes of one device.

    Attributes:
        stage: name of the current stage of the call, set by the caller. Peaks are kept by stage.
        peaks: the largest number of live bytes in each stage, including what was allocated before it.
        operations: counts what is computed meanwhile.
    """

    def __init__(self, device: str = "meta") -> None:
        self.operations = Operations()
        self.stage = ""
        self.peaks: dict[str, int] = {}
        self._device = device
        self._allocator = CachingAllocator()
        # By the storage's address, which is unique while it lives.
        self._held: dict[int, tuple[Block, Any]] = {}
        self._has_cublas = False

    @property
    def held(self) -> int:
        """Current number of live bytes."""
        return self._allocator.allocated

    @property
    def peak(self) -> tuple[int, str]:
        """The peak of live bytes since `start_peak`, and its stage."""
        stage = max(self.peaks, key=lambda name: self.peaks[name], default="")
        return self.peaks.get(stage, self.held), stage

    def start_peak(self) -> None:
        """Forget earlier peaks."""
        self.peaks.clear()

    def hold(self, tensors: Iterable[Any]) -> None:
        """Count existing tensors: parameters and buffers. Shared storage counts once."""
        for tensor in tensors:
            for part in plain_tensors(tensor):
                self._add(part)

    def bytes_of(self, tensors: Iterable[Any]) -> int:
        """Return the bytes of the blocks of these tensors; shared blocks count once."""
        keys = {part.untyped_storage()._cdata for tensor in tensors for part in plain_tensors(tensor)}
        return sum(self._held[key][0].size for key in keys if key in self._held)

    @contextmanager
    def following(self) -> Iterator[None]:
        """Track all allocations on the device by operations inside the context."""
        dispatch, function = _modes(self)
        with ExitStack() as stack:
            stack.enter_context(function)
            stack.enter_context(dispatch)
            yield

    @contextmanager
    def in_stage(self, stage: str) -> Iterator[None]:
        before, self.stage = self.stage, stage
        try:
            yield
        finally:
            self.stage = before

    def made(self, result: Any) -> None:
        """Count the new tensors in an operation's result."""
        import torch

        if isinstance(result, torch.Tensor):
            self._add(result)
        elif isinstance(result, list | tuple):
            for item in result:
                self.made(item)

    def temporary(self, *sizes: int) -> None:
        """Count allocations that an operation makes besides its result and frees at its end."""
        blocks = [self._allocator.allocate(size) for size in sizes if size]
        self._note()
        for block in blocks:
            self._allocator.free(block)

    def matmul_called(self) -> None:
        """Count cuBLAS's workspace at the first matmul."""
        if not self._has_cublas:
            self._has_cublas = True
            self._allocator.allocate(CUBLAS_WORKSPACE)

    def _add(self, tensor: Any) -> None:
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._held or not size:
            return
        block = self._allocator.allocate(size)

        def gone(_: Any) -> None:
            held, _reference = self._held.pop(key)
            self._allocator.free(held)

        self._held[key] = (block, weakref.ref(storage, gone))
        self._note()

    def _note(self) -> None:
        held = self._allocator.allocated
        if held > self.peaks.get(self.stage, -1):
            self.peaks[self.stage] = held


def conv_workspace(inputs: Any, output: Any) -> int:
    """Return the bytes of cuDNN's workspace for a convolution on tensor cores (fp16, bf16, and fp32 as TF32)."""
    sizes = _size(inputs), _size(output)
    if _is_channels_last(inputs) or max(sizes) >= _INDEXED_IN_32_BITS:
        return 0
    return int(NCHW_WORKSPACE * sum(sizes))


def _modes(footprint: Footprint) -> tuple[Any, Any]:
    import torch
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    matmuls = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default}
    plain = {torch.Tensor, torch.nn.Parameter}
    # Unfused attention multiplies two tensors of (batch, heads, tokens, channels); linear layers never do.
    unfused = {torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__}

    class Follow(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if any(kind not in plain for kind in types):
                return NotImplemented  # a quantised weight, which then dispatches its own operations
            if func in matmuls:
                footprint.matmul_called()
            result = _OUTPUTS.call(func, args, kwargs or {})
            footprint.operations.called(func, args, kwargs or {}, result)
            if func is aten.convolution.default and args[0].dim() == 4:
                return _convolve(footprint, args[0], args[1], result)
            footprint.made(result)
            return result

    class FusedOperations(TorchFunctionMode):  # type: ignore[misc]
        """Operations that are a single kernel on a GPU, but several on meta tensors."""

        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            kwargs = kwargs or {}
            if func is torch.nn.functional.scaled_dot_product_attention:
                return _attend(footprint, func, args, kwargs)
            if func in unfused and args[0].dim() == 4 and args[1].dim() == 4:
                with footprint.operations.attending():
                    return func(*args, **kwargs)
            if func is torch.where and getattr(args[-1], "device", None) == torch.device("meta"):
                # A mask whose values a pipeline reads is on the CPU.
                args = (args[0].to("meta"), *args[1:])
            if func is torch.rms_norm:
                return torch.empty_like(args[0], memory_format=torch.contiguous_format)
            return func(*args, **kwargs)

    return Follow(), FusedOperations()


def _convolve(footprint: Footprint, inputs: Any, weight: Any, result: Any) -> Any:
    """Return the result in cuDNN's memory format, and count temporary allocations."""
    import torch

    last = torch.channels_last
    wants_last = _is_channels_last(inputs) or _is_channels_last(weight)
    output = result.contiguous(memory_format=last if wants_last else torch.contiguous_format)
    footprint.made(output)
    if wants_last:
        # PyTorch copies tensors that are not in that format yet.
        copies = [
            _size(tensor) for tensor in (inputs, weight) if not tensor.is_contiguous(memory_format=last)
        ]
        footprint.temporary(*copies)
    else:
        footprint.temporary(conv_workspace(inputs, output))
    return output


def _attend(footprint: Footprint, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
    """Run attention with an allowed kernel; flash, cuDNN and memory-efficient attention take the same memory."""
    import torch

    cuda = torch.backends.cuda
    query, key, value = (
        args[i] if i < len(args) else kwargs[n] for i, n in enumerate(("query", "key", "value"))
    )
    footprint.operations.attended(query, key, value)
    fused = cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()
    if not fused or query.dim() != 4:
        with footprint.operations.paused():
            return func(*args, **kwargs)
    batch, heads, tokens, _ = query.shape
    # Tokens before heads, so that merging the heads needs no copy.
    output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
    log_sum = 4 * batch * heads * tokens
    in_fp32 = value.shape[-1] > _EFFICIENT_IN_REGISTERS and output.element_size() < 4
    footprint.temporary(log_sum, 4 * output.numel() if in_fp32 else 0)
    return output


def _is_channels_last(tensor: Any) -> bool:
    import torch

    return bool(tensor.is_contiguous(memory_format=torch.channels_last)) and not tensor.is_contiguous()


def _size(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
