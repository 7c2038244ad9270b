"""A pipeline's layers wait in the host's memory, and each visits the GPU while it computes.

As with whole parts (`visits`) nothing is copied back, and what waits is page-locked. Who comes is a layer: a module
with tensors of its own, for as long as its forward takes. A block that is compiled as one comes as one, from outside of
what is compiled. The VAE comes as a whole, since pipelines cast it in the middle of a call, and its activations at full
size outweigh it.

Small vectors, biases and norms, come with the first layer of their part and stay until the call ends.

Fetched ahead, layers come on a stream beside the one that computes. Which comes next is what came after the last two
the last time; what was fetched and did not come is dropped. How much is fetched ahead is counted in bytes, since layers
differ by a factor of thousands.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from vivace.techniques.exchange import is_plain, places
from vivace.techniques.visits import Copy, Part, Visits, write_copies

AHEAD = 2**28
"""Bytes that are fetched ahead, and up to one layer more: FLUX's largest of each block has 113 MB in bf16."""

_BATCHES = 4
"""In how many pieces: a stream waits for the other once for each, not for each layer."""

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
    """

    def __init__(self, pipe: Any, device: Any, *, locks: bool, ahead: bool) -> None:
        import torch

        self._is_called = False
        self._whole: list[Part] = []
        self._layered: list[Layers] = []
        self._ahead = Ahead(torch.device(device)) if ahead else None
        self._bytes_now = self._bytes_last = 0
        super().__init__(pipe, device, locks=locks)

    def _attach(self, pipe: Any, modules: dict[str, Any]) -> None:
        from accelerate.hooks import add_hook_to_module

        for name, module in modules.items():
            if comes_whole(module):
                self._parts[name] = Part(module, self._device)
                self._whole.append(self._parts[name])
                self._attach_whole(self._parts[name], [])
            else:
                layers = Layers(self, module, self._device, self._locked)
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
        """Of a part that comes whole, for which what was fetched for another step makes room."""
        if self._ahead is not None:
            self._ahead.drop_all()
        super().come(part)

    def vectors_come(self, part: Part) -> None:
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
    """

    no_grad = False

    def __init__(self, visits: LayerVisits, module: Any, device: Any, memory: Any) -> None:
        self.execution_device = device  # where pipelines then make their tensors
        self._visits = visits
        self._module = module
        self._layers: dict[int, _Layer] = {}
        """By the identity of their module, which they hold."""
        self._vectors = Part(module, device, which=stays)
        Part(module, device).settle(memory)  # all at once: what layers share, they go on sharing
        self.attach()

    def attach(self) -> None:
        """To every layer that is not attached yet: an adapter may have come since."""
        known = self._layers
        for module, below in units(self._module):
            if id(module) not in known:
                part = Part(module, self.execution_device, below=below, which=moves)
                known[id(module)] = _Layer(self, part, compiled=below, is_root=module is self._module)

    def layer_comes(self, layer: _Layer) -> None:
        if not self._vectors.is_here:
            self._visits.vectors_come(self._vectors)
        if not layer.is_of_vectors:
            self._visits.layer_comes(layer.part)

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
        if self._depth == 0:
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


class Ahead:
    """Fetches the layers that are likely to come next, while the one that has come computes."""

    def __init__(self, device: Any) -> None:
        import torch

        self.last = 0
        """How many came in time in the last call."""
        self._now = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._then: dict[_Pair, Part] = {}
        """What came after two."""
        self._pair: _Pair | None = None
        """The two that came last."""
        self._tail: _Pair | None = None
        """The last two of those that are expected, if any is."""
        self._fetched: dict[Part, tuple[int, _Batch]] = {}
        """In the order in which they are expected, with their bytes."""
        self._waiting = 0
        """Bytes of them all."""

    def comes(self, part: Part) -> int:
        """Its turn has come. Returns the bytes that were copied, of what was fetched ahead as well."""
        num_bytes = 0
        if part in self._fetched:
            while (expected := next(iter(self._fetched))) is not part:
                self._drop(expected)
            self._take(part)
            self._now += 1
        else:
            self.drop_all()
            num_bytes += part.come()
        if self._pair is not None:
            self._then[self._pair] = part
        self._pair = (self._pair[1] if self._pair is not None else None, part)
        return num_bytes + self._fetch(part)

    def end(self) -> None:
        self.drop_all()
        if self._pair is not None:
            self.last, self._now = self._now, 0
        self._pair = None

    def drop_all(self) -> None:
        """Nothing is expected any more."""
        for part in list(self._fetched):
            self._drop(part)
        self._tail = None

    def _fetch(self, part: Part) -> int:
        if self._waiting > AHEAD - AHEAD // _BATCHES:
            return 0
        batch, before = _Batch(self._stream, part.device), self._waiting
        pair = self._tail or self._pair
        assert pair is not None
        try:
            while self._waiting < AHEAD:
                following = self._then.get(pair)
                if following is None or following is part or following in self._fetched:
                    break
                if following.is_here:
                    break  # it computes, and this comes within it
                size = batch.add(following)
                self._fetched[following] = size, batch
                self._waiting += size
                pair = self._tail = (pair[1], following)
        finally:
            batch.copy()
        return self._waiting - before

    def _take(self, part: Part) -> None:
        """Away from what is expected. It is written to until its batch is there."""
        size, batch = self._fetched.pop(part)
        self._waiting -= size
        batch.wait()

    def _drop(self, part: Part) -> None:
        self._take(part)
        part.withdraw()


_Pair = tuple[Part | None, Part]


class _Batch:
    """What is copied at once on a stream of its own, into memory of the stream that computes.

    Args:
        stream: None where nothing has streams; then copies are made by whoever asks for them.
    """

    def __init__(self, stream: Any, device: Any) -> None:
        self._stream = stream
        self._device = device
        self._copies: list[Copy] = []
        self._event: Any = None
        """When the copies are there; None as well once the stream that computes waits for that."""

    def add(self, part: Part) -> int:
        """Returns its bytes."""
        copies = part.make_room()
        self._copies += copies
        return sum(copy.nbytes for copy, _ in copies)

    def copy(self) -> None:
        copies, self._copies = self._copies, []
        if not copies or self._stream is None:
            write_copies(copies)
            return
        import torch

        # The memory may be what was given up by kernels that are still to run.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            write_copies(copies)
        self._event = self._stream.record_event()

    def wait(self) -> None:
        """Before anything of it is read or given up."""
        event, self._event = self._event, None
        if event is not None:
            import torch

            torch.cuda.current_stream(self._device).wait_event(event)
