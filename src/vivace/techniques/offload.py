"""Weights wait in the host's memory and visit the GPU while they are needed.

Why: the parts of a pipeline work one after the other, and most of the weights wait at any time. `model` keeps one part
    on the GPU at a time (FLUX: the transformer without its T5), `sequential` and `group` one layer at a time, so that
    little more than activations has to fit.
Costs: the way over PCIe. `model` copies each part once a call; `group` and `sequential` move all of a part's weights
    each time it is called: FLUX's transformer is 24 GB in bf16, in every step. `model` and `group` copy nothing back:
    what waits is never given up, and lies in page-locked memory, which the GPU reads by itself. `group` with `stream`
    fetches the next layers while one computes, which takes 268 MB and a layer more; with `keep` some of the denoiser's
    layers stay while it works, and are copied once a call. `sequential` reads memory that is not locked, and makes
    every weight anew.
Needs: a GPU, and host memory for the whole model; it is loaded there and need never fit the GPU. A recorded step reads
    weights at fixed places, so graphs do not go with it; nor do compiled or quantised parts with `sequential`. With
    `group` a part may be compiled by its repeated blocks, each of which then comes as one.
Source: accelerate, `cpu_offload_with_hook` and `cpu_offload`; diffusers, `enable_group_offload`; Rajbhandari et al.,
    ZeRO-Infinity, arXiv 2104.07857.

`model` and `group` are vivace's own (`visits` and `layer_visits` in `vivace.techniques`), where diffusers has
`enable_model_cpu_offload` and `enable_group_offload`. Where the host locks no more, the rest waits in ordinary memory,
from which copies are slower; the record says how much was locked, and what stood in the way. What is written into
weights in the middle of a call is lost at its end. With `group` the VAE comes as a whole, when it decodes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Literal, Self

from pydantic import model_validator

from vivace.contract import (
    COMPONENTS,
    Arithmetic,
    Effect,
    MemoryAdvice,
    Stage,
    Target,
    Technique,
    component_of,
    is_cast_in_call,
    knob,
)
from vivace.contract.script import Script, literal, written_call
from vivace.errors import NoEffect
from vivace.offloading.components import Visits
from vivace.offloading.layers import LayerVisits, comes_whole, is_compiled, kept, units
from vivace.offloading.prefetch import AHEAD
from vivace.offloading.tensor_swap import mapped, unknown_kind

GB = 1e9
_STEP = 0.5 * GB  # in which plans propose what to keep

_MADE_ANEW = {"Parameter", "Int8Params", "Params4bit"}
"""What accelerate, which makes a weight anew from its bytes in each visit, knows how to make. Of others it loses what
the bytes mean (GGUF's kind, torchao's scales)."""


class Offload(Technique):
    name: ClassVar[str] = "offload"
    summary: ClassVar[str] = "weights wait in the host's memory"
    stage: ClassVar[Stage] = Stage.OFFLOAD
    owns: ClassVar[str] = "placement of the weights"
    same_picture: ClassVar[bool] = True
    memory_advice: ClassVar[MemoryAdvice] = MemoryAdvice(saving=("offload(model)", "offload(group)"))

    mode: Literal["model", "sequential", "group"] = knob(
        tune=["model", "group"], about="model: part by part; sequential and group: layer by layer"
    )
    stream: bool = knob(
        False, tune=[False, True], about="group only: the next layers are fetched while one computes"
    )

    keep: float = knob(
        0,
        ge=0,
        le=1000,
        tune=[0, 8],
        about="group only: GB (10^9 bytes) of the denoiser's weights that stay while it works",
    )

    @model_validator(mode="after")
    def _belongs_to_group(self) -> Self:
        for name, given in (("stream", self.stream), ("keep", self.keep)):
            if given and self.mode != "group":
                raise ValueError(f"{name} belongs to group, not to {self.mode}")
        return self

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic(weights="as before, in the host's memory")

    def with_room(self, num_bytes: float) -> str | None:
        more = math.floor((num_bytes - (AHEAD if self.stream else 0)) / _STEP)
        if self.mode != "group" or self.keep or more < 1:
            return None
        return f"offload(group, stream={self.stream}, keep={more * _STEP / GB:g})"

    @property
    def loads_from_host(self) -> bool:
        return True

    def unsupported(self, target: Target) -> str | None:
        if not target.machine.is_cuda:
            return "on a CPU the weights are in the host's memory already, and there is no GPU to keep free"
        if target.pipe is None:
            return None
        if getattr(getattr(target.pipe, "encode_prompt", None), "moves_encoders", False):
            return "the text encoders are moved with each prompt already; leave that out, offloading frees them as well"
        if self.mode == "model" and getattr(target.pipe, "model_cpu_offload_seq", None) is None:
            return f"{type(target.pipe).__name__} does not say in which order its parts work; group can do without"
        for component, module in _parts(target.pipe).items():
            inner = [module, *([module.decoder] if component == "vae" and hasattr(module, "decoder") else [])]
            if any(getattr(part.forward, "replays_graphs", False) for part in inner):
                return f"the {component} replays CUDA graphs, which read its weights at fixed places"
            kind = unknown_kind(module) if self.mode != "sequential" else None
            if kind is not None:
                return f"the {component}'s weights are {kind}, which cannot be taken apart and put together again"
            called = [getattr(module, "_compiled_call_impl", None), *(part.forward for part in inner)]
            by_layer = self.mode == "sequential" or (self.mode == "group" and not comes_whole(module))
            if by_layer and any(is_compiled(one) for one in called):
                return (
                    f"the {component} is compiled as a whole, and {self.mode} exchanges its layers' weights; model can "
                    "do that, and group if it is compiled with blocks=repeated"
                )
            if self.mode != "sequential":
                continue
            if any(below for _, below in units(module)):
                return (
                    f"the {component}'s blocks are compiled, and sequential exchanges their layers' weights; group can "
                    "do that"
                )
            if any(type(weight).__name__ not in _MADE_ANEW for weight in module.parameters()):
                return f"the {component} is quantised, and sequential moves plain weights only; group can do that"
        if self.stream and not target.model.has_weights:
            return (
                "which layers are fetched ahead is decided while it runs, so its memory cannot be predicted; predict "
                f"offload(group), and add {AHEAD / 1e6:.0f} MB and the largest layer's weights"
            )
        return None

    def apply(self, target: Target) -> Effect:
        pipe = target.pipe
        parts = _parts(pipe)
        if any(_is_offloaded(module) for module in parts.values()):
            raise NoEffect("something moves the pipeline's weights already", already_so=True)
        total = sum(_bytes(module) for module in parts.values())
        changed: dict[str, int | float | str] = {"offloaded_components": len(parts), "offloaded_bytes": total}
        visits: Visits | None = None
        if target.model.has_weights:
            visits = _enable(pipe, self, target.machine.device)
        else:
            _pretend(pipe, parts, self.mode, self.keep * GB)
        if isinstance(visits, LayerVisits) and self.keep:
            changed["kept_bytes"] = visits.kept_bytes
        if visits is not None:
            changed["page_locked_bytes"] = visits.memory.num_bytes
            if visits.memory.refused is not None:
                changed["rest_not_page_locked"] = visits.memory.refused

        def on_gpu() -> int:
            return sum(_bytes(module, "cuda") for module in parts.values())

        def evidence() -> dict[str, int | float | str]:
            found: dict[str, int | float | str] = {"weights_on_gpu_after_run_bytes": on_gpu()}
            if visits is not None:
                found["weights_copied_per_call_bytes"] = visits.copied_bytes
            if isinstance(visits, LayerVisits):
                if self.stream:
                    found["layers_fetched_ahead_per_call"] = visits.fetched_ahead
            elif visits is not None:
                found["weights_copied_per_call_s"] = visits.copied_s
            return found

        def refuted(_: dict[str, Any]) -> str | None:
            if total and on_gpu() == total:
                return "all weights were on the GPU after the run"
            return None

        @contextmanager
        def leaving() -> Iterator[None]:
            """A call that fails does not come to its own end."""
            try:
                yield
            finally:
                if visits is not None:
                    visits.end()

        return Effect(changed=changed, around=leaving, evidence=evidence, refuted=refuted)

    def script(self, target: Target) -> Script:
        if self.mode == "model":
            return Script(lines=_MODEL, places_weights=True)
        if self.mode == "sequential":
            return Script(lines=("pipe.enable_sequential_cpu_offload()",), places_weights=True)
        said = (*_GROUP, *(_KEPT if self.keep else ()))
        lines = (*said, *_group_lines("pipe", stream=self.stream))
        if self.stream and is_cast_in_call(target.pipe):
            lines = (
                *said,
                *_group_lines("pipe", stream=True, exclude_modules='"vae"'),
                "# The pipeline casts its VAE in each call, and a stream would put back what it was.",
                *_group_lines("pipe.vae", stream=False),
            )
        return Script(imports=("torch",), lines=lines, places_weights=True)


def _group_lines(path: str, *, stream: bool, **more: str) -> tuple[str, ...]:
    enable = written_call(
        f"{path}.enable_group_offload",
        'torch.device("cuda")',
        'torch.device("cpu")',
        offload_type='"leaf_level"',
        use_stream=literal(stream),
        **more,
    )
    return tuple(enable.splitlines())


_GROUP = (
    "# vivace exchanges layers by itself, copies nothing back, and draws the same picture:",
    "# vivace.load(model, recipe).",
)

_KEPT = ("# diffusers keeps nothing on the GPU meanwhile; vivace was told to, which copies less.",)

_MODEL = (
    "# diffusers copies each part back to the host's memory after its work. vivace draws the same",
    "# picture without that: vivace.load(model, recipe).",
    "pipe.enable_model_cpu_offload()",
)


def _parts(pipe: Any) -> dict[str, Any]:
    found = {component: component_of(pipe, component) for component in COMPONENTS}
    return {component: module for component, module in found.items() if module is not None}


def _enable(pipe: Any, technique: Offload, device: Any) -> Visits | None:
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    visits = None
    locks = device.type == "cuda"
    if technique.mode == "model":
        visits = Visits(pipe, device, locks=locks)
    elif technique.mode == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    else:
        visits = LayerVisits(pipe, device, locks=locks, ahead=technique.stream, keep=technique.keep * GB)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return visits


def _is_offloaded(module: Any) -> bool:
    from diffusers.hooks.group_offloading import _is_group_offload_enabled

    return hasattr(module, "_hf_hook") or bool(_is_group_offload_enabled(module))


def _bytes(module: Any, device: str | None = None) -> int:
    """Bytes of a module's parameters, on one kind of device only if given."""
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in module.parameters()
        if device is None or parameter.device.type == device
    )


