"""A pipeline's parts wait in the host's memory, and each visits the GPU while it works.

Weights do not change while they are used. So nothing is copied back: a visit copies what waits to the GPU, and its end
drops the copies and puts what waits in their place. What is done to a part during its visit (SDXL's pipeline casts its
VAE to fp32 and back) ends with the visit; what is done to it while it waits is there at the next one.

Copies are made on the stream that computes: kernels come after them by themselves, and the allocator knows when their
memory is free. Nothing is fetched ahead, for little could be hidden: the denoiser would come while the text encoders
work, which takes milliseconds, and what comes behind the denoiser's work, the VAE, is small.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from vivace.offloading.pinned_memory import PageLocked
from vivace.offloading.tensor_swap import Exchange, places, unrecorded


class Visits:
    """Who is on the device: a part comes when it is called, and those before it in the pipeline's order leave.

    A part stays until a later one comes or the call ends, as with diffusers' `enable_model_cpu_offload`. Parts that are
    not in the order come when they are called and stay until the end; those that the pipeline excludes from offloading
    stay on the device always.

    Args:
        pipe: a diffusers pipeline with a `model_cpu_offload_seq`. Its hooks are replaced, and its
            `maybe_free_model_hooks` on the instance.
        device: where parts work. On "cpu" visits are copies like any others, for tests.
        locks: whether the memory that weights wait in is page-locked.

    Attributes:
        memory: what is page-locked.
    """

    def __init__(self, pipe: Any, device: Any, *, locks: bool) -> None:
        import torch

        pipe.remove_all_hooks()
        modules = {n: part for n, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        for name in pipe._exclude_from_cpu_offload:
            if name in modules:
                modules.pop(name).to(device)
        self.memory = PageLocked(sum(_num_bytes(module) for module in modules.values()))
        self._device = torch.device(device)
        self._locked = self.memory if locks else None
        self._last: list[Copied] = []
        self._now: list[Copied] = []
        self._parts: dict[str, Part] = {}
        self._attach(pipe, modules)
        free = pipe.maybe_free_model_hooks

        @functools.wraps(free)
        def free_and_end() -> None:
            free()
            self.end()

        pipe.maybe_free_model_hooks = free_and_end

    def _attach(self, pipe: Any, modules: dict[str, Any]) -> None:
        order = [name for name in pipe.model_cpu_offload_seq.split("->") if name in modules]
        for name, module in modules.items():
            self._parts[name] = Part(module, self._device)
        for name in modules:
            earlier = [self._parts[n] for n in order[: order.index(name)]] if name in order else []
            self._attach_whole(self._parts[name], earlier)

    def _attach_whole(self, part: Part, earlier: list[Part]) -> None:
        from accelerate.hooks import add_hook_to_module

        part.settle(self._locked)
        add_hook_to_module(part.module, _Hook(self, part, earlier))

    @property
    def is_under_way(self) -> bool:
        """Whether a part is on the device, as always in the middle of a call."""
        return any(part.is_here for part in self._parts.values())

    @property
    def copied_bytes(self) -> int:
        """What the last call that has ended copied to the device."""
        return sum(copied.num_bytes for copied in self._last)

    @property
    def copied_s(self) -> float:
        """Seconds that its copies took, on the device's own clock. Waits for them."""
        return sum(copied.seconds for copied in self._last)

    def come(self, part: Part) -> None:
        copied = Copied(part.device)
        copied.num_bytes = part.come()
        copied.stop()
        self._now.append(copied)

    def end(self) -> None:
        """A call has ended, well or not: every part leaves."""
        for part in self._parts.values():
            part.leave()
        if self._now:
            self._last, self._now = self._now, []


