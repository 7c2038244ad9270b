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
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from vivace.measure.accelerator import plain_tensors
from vivace.runtime.memory.operation_counts import Operations

_MAX_ENTRIES = 50_000
_SIMPLE = frozenset({int, float, bool, str, type(None)})
_Layout = tuple[tuple[int, ...], tuple[int, ...], Any]
"""Shape, strides and dtype of a tensor with its own storage."""


# PyTorch computes the shape, strides and dtype of an output in Python, by its reference implementations: 0.1 to 5 ms an
# operation, so seconds for a large denoiser. Its blocks repeat the same few operations, so here each is computed once.
class MetaOutputs:
    """Calls operations on meta tensors, and makes the outputs of known calls itself."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Layout | tuple[_Layout, ...]] = {}
        self._makes_outputs: dict[Any, bool] = {}

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of `func(*args, **kwargs)`, for an operator overload such as aten.add.Tensor."""
        if not self._only_makes_outputs(func):
            return func(*args, **kwargs)
        key = _key_of((func, args, tuple(kwargs.items())))
        if key is None:
            return func(*args, **kwargs)
        output = self._known.get(key)
        if output is not None:
            return _make(output)
        result = func(*args, **kwargs)
        layouts = None if _shares_storage(result, (args, kwargs)) else _layouts_of(result)
        if layouts is not None and len(self._known) < _MAX_ENTRIES:
            self._known[key] = layouts
        return result

    def _only_makes_outputs(self, func: Any) -> bool:
        """Whether an operator declares that it neither writes to its inputs nor returns views of them."""
        if func not in self._makes_outputs:
            schema = func._schema
            self._makes_outputs[func] = all(
                value.alias_info is None for value in (*schema.arguments, *schema.returns)
            )
        return self._makes_outputs[func]


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
_MIB = 2**20
BLOCK = 512
_SMALL = _MIB
"""Blocks up to this size come from separate, small segments."""
_SMALL_SEGMENT = 2 * _MIB
_LARGE_SEGMENT = 20 * _MIB
_OWN_SEGMENT = 10 * _MIB
"""Blocks from this size on get a segment of their size, rounded up to a multiple of _ROUND_SEGMENT."""
_ROUND_SEGMENT = 2 * _MIB


# `torch.cuda.memory_allocated` counts blocks, not tensors. A block is a multiple of 512 bytes, and a large block is
# split only if more than 1 MiB remains. For the two thousand tensors of SDXL this adds 2 % to its weights.
# Source: c10/cuda/CUDACachingAllocator.cpp, its default settings (no expandable segments, no maximal split size).
@dataclass(eq=False)
class Block:
    """A block of a segment; `previous` and `next` are its neighbours."""

    address: int
    size: int
    is_small: bool
    is_free: bool = False
    previous: Block | None = None
    next: Block | None = None


