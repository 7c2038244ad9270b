"""Functions captured as CUDA graphs: one graph for each kind of arguments, replayed from then on.

A replay reads and writes the same memory each time. So inputs are copied into the graph's buffers, and callers get
copies of its outputs. An input that is not written again, by the word of who made it, is copied once.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from vivace.errors import Unsupported

Capture = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Takes work without arguments. Returns a function that repeats it, and the outputs that this function overwrites."""

_ERROR_MODE = "thread_local"
"""Other threads call CUDA during a capture: NCCL's watchdog, and that of a server that waits for the last image. Their
calls concern earlier work and do not invalidate it."""
_WARMUPS = 2  # first runs choose algorithms and allocate workspaces, which must not be captured
_CAPTURED = "_vivace_captured"
_NEVER_WRITTEN = "_vivace_never_written"


def captured_forward(module: Any) -> Any:
    """Return what captures a module's forward, a `CapturedFunction` or what calls one; None: nothing does."""
    return getattr(module, _CAPTURED, None)


def replace_forward(module: Any, captured: Any, call: Callable[..., Any] | None = None) -> None:
    """Replace a module's forward by the object that captures it; `call` calls `captured` with other arguments."""
    called = call or captured

    def forward(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    module.forward = forward
    setattr(module, _CAPTURED, captured)


def never_written_again(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as constant, so that captured graphs copy it once; return it.

    The caller has to know: kernels of Triton and cuBLASLt, NCCL, and writes to `tensor.data` or to shared memory do not
    raise a tensor's version. The mark is this object's alone; views do not have it.
    """
    setattr(tensor, _NEVER_WRITTEN, True)
    return tensor


@dataclass
class _Graph:
    """A captured graph: its buffers, one for each tensor of the arguments, what each holds (an argument and its
    version, if known), whether the work leaves it as it is, and arguments that the key knows by id only."""

    inputs: list[torch.Tensor]
    held: list[tuple[weakref.ref[torch.Tensor], int | None] | None]
    are_kept: list[bool]
    replay: Callable[[], None]
    outputs: list[Any]
    structure: Any
    keeps_alive: list[Any]

    def fill(self, index: int, tensor: torch.Tensor) -> None:
        if not (self.are_kept[index] and hasattr(tensor, _NEVER_WRITTEN)) or tensor.is_inference():
            self.held[index] = None
            self.inputs[index].copy_(tensor)
            return
        held = self.held[index]
        # The version is more than the rule asks for: it tells of a word that was not kept, if not of all.
        if held is None or held[0]() is not tensor or held[1] != num_writes(tensor):
            self.held[index] = None
            self.inputs[index].copy_(tensor)
            self.held[index] = (weakref.ref(tensor), num_writes(tensor))


class CapturedFunction:
    """A function of tensors, captured once for each kind of arguments and then replayed; Unsupported if it cannot be.

    Args:
        function: its tensors may be anywhere in tuples, lists, dicts and outputs of diffusers.
        device: where the input buffers are; arguments on other devices are copied there.
        max_graphs: how many graphs are kept, the most recently used last.
    """

    def __init__(
        self, function: Callable[..., Any], device: torch.device, capture: Capture, max_graphs: int
    ) -> None:
        self.num_captured = 0
        self.num_replays = 0
        self._function = function
        self._device = device
        self._capture = capture
        self.max_graphs = max_graphs
        self.graphs: OrderedDict[Hashable, _Graph] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        key = _key(leaves, structure)
        graph = self.graphs.get(key)
        if graph is None:
            while len(self.graphs) >= self.max_graphs:
                self.graphs.popitem(last=False)
            graph = self.graphs[key] = self._make(leaves, structure)
        self.graphs.move_to_end(key)
        for index, tensor in enumerate(_tensors(leaves)):
            graph.fill(index, tensor)
        graph.replay()
        self.num_replays += 1
        outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in graph.outputs]
        return tree_unflatten(outputs, graph.structure)

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call with these arguments would replay a graph captured before."""
        return _key(*tree_flatten((args, kwargs))) in self.graphs

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.graphs.pop(_key(*tree_flatten((args, kwargs))), None)

    def _make(self, leaves: list[Any], structure: Any) -> _Graph:
        inputs = [_buffer(tensor, self._device) for tensor in _tensors(leaves)]
        buffers = iter(inputs)
        buffered = [next(buffers) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(buffered, structure)

        def work() -> Any:
            with torch.no_grad():
                return self._function(*args, **kwargs)

        versions = [num_writes(buffer) for buffer in inputs]
        replay, result = self._capture(work)
        self.num_captured += 1
        # A replay writes what the captured work wrote, though it raises no version.
        are_kept = [
            before is not None and before == num_writes(buffer)
            for before, buffer in zip(versions, inputs, strict=True)
        ]
        outputs, output_structure = tree_flatten(result)
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        held: list[Any] = [None] * len(inputs)
        return _Graph(inputs, held, are_kept, replay, outputs, output_structure, others)


def cuda_capturer() -> Capture:
    """Return a function that captures CUDA graphs. They share one memory pool, so no two may replay at a time."""
    pool = torch.cuda.graph_pool_handle()

    def capture(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=_ERROR_MODE):
                outputs = work()
        except torch.OutOfMemoryError:
            _end_capture_of_generator()
            raise
        except RuntimeError as error:
            _end_capture_of_generator()
            reason = (str(error).strip().splitlines() or [repr(error)])[0]
            raise Unsupported(f"cuda_graph: this component's forward cannot be captured: {reason}") from error
        return graph.replay, outputs

    return capture


def num_writes(tensor: torch.Tensor) -> int | None:
    """Return the count of PyTorch's writes to a tensor. None: it is not counted in inference mode."""
    return None if tensor.is_inference() else tensor._version


def _tensors(leaves: list[Any]) -> list[torch.Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _key(leaves: list[Any], structure: Any) -> Hashable:
    # Buffers made in inference mode cannot be written outside of it.
    return structure, tuple(_leaf_key(leaf) for leaf in leaves), torch.is_inference_mode_enabled()


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return "tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type
    if leaf is None or isinstance(leaf, str | bool | int | float | torch.dtype | torch.device):
        return type(leaf).__name__, leaf
    return type(leaf).__name__, id(leaf)


def _buffer(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device: a graph cannot contain that of a scalar that a scheduler keeps on the CPU."""
    return torch.empty_like(tensor, device=device, memory_format=torch.preserve_format).copy_(tensor)


def _end_capture_of_generator() -> None:
    """Reset the device's random generator after a failed capture, which otherwise stays in capture mode, so that every
    later random number fails (torch 2.11). A clone of its state is not in capture mode."""
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
