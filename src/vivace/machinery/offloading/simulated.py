"""Offloading on the meta device, where memory is predicted and no tensor has data to move.

An offloaded tensor is a single CPU number expanded to the whole shape; an onloaded one is a meta tensor again, which
`vivace.runtime.memory` counts as memory of the GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from vivace.machinery.offloading.layer_offloader import is_onloaded_whole, layers_of, layers_to_keep
from vivace.machinery.offloading.offloaded_module import map_tensors, tensor_slots

if TYPE_CHECKING:
    import torch

    Replacements = dict[int, tuple[torch.Tensor, torch.Tensor]]
    """By the id of a tensor: the tensor, kept alive, and its replacement."""


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