class Copied:
    """What one visit copied, and in which time. Begins when it is made."""

    def __init__(self, device: Any) -> None:
        self.num_bytes = 0
        self._device = device
        self._start: Any = self._mark()
        self._stop: Any = None

    def stop(self) -> None:
        self._stop = self._mark()

    @property
    def seconds(self) -> float:
        if self._device.type != "cuda":
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _Hook:
    """What accelerate's `add_hook_to_module` asks of a hook."""

    no_grad = False

    def __init__(self, visits: Visits, part: Part, earlier: list[Part]) -> None:
        self.execution_device = part.device  # where pipelines then make their tensors
        self._visits = visits
        self._part = part
        self._earlier = earlier

    def init_hook(self, module: Any) -> Any:
        convert = module._apply  # what `to`, `half` and `float` do

        @functools.wraps(convert)
        def convert_where_it_works(*args: Any, **kwargs: Any) -> Any:
            # A cast in the middle of a call comes before the part itself is called: SDXL's VAE. On the device it takes
            # no time, and ends with the visit.
            if self._visits.is_under_way:
                self._arrive()
            converted = convert(*args, **kwargs)
            self._part.leave_if_moved()
            return converted

        module._apply = convert_where_it_works
        return module

    def detach_hook(self, module: Any) -> Any:
        self._part.leave()
        del module._apply
        return module

    def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._arrive():
            return args, kwargs
        from accelerate.utils import send_to_device

        # Made where the part was found.
        device = self.execution_device
        return send_to_device(args, device), send_to_device(kwargs, device)

    def post_forward(self, module: Any, output: Any) -> Any:
        return output

    def _arrive(self) -> bool:
        """Whether it was away."""
        for part in self._earlier:
            part.leave()
        if self._part.is_here:
            return False
        self._visits.come(self._part)
        return True


Copy = tuple[Any, Any]
"""A tensor on the device, and the one that waits."""


def write_copies(copies: list[Copy]) -> int:
    """Write to each what waits, on the current stream. Returns the bytes."""
    with unrecorded():
        for copy, tensor in copies:
            copy.copy_(tensor, non_blocking=True)
    return sum(copy.nbytes for copy, _ in copies)


class Part:
    """One network, and where its tensors are.

    Args:
        device: where it works.
        below: with all modules below it; else its own tensors alone.
        which: of its tensors only some, as in `Exchange.of_modules`.
    """

    def __init__(
        self, module: Any, device: Any, *, below: bool = True, which: Callable[[Any], bool] | None = None
    ) -> None:
        self.module = module
        self.device = device
        self._below = below
        self._which = which
        self._exchange: Exchange | None = None

    @property
    def is_here(self) -> bool:
        return self._exchange is not None

    def has(self, which: Callable[[Any], bool]) -> bool:
        """Whether any of its parameters and buffers is such a one."""
        return any(which(held[name]) for held, name in places(self._modules()))

    def settle(self, memory: PageLocked | None) -> None:
        """Put the tensors where they will wait, one after the other, and give up what they were."""

        def on_host(tensor: Any) -> Any:
            copy = memory.take(tensor) if memory is not None else None
            return copy if copy is not None else tensor.cpu()

        Exchange(on_host, remembers=False).of_modules(self._modules())

    def come(self) -> int:
        """Put copies on the device in the places of all tensors. Returns their bytes."""
        return write_copies(self.make_room())

    def make_room(self) -> list[Copy]:
        """Put tensors on the device in the places of all, and leave it to the caller to write what waits to them."""
        import torch

        copies: list[Copy] = []

        def made(tensor: Any) -> Any:
            if self._is_there(tensor):
                return tensor  # somebody moved it by hand
            copies.append((torch.empty_like(tensor, device=self.device), tensor))
            return copies[-1][0]

        self._exchange = Exchange(made, remembers=True)
        try:
            self._exchange.of_modules(self._modules(), self._which)
        except BaseException:  # no room, mostly
            self.withdraw()
            raise
        return copies

    def leave(self) -> None:
        """Put what waits back in its places; copies are dropped. One that is away already stays away."""
        if self.is_here:
            self.withdraw()
            self.tidy()

    def withdraw(self) -> None:
        """As `leave`, but what came to it during the visit stays."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.undo()

    def tidy(self) -> None:
        """What came to it during the visit, an adapter or a buffer, leaves as well."""
        if self.has(self._is_there):
            self.settle(None)

    def leave_if_moved(self) -> None:
        """After somebody moved it by hand during its visit."""
        tensors = (held[name] for held, name in places(self._modules()))
        if self.is_here and self.device.type != "cpu" and not any(self._is_there(t) for t in tensors):
            self.leave()

    def _modules(self) -> Iterable[Any]:
        return self.module.modules() if self._below else (self.module,)

    def _is_there(self, tensor: Any) -> bool:
        return bool(tensor.device.type == self.device.type != "cpu")


def _num_bytes(module: Any) -> int:
    """About what its tensors take."""
    return sum(held[name].numel() * held[name].element_size() for held, name in places(module.modules()))
