"""Offload a pipeline's components to host memory and onload each one while it works.

Nothing is copied back (see `offloaded_module`). What is done to a component while it is onloaded (SDXL's pipeline casts
its VAE to fp32 and back) is undone when it is offloaded; what is done to it while it is offloaded persists.

Copies are made on the compute stream: kernels that follow are ordered after them, and the allocator knows when their
memory is free. Nothing is prefetched because little could be hidden: the denoiser would be copied while the text
encoders work, which takes milliseconds, and the VAE, which follows the denoiser, is small.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING, Any

from vivace.machinery.offloading.offloaded_module import OffloadedModule, PinnedMemory, tensor_slots

if TYPE_CHECKING:
    import torch


class ComponentOffloader:
    """Onloads each component when it is called, and offloads those before it in the pipeline's order.

    A component stays onloaded until a later one is called or the pipeline's call ends; those that the pipeline excludes
    are moved to the device for good. Hooks are replaced, and the pipeline's `maybe_free_model_hooks`. On "cpu" it
    copies too.
    """

    def __init__(self, pipe: Any, device: Any, *, pin: bool) -> None:
        import torch

        pipe.remove_all_hooks()
        modules = {n: part for n, part in pipe.components.items() if isinstance(part, torch.nn.Module)}
        for name in pipe._exclude_from_cpu_offload:
            if name in modules:
                modules.pop(name).to(device)
        self.memory = PinnedMemory(sum(_num_bytes(module) for module in modules.values()))
        self._device = torch.device(device)
        self._pinned = self.memory if pin else None
        self._last_copies: list[TimedCopy] = []
        self._copies: list[TimedCopy] = []
        self._components: dict[str, OffloadedModule] = {}
        self._attach(pipe, modules)
        free = pipe.maybe_free_model_hooks

        @functools.wraps(free)
        def free_and_end_call() -> None:
            free()
            self.end_call()

        pipe.maybe_free_model_hooks = free_and_end_call

    def _attach(self, pipe: Any, modules: dict[str, torch.nn.Module]) -> None:
        order = [name for name in pipe.model_cpu_offload_seq.split("->") if name in modules]
        for name, module in modules.items():
            self._components[name] = OffloadedModule(module, self._device)
        for name in modules:
            earlier = [self._components[n] for n in order[: order.index(name)]] if name in order else []
            self._attach_component(self._components[name], earlier)

    def _attach_component(self, component: OffloadedModule, earlier: list[OffloadedModule]) -> None:
        from accelerate.hooks import add_hook_to_module

        component.move_to_host(self._pinned)
        add_hook_to_module(component.module, _ComponentHook(self, component, earlier))

    @property
    def is_in_call(self) -> bool:
        """Whether a component is onloaded, as always within a call."""
        return any(component.is_onloaded for component in self._components.values())

    @property
    def copied_bytes(self) -> int:
        """Bytes that the last finished call copied to the device."""
        return sum(copy.num_bytes for copy in self._last_copies)

    @property
    def copied_s(self) -> float:
        """Seconds that these copies took by the device's clock. Synchronises."""
        return sum(copy.seconds for copy in self._last_copies)

    def onload(self, component: OffloadedModule) -> None:
        copy = TimedCopy(component.device)
        copy.num_bytes = component.onload()
        copy.stop()
        self._copies.append(copy)

    def end_call(self) -> None:
        """Offload every component: a call has ended, successfully or not."""
        for component in self._components.values():
            component.offload()
        if self._copies:
            self._last_copies, self._copies = self._copies, []


class TimedCopy:
    """The bytes and the time of one component's copy. The clock starts when it is created."""

    def __init__(self, device: torch.device) -> None:
        self.num_bytes = 0
        self._device = device
        self._start: Any = self._now()
        self._stop: Any = None

    def stop(self) -> None:
        self._stop = self._now()

    @property
    def seconds(self) -> float:
        if self._device.type != "cuda":
            return float(self._stop - self._start)
        self._stop.synchronize()
        return float(self._start.elapsed_time(self._stop)) / 1000

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class _ComponentHook:
    no_grad = False

    def __init__(
        self, offloader: ComponentOffloader, component: OffloadedModule, earlier: list[OffloadedModule]
    ) -> None:
        self.execution_device = component.device  # where pipelines create their tensors
        self._offloader = offloader
        self._component = component
        self._earlier = earlier

    def init_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        convert = module._apply  # `to`, `half` and `float` call it

        @functools.wraps(convert)
        def convert_onloaded(*args: Any, **kwargs: Any) -> Any:
            # SDXL's VAE is cast within a call, before it is called itself. On the device the cast takes no time, and
            # offloading undoes it.
            if self._offloader.is_in_call:
                self._onload()
            converted = convert(*args, **kwargs)
            self._component.offload_if_moved()
            return converted

        module._apply = convert_onloaded
        return module

    def detach_hook(self, module: torch.nn.Module) -> torch.nn.Module:
        self._component.offload()
        del module._apply
        return module

    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not self._onload():
            return args, kwargs
        from accelerate.utils import send_to_device

        # The caller may have created them where it found the component.
        device = self.execution_device
        return send_to_device(args, device), send_to_device(kwargs, device)

    def post_forward(self, module: torch.nn.Module, output: Any) -> Any:
        return output

    def _onload(self) -> bool:
        for component in self._earlier:
            component.offload()
        if self._component.is_onloaded:
            return False
        self._offloader.onload(self._component)
        return True


def _num_bytes(module: torch.nn.Module) -> int:
    tensors = [slots[name] for slots, name in tensor_slots(module.modules())]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
