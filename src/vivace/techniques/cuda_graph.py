"""The denoiser's step recorded once as a CUDA graph, and replayed as a whole.

Why: eager FLUX launches 3,705 kernels a step, each by a few microseconds of Python and driver. Where the GPU waits for
    them (small models, few tokens, batch 1), a replay, which is one launch, lets it run without gaps. It needs no
    compiler and seconds instead of minutes; `compile` (mode default) may run inside the graph.
Costs: each graph keeps a step's activations for itself, in a pool that all of them share. The first call of each shape
    runs three steps' work for one. Inputs are copied in and outputs copied out.
Needs: a CUDA device, and a denoiser that decides nothing on the CPU: a step cache that reads back whether it hits
    cannot be recorded, nor can layers that copy from the host (most of GGUF's). Weights must stay where they are, so
    offloading them does not go with it.
Source: PyTorch, "Accelerating PyTorch with CUDA Graphs"; CUDA C++ Programming Guide, CUDA Graphs.

A replay reads and writes the same memory each time. Inputs are therefore copied into buffers of the graph's own, and
callers get copies of its outputs: schedulers keep earlier ones. Tensors of another shape, dtype or layout, other
structure of arguments, or another value of anything that is not a tensor make another graph; of those the latest used
are kept. Guidance that ends halfway (`cfg_cutoff`) therefore takes two. With `parallel` each GPU has its own, with its
messages to the others.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

from vivace.compilation.captured import RECORDED
from vivace.contract import Component, Effect, Stage, Target, Technique, knob
from vivace.errors import Unsupported
from vivace.quantization.gguf_schemes import unrecordable

Record = Callable[[Callable[[], Any]], tuple[Callable[[], None], Any]]
"""Given work without arguments: a function that repeats it, and the outputs which that function writes anew."""

_WARMUPS = (
    2  # in their first runs libraries choose algorithms and allocate workspaces, which must not be recorded
)


class CudaGraph(Technique):
    name: ClassVar[str] = "cuda_graph"
    summary: ClassVar[str] = "the denoiser's step recorded once, and replayed in one launch"
    stage: ClassVar[Stage] = Stage.CAPTURE
    owns: ClassVar[str] = "recording"
    same_picture: ClassVar[bool] = True
    targetable: ClassVar[tuple[Component, ...]] = ("denoiser",)
    default_targets: ClassVar[tuple[Component, ...]] = ("denoiser",)

    max_graphs: int = knob(4, ge=1, le=64, tune=[4], about="graphs that are kept, the latest used ones")

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.is_cuda:
            return "CUDA graphs are recorded on a CUDA device, and there is none"
        if target.pipe is None:
            return None
        denoiser = target.module("denoiser")
        if getattr(denoiser.forward, "replays_graphs", False):
            return "the compiled denoiser records CUDA graphs by itself in this mode; keep one of both"
        if getattr(denoiser, "is_cache_enabled", False):
            return "the denoiser's step cache decides on the CPU in each step, which a graph cannot contain"
        is_compiled = hasattr(denoiser.forward, "_torchdynamo_orig_callable")
        for name, layer in denoiser.named_modules():
            if not is_compiled and (reason := unrecordable(layer)) is not None:
                return f"a layer cannot be recorded ({name}): {reason}"
        if not target.model.has_weights:
            return (
                "what a CUDA graph's own memory pool holds cannot be predicted; predict the recipe without it, and "
                "keep a step's activations in reserve"
            )
        return None

    def apply(self, target: Target) -> Effect:
        denoiser = target.module("denoiser")
        replayed = Replayed(denoiser.forward, denoiser.device, _cuda_recorder(), self.max_graphs)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return replayed(*args, **kwargs)

        forward.replays_graphs = True  # type: ignore[attr-defined]
        denoiser.forward = forward
        setattr(denoiser, RECORDED, replayed)  # for who must agree with other processes on what is recorded

        def refuted(_: dict[str, Any]) -> str | None:
            if replayed.num_recorded > 1 and replayed.num_replays == replayed.num_recorded:
                return (
                    f"none of {replayed.num_recorded} graphs was used twice: every step had other arguments"
                )
            return None

        return Effect(
            changed={"denoiser.cuda_graphs": f"up to {self.max_graphs}"},
            evidence=lambda: {
                "cuda_graphs_recorded": replayed.num_recorded,
                "cuda_graph_replays": replayed.num_replays,
            },
            refuted=refuted,
        )


@dataclass
class _Graph:
    inputs: list[Any]  # the graph's own buffers, one a tensor of the arguments, in order
    replay: Callable[[], None]
    outputs: list[Any]
    structure: Any
    keeps_alive: list[Any]  # arguments that the key knows by their address only


class Replayed:
    """A function of tensors, recorded once for each kind of arguments and replayed from then on.

    Args:
        function: its tensors may be arguments or anywhere in tuples, lists, dicts and outputs of diffusers.
        device: where the buffers of the inputs lie; arguments from elsewhere are copied there.
        record: how work is recorded; see `Record`.
        max_graphs: how many are kept.

    Attributes:
        num_recorded, num_replays: since it was made. The call that records replays once as well.
        graphs: those that are kept, the latest used last.

    Raises:
        Unsupported: when called, if the work cannot be recorded.
    """

    def __init__(self, function: Callable[..., Any], device: Any, record: Record, max_graphs: int) -> None:
        self.num_recorded = 0
        self.num_replays = 0
        self._function = function
        self._device = device
        self._record = record
        self._max_graphs = max_graphs
        self.graphs: OrderedDict[Hashable, _Graph] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import torch
        from torch.utils._pytree import tree_flatten, tree_unflatten

        leaves, structure = tree_flatten((args, kwargs))
        key = _key(leaves, structure)
        graph = self.graphs.get(key)
        if graph is None:
            while len(self.graphs) >= self._max_graphs:
                self.graphs.popitem(last=False)
            graph = self.graphs[key] = self._make(leaves, structure)
        self.graphs.move_to_end(key)
        for buffer, tensor in zip(graph.inputs, _tensors(leaves), strict=True):
            buffer.copy_(tensor)
        graph.replay()
        self.num_replays += 1
        outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in graph.outputs]
        return tree_unflatten(outputs, graph.structure)

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call with these arguments would replay what was recorded before."""
        from torch.utils._pytree import tree_flatten

        return _key(*tree_flatten((args, kwargs))) in self.graphs

    def forget(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the next call with these arguments record anew."""
        from torch.utils._pytree import tree_flatten

        self.graphs.pop(_key(*tree_flatten((args, kwargs))), None)

    def _make(self, leaves: list[Any], structure: Any) -> _Graph:
        import torch
        from torch.utils._pytree import tree_flatten, tree_unflatten

        inputs = [_buffer(tensor, self._device) for tensor in _tensors(leaves)]
        buffers = iter(inputs)
        own = [next(buffers) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(own, structure)

        def work() -> Any:
            with torch.no_grad():
                return self._function(*args, **kwargs)

        replay, result = self._record(work)
        self.num_recorded += 1
        outputs, output_structure = tree_flatten(result)
        others = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        return _Graph(inputs, replay, outputs, output_structure, others)


def _tensors(leaves: list[Any]) -> list[Any]:
    import torch

    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _key(leaves: list[Any], structure: Any) -> Hashable:
    """What must be equal for a graph to be used again."""
    import torch

    # Buffers that are made in inference mode cannot be written outside of it.
    return structure, tuple(_kind(leaf) for leaf in leaves), torch.is_inference_mode_enabled()


def _kind(leaf: Any) -> Hashable:
    """What must be equal for a graph to be used again: of a tensor everything but its values."""
    import torch

    if isinstance(leaf, torch.Tensor):
        return "tensor", tuple(leaf.shape), leaf.stride(), leaf.dtype, leaf.device.type
    if leaf is None or isinstance(leaf, str | bool | int | float | torch.dtype | torch.device):
        return type(leaf).__name__, leaf
    return type(leaf).__name__, id(leaf)


def _buffer(tensor: Any, device: Any) -> Any:
    """A tensor of the same kind with memory of its own. Scalars that schedulers keep on the CPU go to the device,
    since a graph cannot contain the copy."""
    import torch

    return torch.empty_like(tensor, device=device, memory_format=torch.preserve_format).copy_(tensor)


def _cuda_recorder() -> Record:
    """Records CUDA graphs that share one memory pool; they are never replayed at the same time."""
    import torch

    pool = torch.cuda.graph_pool_handle()

    def record(work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARMUPS):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=pool, capture_error_mode=_strictness()):
                outputs = work()
        except torch.OutOfMemoryError:
            _end_recording_of_noise()
            raise
        except RuntimeError as error:
            _end_recording_of_noise()
            reason = (str(error).strip().splitlines() or [repr(error)])[0]
            raise Unsupported(f"cuda_graph: the denoiser's step cannot be recorded: {reason}") from error
        return graph.replay, outputs

    return record


def _strictness() -> str:
    """Of a recording. In a group of processes other threads go on meanwhile, such as the one that watches NCCL's
    messages: what they ask of CUDA concerns earlier work, and is no fault of the recording."""
    import torch.distributed as dist

    return "thread_local" if dist.is_available() and dist.is_initialized() else "global"


def _end_recording_of_noise() -> None:
    """A recording that fails leaves the device's generator believing that it goes on, and every later draw of random
    numbers fails (torch 2.11). A clone of its state has seen no recording."""
    import torch

    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    generator.graphsafe_set_state(generator.clone_state())
