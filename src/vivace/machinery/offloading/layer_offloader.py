"""Offload a pipeline's layers to host memory and onload each one while it computes.

As with whole components nothing is copied back, and offloaded weights are in pinned memory. A layer is a module with
direct parameters or buffers; it is onloaded for the duration of its forward. A block that is compiled as one is
onloaded as one, from outside of the compiled code. The VAE is onloaded whole, since pipelines cast it within a call,
and at full size its activations outweigh it.

Small vectors (biases, norms) are onloaded with the first layer of their component and stay until the call ends. Up to a
given number of bytes of the denoiser's layers stay as well, from its first step until the VAE is onloaded.

The next layers can be prefetched (`prefetch`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

from vivace.machinery.offloading.components import ComponentOffloader
from vivace.machinery.offloading.offloaded_module import (
    OffloadedModule,
    is_plain,
    map_tensors,
    tensor_slots,
    write_copies,
)
from vivace.machinery.technique.traits import is_compiled

if TYPE_CHECKING:
    import torch

    from vivace.machinery.offloading.offloaded_module import Copy, PinnedMemory

    Replacements = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By the id of a tensor: the tensor, kept alive, and its replacement."""

PREFETCH_BYTES = 2**28
"""Bytes that are prefetched, plus up to one layer: the largest of each of FLUX's blocks has 113 MB in bf16."""

_BATCHES = 4
"""The streams wait for each other once for each quarter of these bytes, not for each layer."""

_Pair = tuple[OffloadedModule | None, OffloadedModule]


class Prefetcher:
    """Copies the layers that are likely to be called next while one computes."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self.num_prefetched = 0
        self._num_prefetched = 0
        """Number of prefetched layers in the current call."""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._followers: dict[_Pair, OffloadedModule] = {}
        """The layer that followed a pair of layers."""
        self._pair: _Pair | None = None
        """The last two layers called."""
        self._tail: _Pair | None = None
        """The last two layers expected, if any."""
        self._pending: dict[OffloadedModule, tuple[int, _Batch]] = {}
        """The prefetched layers in the order in which they are expected, with their bytes."""
        self._pending_bytes = 0

    def onload(self, layer: OffloadedModule) -> int:
        """Onload a layer that is called, and prefetch the next ones. Returns the bytes copied for all of them."""
        num_bytes = 0
        if layer in self._pending:
            while (expected := next(iter(self._pending))) is not layer:
                self._drop(expected)
            self._take(layer)
            self._num_prefetched += 1
        else:
            self.cancel()
            num_bytes += layer.onload()
        if self._pair is not None:
            self._followers[self._pair] = layer
        self._pair = (self._pair[1] if self._pair is not None else None, layer)
        return num_bytes + self._prefetch(layer)

    def end_call(self) -> None:
        self.cancel()
        if self._pair is not None:
            self.num_prefetched, self._num_prefetched = self._num_prefetched, 0
        self._pair = None

    def cancel(self) -> None:
        for layer in list(self._pending):
            self._drop(layer)
        self._tail = None

    def _prefetch(self, layer: OffloadedModule) -> int:
        if self._pending_bytes > PREFETCH_BYTES - PREFETCH_BYTES // _BATCHES:
            return 0
        batch, before = _Batch(self._stream, layer.device), self._pending_bytes
        pair = self._tail or self._pair
        assert pair is not None
        try:
            while self._pending_bytes < PREFETCH_BYTES:
                following = self._followers.get(pair)
                if following is None or following is layer or following in self._pending:
                    break
                if following.is_onloaded:
                    break  # it computes, and calls this layer
                size = batch.add(following)
                self._pending[following] = size, batch
                self._pending_bytes += size
                pair = self._tail = (pair[1], following)
        finally:
            batch.copy()
        return self._pending_bytes - before

    def _take(self, layer: OffloadedModule) -> None:
        size, batch = self._pending.pop(layer)
        self._pending_bytes -= size
        batch.wait()

    def _drop(self, layer: OffloadedModule) -> None:
        self._take(layer)
        layer.restore()


class _Batch:
    """Layers that are copied together on a side stream, into memory of the compute stream; without a stream, at
    once."""

    def __init__(self, stream: Any, device: torch.device) -> None:
        self._stream = stream
        self._device = device
        self._copies: list[Copy] = []
        self._event: Any = None
        """Marks the end of the copies; None once the compute stream waits for it."""

    def add(self, layer: OffloadedModule) -> int:
        """Allocate a layer's tensors on the device. Returns their bytes."""
        copies = layer.allocate()
        self._copies += copies
        return sum(copy.nbytes for copy, _ in copies)

    def copy(self) -> None:
        copies, self._copies = self._copies, []
        if not copies or self._stream is None:
            write_copies(copies)
            return
        import torch

        # Kernels that are still queued may use the memory until they have run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            write_copies(copies)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(event)