class CachingAllocator:
    """Allocates and frees blocks, best fit first. Addresses are only names.

    Attributes:
        allocated: bytes of all blocks in use, as `torch.cuda.memory_allocated()`.
        reserved: bytes of all segments, as `torch.cuda.memory_reserved()`. Segments are never released to the driver,
            which the real allocator does when memory runs out.
    """

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        # Free blocks as (size, address), separately for small and large ones.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._by_address: dict[int, Block] = {}

    def allocate(self, num_bytes: int) -> Block:
        """Allocate a block of at least that many bytes, and at least 512."""
        size = max(BLOCK, -(-num_bytes // BLOCK) * BLOCK)
        is_small = size <= _SMALL
        block = self._best_fit(size, is_small) or self._new_segment(size, is_small)
        remainder = block.size - size
        if remainder >= BLOCK if is_small else remainder > _SMALL:
            after = Block(block.address + size, remainder, is_small, previous=block, next=block.next)
            if block.next is not None:
                block.next.previous = after
            block.next, block.size = after, size
            self._add_free(after)
        self.allocated += block.size
        return block

    def free(self, block: Block) -> None:
        """Free a block, and merge it with free neighbours."""
        self.allocated -= block.size
        before, after = block.previous, block.next
        if after is not None and after.is_free:
            self._remove_free(after)
            self._merge(block, after)
        if before is not None and before.is_free:
            self._remove_free(before)
            self._merge(before, block)
            block = before
        self._add_free(block)

    def _best_fit(self, size: int, is_small: bool) -> Block | None:
        free = self._free[is_small]
        index = bisect_left(free, (size, 0))
        if index == len(free):
            return None
        block = self._by_address[free[index][1]]
        self._remove_free(block)
        return block

    def _new_segment(self, size: int, is_small: bool) -> Block:
        if is_small:
            size = _SMALL_SEGMENT
        elif size < _OWN_SEGMENT:
            size = _LARGE_SEGMENT
        else:
            size = -(-size // _ROUND_SEGMENT) * _ROUND_SEGMENT
        block = Block(self.reserved, size, is_small)
        self.reserved += size
        return block

    def _add_free(self, block: Block) -> None:
        block.is_free = True
        self._by_address[block.address] = block
        insort(self._free[block.is_small], (block.size, block.address))

    def _remove_free(self, block: Block) -> None:
        block.is_free = False
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.size, block.address))]

    @staticmethod
    def _merge(block: Block, after: Block) -> None:
        block.size += after.size
        block.next = after.next
        if after.next is not None:
            after.next.previous = block


class Footprint:
    """Tracks the live bytes of one device.

    Attributes:
        stage: name of the current stage of the call, set by the caller. Peaks are kept by stage.
        peaks: the largest number of live bytes in each stage, including what was allocated before it.
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


def _key_of(value: Any) -> Hashable | None:
    """Return the inputs that decide the outputs' layout; None if unknown. Scalars are not remembered: whether one
    represents a Python number, which decides type promotion, cannot be read."""
    import torch

    kind = type(value)
    if kind in _SIMPLE:
        return (kind, value)  # 1, 1.0 and True are equal
    if isinstance(value, torch.Tensor):
        if value.device.type != "meta" or value.dim() == 0:
            return None
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        keys = []
        for item in value:
            key = _key_of(item)
            if key is None:
                return None
            keys.append(key)
        return tuple(keys)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format) or callable(value):
        return (value,)
    return None


def _shares_storage(result: Any, inputs: Any) -> bool:
    """Whether an output is a view of an input although the operator does not declare it, as aten._unsafe_view."""
    import torch
    from torch.utils._pytree import tree_leaves

    def storages(value: Any) -> set[int]:
        return {
            leaf.untyped_storage()._cdata for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)
        }

    return not storages(result).isdisjoint(storages(inputs))


def _layouts_of(result: Any) -> _Layout | tuple[_Layout, ...] | None:
    """Return the layouts of an operation's outputs; None if they cannot be made by `_make`."""
    import torch

    if isinstance(result, torch.Tensor):
        layout = (tuple(result.shape), tuple(result.stride()), result.dtype)
        is_plain = type(result) is torch.Tensor and result.device.type == "meta"
        is_whole = is_plain and _make(layout).untyped_storage().nbytes() == result.untyped_storage().nbytes()
        return layout if is_whole and result.storage_offset() == 0 else None
    if isinstance(result, tuple) and result and all(isinstance(item, torch.Tensor) for item in result):
        if len({item.untyped_storage()._cdata for item in result}) < len(result):
            return None
        layouts = [_layouts_of(item) for item in result]
        return None if None in layouts else tuple(layouts)  # type: ignore[arg-type]
    return None


def _make(layouts: Any) -> Any:
    import torch

    if isinstance(layouts[-1], torch.dtype):
        shape, strides, dtype = layouts
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
    return tuple(_make(layout) for layout in layouts)