# Without data (see `Target.has_data`) nothing can be moved. Away, a tensor is one number of the host's memory that
# claims the whole shape; back, it is a tensor without data again, for whoever counts what the device would hold.


def _pretend(pipe: Any, parts: dict[str, Any], mode: str, keep: float) -> None:
    """Let modules come and go as the real thing would, attached by accelerate's own hooks."""
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Visit(ModelHook):  # type: ignore[misc]
        """Comes when its module is called; goes after it, or, if it stays, when the next part of the pipeline comes."""

        def __init__(self, shelf: _Shelf, before: Visit | None, stays: bool) -> None:
            self.execution_device = "meta"  # where pipelines then make their tensors
            self.shelf = shelf
            self.before = before
            self.stays = stays

        def pre_forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
            if self.before is not None:
                self.before.shelf.put_away()
            self.shelf.bring_back()
            return args, kwargs

        def post_forward(self, module: Any, output: Any) -> Any:
            if not self.stays:
                self.shelf.put_away()
            return output

    order = pipe.model_cpu_offload_seq.split("->")
    named = {"denoiser": "unet" if getattr(pipe, "unet", None) is not None else "transformer"}
    before: Visit | None = None
    made: dict[int, tuple[Any, Any]] = {}
    for part in sorted(parts, key=lambda component: order.index(named.get(component, component))):
        module = parts[part]
        if mode == "model" or (mode == "group" and comes_whole(module)):
            before = Visit(_Shelf(list(module.modules()), made), before, stays=True)
            add_hook_to_module(module, before)
            continue
        kept_units = kept(module, keep) if part == "denoiser" else []
        chosen = {id(layer) for layer, _ in kept_units}
        for layer, below in units(module):
            if layer is not module and id(layer) not in chosen:
                shelf = _Shelf(list(layer.modules()) if below else [layer], made)
                add_hook_to_module(layer, Visit(shelf, None, stays=False))
        add_hook_to_module(module, Visit(_Shelf([module], made), None, stays=False))
        if kept_units:
            inside = [one for layer, below in kept_units for one in (layer.modules() if below else [layer])]
            before = Visit(_Shelf([one for one in inside if one is not module], made), before, stays=True)
            add_hook_to_module(module, before, append=True)