DENOISERS = ("unet", "transformer")
"""Names of the denoiser in diffusers' pipelines."""

SMALL_BYTES = 2**16
"""Vectors (biases, norms' weights) up to this size stay onloaded during a call: half of SDXL's tensors, and 0.06 % of
their bytes."""


class LayerOffloader(ComponentOffloader):
    """Onloads the layers that compute, and the prefetched ones: the forward of every layer is replaced, too.

    Up to `keep` bytes of the denoiser's layers stay on the device while it works; `kept_bytes` is what was chosen.
    """

    def __init__(self, pipe: Any, device: Any, *, pin: bool, prefetch: bool, keep: float = 0) -> None:
        import torch

        self._is_called = False
        self._whole: list[OffloadedModule] = []
        self._layered: list[ComponentLayers] = []
        self._prefetcher = Prefetcher(torch.device(device)) if prefetch else None
        self._layer_bytes = self._last_layer_bytes = 0
        self._keep = keep
        self.kept_bytes = 0
        super().__init__(pipe, device, pin=pin)

    def _attach(self, pipe: Any, modules: dict[str, torch.nn.Module]) -> None:
        from accelerate.hooks import add_hook_to_module

        for name, module in modules.items():
            if is_onloaded_whole(module):
                self._components[name] = OffloadedModule(module, self._device)
                self._whole.append(self._components[name])
                self._attach_component(self._components[name], [])
            else:
                keep = self._keep if name in DENOISERS else 0
                layers = ComponentLayers(self, module, self._device, self._pinned, keep)
                self.kept_bytes += layers.kept_bytes
                self._layered.append(layers)
                add_hook_to_module(module, layers)

    @property
    def is_in_call(self) -> bool:
        return self._is_called or super().is_in_call

    @property
    def copied_bytes(self) -> int:
        return self._last_layer_bytes + super().copied_bytes

    @property
    def num_prefetched(self) -> int:
        """Layers that were prefetched in time in the last call."""
        return self._prefetcher.num_prefetched if self._prefetcher is not None else 0

    def begin(self) -> None:
        """Prepare for a component that is onloaded by layers."""
        if not self._is_called:
            self._is_called = True
            for layers in self._layered:
                layers.attach()
        for component in self._whole:
            component.offload()

    def onload(self, component: OffloadedModule) -> None:
        """Onload a component whole, after the denoiser's layers are offloaded to make room."""
        if self._prefetcher is not None:
            self._prefetcher.cancel()
        for layers in self._layered:
            layers.offload_kept()
        super().onload(component)

    def onload_for_call(self, tensors: OffloadedModule) -> None:
        self._layer_bytes += tensors.onload()

    def onload_layer(self, layer: OffloadedModule) -> None:
        if self._prefetcher is None:
            self._layer_bytes += layer.onload()
        else:
            self._layer_bytes += self._prefetcher.onload(layer)

    def end_call(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.end_call()
        for layers in self._layered:
            layers.offload()
        if self._is_called:
            self._last_layer_bytes, self._layer_bytes = self._layer_bytes, 0
            if not self._copies:
                self._last_copies = []  # a call without the VAE
        self._is_called = False
        super().end_call()


def is_onloaded_whole(component: torch.nn.Module) -> bool:
    """Return whether a component is a VAE: pipelines call its `decode`, and cast it within a call."""
    return hasattr(component, "decode")


def is_small_vector(tensor: Any) -> bool:
    """Return whether a tensor is too small for a copy in every step."""
    return is_plain(tensor) and tensor.ndim <= 1 and bool(tensor.nbytes <= SMALL_BYTES)


def is_moved_by_layer(tensor: Any) -> bool:
    return not is_small_vector(tensor)


def layers_to_keep(component: torch.nn.Module, num_bytes: float) -> list[tuple[torch.nn.Module, bool]]:
    """Return the `layers_of` a component that stay onloaded given so many bytes, evenly spaced: copies alternate."""
    sizes = [(layer, _num_bytes(*layer)) for layer in layers_of(component)]
    share = min(1.0, num_bytes / max(1, sum(size for _, size in sizes)))
    chosen, passed, moved_bytes = [], 0, 0
    for layer, size in sizes:
        passed += size
        if size and moved_bytes + size <= share * passed:
            moved_bytes += size
            chosen.append(layer)
    return chosen


def _num_bytes(layer: torch.nn.Module, is_block: bool) -> int:
    modules = layer.modules() if is_block else (layer,)
    tensors = (slots[name] for slots, name in tensor_slots(modules))
    moved = {id(tensor): tensor for tensor in tensors if is_moved_by_layer(tensor)}
    return sum(_stored_bytes(tensor) for tensor in moved.values())


def _stored_bytes(tensor: Any) -> int:
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored_bytes(getattr(tensor, name)) for name in names)


