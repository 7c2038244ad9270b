"""A pipeline's layers wait in the host's memory, and each visits the GPU while it computes.

As with whole parts (`visits`) nothing is copied back, and what waits is page-locked. Who comes is a layer: a module
with tensors of its own, for as long as its forward takes. A block that is compiled as one comes as one, from outside of
what is compiled. The VAE comes as a whole, since pipelines cast it in the middle of a call, and its activations at full
size outweigh it.

Small vectors, biases and norms, come with the first layer of their part and stay until the call ends. So many bytes of
the denoiser's layers as the GPU has room for can be kept as well, from its first step until the VAE comes.

The next ones can be fetched ahead (`fetch_ahead`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vivace.offloading.components import Part, Visits
from vivace.offloading.prefetch import Ahead
from vivace.offloading.tensor_swap import is_plain, places

DENOISERS = ("unet", "transformer")
"""What diffusers' pipelines call the part that is called in every step."""

SMALL = 2**16
"""Bytes up to which a vector (a bias, a norm's weights) stays for the call: half of SDXL's tensors, and 0.06 % of their
bytes."""


class LayerVisits(Visits):
    """Who is on the device: the layers that compute, and those that were fetched ahead.

    Args:
        pipe: a diffusers pipeline. Its hooks are replaced, its `maybe_free_model_hooks` on the instance, and the
            forward of every layer.
        device: where layers work. On "cpu" visits are copies like any others, for tests.
        locks: whether the memory that weights wait in is page-locked.
        ahead: whether the next layers are fetched while one computes.
        keep: bytes of the denoiser's layers that stay on the device while it works.

    Attributes:
        kept_bytes: of the layers that were chosen to stay.
    """

    def __init__(self, pipe: Any, device: Any, *, locks: bool, ahead: bool, keep: float = 0) -> None:
        import torch

        self._is_called = False
        self._whole: list[Part] = []
        self._layered: list[Layers] = []
        self._ahead = Ahead(torch.device(device)) if ahead else None
        self._bytes_now = self._bytes_last = 0
        self._keep = keep
        self.kept_bytes = 0
        super().__init__(pipe, device, locks=locks)

    def _attach(self, pipe: Any, modules: dict[str, Any]) -> None:
        from accelerate.hooks import add_hook_to_module

        for name, module in modules.items():
            if comes_whole(module):
                self._parts[name] = Part(module, self._device)
                self._whole.append(self._parts[name])
                self._attach_whole(self._parts[name], [])
            else:
                keep = self._keep if name in DENOISERS else 0
                layers = Layers(self, module, self._device, self._locked, keep)
                self.kept_bytes += layers.kept_bytes
                self._layered.append(layers)
                add_hook_to_module(module, layers)

    @property
    def is_under_way(self) -> bool:
        return self._is_called or super().is_under_way

    @property
    def copied_bytes(self) -> int:
        return self._bytes_last + super().copied_bytes

    @property
    def fetched_ahead(self) -> int:
        """Layers that the last call found on the device when their turn came."""
        return self._ahead.last if self._ahead is not None else 0

    def begin(self) -> None:
        """A part that comes by layers is called."""
        if not self._is_called:
            self._is_called = True
            for layers in self._layered:
                layers.attach()
        for part in self._whole:
            part.leave()

    def come(self, part: Part) -> None:
        """Of a part that comes whole, for which the denoiser's layers make room."""
        if self._ahead is not None:
            self._ahead.drop_all()
        for layers in self._layered:
            layers.vacate()
        super().come(part)

    def comes_to_stay(self, part: Part) -> None:
        self._bytes_now += part.come()

    def layer_comes(self, part: Part) -> None:
        if self._ahead is None:
            self._bytes_now += part.come()
        else:
            self._bytes_now += self._ahead.comes(part)

    def end(self) -> None:
        if self._ahead is not None:
            self._ahead.end()
        for layers in self._layered:
            layers.leave()
        if self._is_called:
            self._bytes_last, self._bytes_now = self._bytes_now, 0
            if not self._now:
                self._last = []  # a call without the VAE
        self._is_called = False
        super().end()


def comes_whole(module: Any) -> bool:
    """Whether it is a VAE, of which pipelines call `decode`, and which they cast in the middle of a call."""
    return hasattr(module, "decode")


def is_compiled(function: Any) -> bool:
    """Whether torch.compile made it, or what stands for that where nothing has data."""
    return hasattr(function, "_torchdynamo_orig_callable")


def stays(tensor: Any) -> bool:
    """Whether it is a small vector, which is not worth a copy in every step."""
    return is_plain(tensor) and tensor.ndim <= 1 and bool(tensor.nbytes <= SMALL)


def moves(tensor: Any) -> bool:
    return not stays(tensor)


def kept(module: Any, num_bytes: float) -> list[tuple[Any, bool]]:
    """Which of a part's `units` stay where there is room for so many bytes. They are spread evenly, so that copying and
    computing go on taking turns."""
    sizes = [(unit, _num_bytes(*unit)) for unit in units(module)]
    share = min(1.0, num_bytes / max(1, sum(size for _, size in sizes)))
    chosen, passed, taken = [], 0, 0
    for unit, size in sizes:
        passed += size
        if size and taken + size <= share * passed:
            taken += size
            chosen.append(unit)
    return chosen