class _Shelf:
    """The tensors that some modules hold themselves; they start away.

    Args:
        made: by the identity of a tensor, the tensor and what has taken its place. What other shelves hold as well goes
            on being shared, until one of them comes.
    """

    def __init__(self, modules: list[Any], made: dict[int, tuple[Any, Any]]) -> None:
        self._places = [
            (held, name)
            for module in modules
            for held in (module._parameters, module._buffers)
            for name, tensor in held.items()
            if tensor is not None
        ]
        self._strides = {place: held[name].stride() for place, (held, name) in enumerate(self._places)}
        self._is_away = False
        self.put_away(made)

    def put_away(self, made: dict[int, tuple[Any, Any]] | None = None) -> None:
        if not self._is_away:
            self._exchange(
                lambda tensor, strides: tensor.new_empty(1, device="cpu").expand(tensor.shape), made
            )
        self._is_away = True

    def bring_back(self) -> None:
        if self._is_away:
            self._exchange(
                lambda tensor, strides: (
                    tensor.new_empty_strided(tensor.shape, strides, device="meta")
                    if strides
                    else tensor.new_empty(tensor.shape, device="meta")
                )
            )
        self._is_away = False

    def _exchange(self, make: Any, made: dict[int, tuple[Any, Any]] | None = None) -> None:
        import torch

        made = {} if made is None else made  # what two modules share, they go on sharing
        for place, (held, name) in enumerate(self._places):
            old = held[name]
            if id(old) not in made:
                new = mapped(old, make, self._strides[place])
                if isinstance(old, torch.nn.Parameter):
                    new = torch.nn.Parameter(new, requires_grad=False)
                made[id(old)] = old, new
            held[name] = made[id(old)][1]