def layers_of(module: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, bool]]:
    """Yield what is onloaded separately: modules with direct tensors (False), and compiled blocks as a whole (True)."""
    if is_compiled(module):
        yield module, True
        return
    if next(tensor_slots((module,)), None) is not None:
        yield module, False
    for child in module.children():
        yield from layers_of(child)


class ComponentLayers:
    """One component, whose layers are onloaded one by one: a hook for accelerate's `add_hook_to_module`."""

    no_grad = False

    def __init__(
        self,
        offloader: LayerOffloader,
        component: torch.nn.Module,
        device: torch.device,
        memory: PinnedMemory | None,
        keep: float,
    ) -> None:
        self.execution_device = device  # where pipelines create their tensors
        self._offloader = offloader
        self._component = component
        self._layers: dict[int, _Layer] = {}
        """Layers by the id of their module, which they keep alive."""
        self._vectors = OffloadedModule(component, device, which=is_small_vector)
        # All layers at once: tensors that they share stay shared.
        OffloadedModule(component, device).move_to_host(memory)
        kept = layers_to_keep(component, keep) if keep else []
        self.kept_bytes = sum(_num_bytes(*layer) for layer in kept)
        self._kept = {id(layer) for layer, _ in kept}
        self.attach()

    def attach(self) -> None:
        """Attach to every layer that is new: an adapter may have been loaded since the last call."""
        for module, is_block in layers_of(self._component):
            if id(module) not in self._layers:
                tensors = OffloadedModule(
                    module, self.execution_device, recurse=is_block, which=is_moved_by_layer
                )
                layer = _Layer(self, tensors, compiled=is_block, is_root=module is self._component)
                layer.is_kept = id(module) in self._kept
                self._layers[id(module)] = layer

    def onload(self, layer: _Layer) -> None:
        if not self._vectors.is_onloaded:
            self._offloader.onload_for_call(self._vectors)
        if layer.is_kept:
            if not layer.tensors.is_onloaded:
                self._offloader.onload_for_call(layer.tensors)
        elif not layer.has_only_vectors:
            self._offloader.onload_layer(layer.tensors)

    def offload_kept(self) -> None:
        """Offload the layers that usually stay; they are onloaded again when they are called."""
        for layer in self._layers.values():
            if layer.is_kept:
                layer.offload()

    def offload(self) -> None:
        for layer in self._layers.values():
            layer.offload()
        self._vectors.restore()
        for module in self._component.modules():
            OffloadedModule(module, self.execution_device, recurse=False).offload_added()

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self.offload()
        for layer in self._layers.values():
            layer.detach()
        self._layers.clear()
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import send_to_device

        self._offloader.begin()
        root = self._layers.get(id(module))
        if root is not None:
            root.enter()
        # The caller may have created them where it found the component.
        device = self.execution_device
        return send_to_device(args, device), send_to_device(kwargs, device)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        root = self._layers.get(id(module))
        if root is not None:
            root.exit()
        return output