def _num_bytes(module: Any, below: bool) -> int:
    """Of what moves; what a compiled block's layers share is counted once."""
    modules = module.modules() if below else (module,)
    moving = {id(held[name]): held[name] for held, name in places(modules) if moves(held[name])}
    return sum(_stored(tensor) for tensor in moving.values())


def _stored(tensor: Any) -> int:
    """Bytes of a tensor, or of those that a quantised one holds."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return int(tensor.nbytes)
    names, _ = tensor.__tensor_flatten__()
    return sum(_stored(getattr(tensor, name)) for name in names)


def units(module: Any) -> Iterator[tuple[Any, bool]]:
    """What visits by itself: modules with tensors of their own, and blocks that are compiled as one, which come with
    all below them (True)."""
    if is_compiled(getattr(module, "_compiled_call_impl", None)):
        yield module, True
        return
    if next(places((module,)), None) is not None:
        yield module, False
    for child in module.children():
        yield from units(child)


class Layers:
    """One part, whose layers come one by one. What accelerate's `add_hook_to_module` asks of a hook.

    Args:
        memory: where tensors wait, or None for the host's ordinary memory.
        keep: bytes of layers that stay until `vacate` or the call's end.
    """

    no_grad = False

    def __init__(self, visits: LayerVisits, module: Any, device: Any, memory: Any, keep: float) -> None:
        self.execution_device = device  # where pipelines then make their tensors
        self._visits = visits
        self._module = module
        self._layers: dict[int, _Layer] = {}
        """By the identity of their module, which they hold."""
        self._vectors = Part(module, device, which=stays)
        Part(module, device).settle(memory)  # all at once: what layers share, they go on sharing
        chosen = kept(module, keep) if keep else []
        self.kept_bytes = sum(_num_bytes(*unit) for unit in chosen)
        self._kept = {id(unit) for unit, _ in chosen}
        self.attach()

    def attach(self) -> None:
        """To every layer that is not attached yet: an adapter may have come since."""
        known = self._layers
        for module, below in units(self._module):
            if id(module) not in known:
                part = Part(module, self.execution_device, below=below, which=moves)
                layer = _Layer(self, part, compiled=below, is_root=module is self._module)
                layer.is_kept = id(module) in self._kept
                known[id(module)] = layer

    def layer_comes(self, layer: _Layer) -> None:
        if not self._vectors.is_here:
            self._visits.comes_to_stay(self._vectors)
        if layer.is_kept:
            if not layer.part.is_here:
                self._visits.comes_to_stay(layer.part)
        elif not layer.is_of_vectors:
            self._visits.layer_comes(layer.part)

    def vacate(self) -> None:
        """What is kept leaves, and comes again when it is called."""
        for layer in self._layers.values():
            if layer.is_kept:
                layer.leave()

    def leave(self) -> None:
        """The call has ended."""
        for layer in self._layers.values():
            layer.leave()
        self._vectors.withdraw()
        for module in self._module.modules():
            Part(module, self.execution_device, below=False).tidy()

    def init_hook(self, module: Any) -> Any:
        return module

    def detach_hook(self, module: Any) -> Any:
        self.leave()
        for layer in self._layers.values():
            layer.detach()
        self._layers.clear()
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        from accelerate.utils import send_to_device

        self._visits.begin()
        root = self._layers.get(id(module))
        if root is not None:
            root.enter()
        # Made where the part was found.
        device = self.execution_device
        return send_to_device(args, device), send_to_device(kwargs, device)

    def post_forward(self, module: Any, output: Any) -> Any:
        root = self._layers.get(id(module))
        if root is not None:
            root.exit()
        return output


class _Layer:
    """Comes when its module's forward begins, and leaves when it ends.

    Args:
        compiled: PyTorch calls what it compiled of the module instead of its forward.
        is_root: the part's own hook says when it is called.
    """

    def __init__(self, layers: Layers, part: Part, *, compiled: bool, is_root: bool) -> None:
        self._layers = layers
        self.part = part
        self.is_of_vectors = not part.has(moves)
        self.is_kept = False
        self._depth = 0
        """A module may be called within its own forward."""
        self._place = None if is_root else "_compiled_call_impl" if compiled else "forward"
        if self._place is None:
            return
        self._own = vars(part.module).get(self._place)
        """What the module had there itself, None for its class's."""
        self._visiting = self._wrapped(getattr(part.module, self._place))
        setattr(part.module, self._place, self._visiting)

    def _wrapped(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def visiting(*args: Any, **kwargs: Any) -> Any:
            self.enter()
            try:
                return forward(*args, **kwargs)
            finally:
                self.exit()

        return visiting

    def enter(self) -> None:
        if self._depth == 0:
            self._layers.layer_comes(self)
        self._depth += 1

    def exit(self) -> None:
        self._depth -= 1
        if self._depth == 0 and not self.is_kept:
            self.part.withdraw()

    def leave(self) -> None:
        """Whatever it was doing: the call has ended."""
        self._depth = 0
        self.part.withdraw()

    def detach(self) -> None:
        held = vars(self.part.module)
        if self._place is None or held.get(self._place) is not self._visiting:
            return  # somebody has put another there since, which calls this one
        if self._own is None:
            del held[self._place]
        else:
            held[self._place] = self._own