class _Layer:
    """Onloads a layer when its forward begins, and offloads it when the forward ends; PyTorch calls `compiled` code
    instead."""

    def __init__(
        self, component: ComponentLayers, tensors: OffloadedModule, *, compiled: bool, is_root: bool
    ) -> None:
        self._component = component
        self.tensors = tensors
        self.has_only_vectors = not tensors.has(is_moved_by_layer)
        self.is_kept = False
        self._depth = 0
        """A module may be called within its own forward."""
        self._attribute = None if is_root else "_compiled_call_impl" if compiled else "forward"
        if self._attribute is None:
            return
        self._original = vars(tensors.module).get(self._attribute)
        """The instance's attribute; None if the class has it."""
        self._wrapper = self._wrapped(getattr(tensors.module, self._attribute))
        setattr(tensors.module, self._attribute, self._wrapper)

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def onloaded_forward(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return forward(*args, **kwargs)
            finally:
                self.exit()

        return onloaded_forward

    def enter(self) -> None:
        if self._depth == 0:
            self._component.onload(self)
        self._depth += 1

    def exit(self) -> None:
        self._depth -= 1
        if self._depth == 0 and not self.is_kept:
            self.tensors.restore()

    def offload(self) -> None:
        """Offload at the end of a call, which may have failed within this layer."""
        self._depth = 0
        self.tensors.restore()

    def detach(self) -> None:
        attributes = vars(self.tensors.module)
        if self._attribute is None or attributes.get(self._attribute) is not self._wrapper:
            return  # something wrapped it since
        if self._original is None:
            del attributes[self._attribute]
        else:
            attributes[self._attribute] = self._original


# On the meta device, where memory is predicted and no tensor has data to move, an offloaded tensor is a single CPU
# number expanded to the whole shape; an onloaded one is a meta tensor again, which `runtime.memory` counts as the
# GPU's.


def simulate_offloading(
    pipe: Any,
    components: Mapping[str, torch.nn.Module],
    mode: Literal["model", "sequential", "group"],
    keep: float = 0,
) -> None:
    """Offload components (by vivace's names), and onload whole ones or layers when called; `keep` bytes stay."""
    from accelerate.hooks import add_hook_to_module

    order = (pipe.model_cpu_offload_seq or "").split("->")
    denoiser = "unet" if getattr(pipe, "unet", None) is not None else "transformer"

    def position(component: str) -> int:
        name = denoiser if component == "denoiser" else component
        return order.index(name) if name in order else len(order)

    earlier: _Hook | None = None
    offloaded: Replacements = {}
    for component in sorted(components, key=position):
        module = components[component]
        if mode == "model" or (mode == "group" and is_onloaded_whole(module)):
            earlier = _Hook(_SimulatedModules(module.modules(), offloaded), stays=True, earlier=earlier)
            add_hook_to_module(module, earlier)
            continue
        kept = layers_to_keep(module, keep) if component == "denoiser" else []
        kept_ids = {id(layer) for layer, _ in kept}
        for layer, is_block in layers_of(module):
            if layer is not module and id(layer) not in kept_ids:
                modules = _SimulatedModules(_modules_of(layer, is_block), offloaded)
                add_hook_to_module(layer, _Hook(modules))
        add_hook_to_module(module, _Hook(_SimulatedModules([module], offloaded)))
        if kept:
            inner = [part for layer in kept for part in _modules_of(*layer) if part is not module]
            earlier = _Hook(_SimulatedModules(inner, offloaded), stays=True, earlier=earlier)
            add_hook_to_module(module, earlier, append=True)


def _modules_of(layer: torch.nn.Module, is_block: bool) -> Iterable[torch.nn.Module]:
    return layer.modules() if is_block else (layer,)


class _Hook:
    """A hook for accelerate: `stays` onloaded until the next such hook's component is called; `earlier` is offloaded
    before."""

    no_grad = False

    def __init__(
        self, modules: _SimulatedModules, *, stays: bool = False, earlier: _Hook | None = None
    ) -> None:
        self.execution_device = "meta"  # where pipelines create their tensors
        self._modules = modules
        self._stays = stays
        self._earlier = earlier

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._earlier is not None:
            self._earlier._modules.offload()
        self._modules.onload()
        return args, kwargs

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        if not self._stays:
            self._modules.offload()
        return output


class _SimulatedModules:
    """The direct tensors of some modules, offloaded at first. Tensors that several share stay shared until one is
    onloaded."""

    def __init__(self, modules: Iterable[torch.nn.Module], offloaded: Replacements) -> None:
        self._slots = list(tensor_slots(modules))
        self._strides = [slots[name].stride() for slots, name in self._slots]
        self._is_offloaded = True
        self._replace(_offloaded, offloaded)

    def offload(self) -> None:
        if not self._is_offloaded:
            self._replace(_offloaded, {})
        self._is_offloaded = True

    def onload(self) -> None:
        if self._is_offloaded:
            self._replace(_onloaded, {})
        self._is_offloaded = False

    def _replace(self, make: Any, made: Replacements) -> None:
        import torch

        for (slots, name), strides in zip(self._slots, self._strides, strict=True):
            old = slots[name]
            if id(old) not in made:
                new = map_tensors(old, make, strides)
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=False)
                made[id(old)] = old, new
            slots[name] = made[id(old)][1]


def _offloaded(tensor: torch.Tensor, _: tuple[int, ...] | None) -> torch.Tensor:
    return tensor.new_empty((), device="cpu").expand(tensor.shape)


def _onloaded(tensor: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
    if strides is None:
        return tensor.new_empty(tensor.shape, device="meta")
    return tensor.new_empty_strided(tensor.shape, strides, device="meta")
