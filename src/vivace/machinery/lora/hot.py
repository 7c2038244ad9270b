"""LoRAs beside layers, exchanged in place: y = W x + B A x, in whatever form W is stored.

A layer gets two matrices as buffers, A (rank, ...) and B (out, rank), and a class that adds B A x to its output. B
includes the scale and alpha / rank, multiplied in fp32 and rounded once, so that a call does nothing more for them. The
ranks are those announced, and rows beyond a LoRA's own are zero. An exchange copies into these buffers: compiled code
has no other shapes to compile for, and CUDA graphs read the same addresses. Several LoRAs share a layer's two matrices,
each in separate rows, so that two of rank 8 cost what one of rank 16 does.

Source: Hu et al., LoRA, arXiv 2106.09685.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vivace.errors import Unsupported, UsageError
from vivace.machinery.lora.changes import LoraLayers, Matrices
from vivace.machinery.lora.layer_names import named_layers, owners_of
from vivace.machinery.lora.lora_files import digest, locate_lora, short_name
from vivace.machinery.lora.read_lora import LoraFile, check_size, read_lora
from vivace.machinery.technique import Component, component_of

if TYPE_CHECKING:
    import torch

_LORAS, _FOLLOWERS = "_vivace_hot_loras", "_vivace_followers_of_loras"
_KEPT_BYTES = 500_000_000
_NUM_NAMED = 3
_ALIGNMENT = 16  # elements


DOWN, UP = "vivace_lora_down", "vivace_lora_up"


class PackedLayers:
    """The two matrices of each layer of a file, copied for `device`: for a GPU they lie in page-locked memory, if the
    host grants it."""

    def __init__(self, layers: Mapping[str, Matrices], device: torch.device) -> None:
        self.rank = max((layer.rank for layer in layers.values()), default=0)
        sizes: dict[Any, int] = {}
        starts: dict[str, tuple[int, int]] = {}
        for name, layer in layers.items():
            places = []
            for tensor in (layer.down, layer.up):
                places.append(sizes.get(tensor.dtype, 0))
                sizes[tensor.dtype] = places[-1] - (-tensor.numel() // _ALIGNMENT) * _ALIGNMENT
            starts[name] = (places[0], places[1])
        self._flat = {dtype: _host_memory(size, dtype, device) for dtype, size in sizes.items()}
        self._starts = starts
        self._layers = {
            name: self._placed(name, layer, self._flat, copies=True) for name, layer in layers.items()
        }

    @property
    def names(self) -> list[str]:
        return list(self._layers)

    @property
    def num_bytes(self) -> int:
        return sum(flat.nbytes for flat in self._flat.values())

    def on(self, device: torch.device, *, needs_values: bool = True) -> Mapping[str, Matrices]:
        """Return the matrices by name on a device, views of one copy; none without `needs_values`."""
        if not needs_values:
            return {}
        if device.type in ("cpu", "meta"):
            return self._layers
        flat = {dtype: values.to(device, non_blocking=True) for dtype, values in self._flat.items()}
        return {name: self._placed(name, layer, flat) for name, layer in self._layers.items()}

    def _placed(
        self, name: str, layer: Matrices, flat: Mapping[Any, torch.Tensor], copies: bool = False
    ) -> Matrices:
        placed = []
        for start, tensor in zip(self._starts[name], (layer.down, layer.up), strict=True):
            placed.append(flat[tensor.dtype][start : start + tensor.numel()].view(tensor.shape))
            if copies:
                placed[-1].copy_(tensor)
        return replace(layer, down=placed[0], up=placed[1])


@dataclass(frozen=True)
class _Parsed:
    layers: PackedLayers
    notes: tuple[str, ...]
    num_bytes: int


@dataclass
class HotLora:
    """A LoRA beside a denoiser's layers, with its rows: their first in each layer, and the largest rank that they take.

    Up to `keep_bytes` of loaded files are kept in host memory, so that an exchange back reads nothing.
    """

    pipe: Any
    path: str
    sha256: str
    scale: float
    max_rank: int
    layers: PackedLayers
    components: tuple[Component, ...]
    notes: tuple[str, ...] = ()
    rows: dict[str, int] = field(default_factory=dict)
    num_exchanges: int = 0
    num_rescalings: int = 0
    keep_bytes: int = _KEPT_BYTES
    _kept: OrderedDict[str, _Parsed] = field(default_factory=OrderedDict)
    _places: dict[str, Any] = field(default_factory=dict)
    _owners: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        return short_name(self.path)

    @property
    def rank(self) -> int:
        return self.layers.rank

    def load(self, path: str, scale: float) -> None:
        """Load another file into the rows of this one; after an error (UnusableModel, Unsupported) nothing has
        changed."""
        sha256, parsed = self._parsed(path)
        layers = parsed.layers
        foreign = [name for name in layers.names if name not in self.rows]
        if foreign:
            more = f" and {len(foreign) - _NUM_NAMED} more" if len(foreign) > _NUM_NAMED else ""
            raise Unsupported(
                f"{path} targets {len(foreign)} layers without a LoRA slot "
                f"({', '.join(foreign[:_NUM_NAMED])}{more}); reserve them at load: lora(PATH, hot=True, layers=all)"
            )
        self._check_rank(path, layers)
        self.path, self.sha256, self.scale, self.layers = path, sha256, scale, layers
        self.notes = parsed.notes
        self.num_exchanges += 1
        self.write()

    def _parsed(self, path: str) -> tuple[str, _Parsed]:
        file = locate_lora(path)
        check_size(self.pipe, file, path)
        sha256 = digest(file)
        parsed = self._kept.pop(sha256, None)
        if parsed is None:
            read = read_lora(self.pipe, file, path)
            layers = denoiser_layers(self.pipe, path, read, self.components)
            parsed = _Parsed(PackedLayers(layers, self._device), read.notes, file.stat().st_size)
        self._keep(sha256, parsed)
        return sha256, parsed

    def _keep(self, sha256: str, parsed: _Parsed) -> None:
        self._kept[sha256] = parsed
        while sum(each.num_bytes for each in self._kept.values()) > self.keep_bytes:
            self._kept.popitem(last=False)

    @property
    def _device(self) -> Any:
        down, _ = buffers(next(iter(self._places.values())))
        return down.device

    def rescale(self, scale: float) -> None:
        largest = max(abs(scale), abs(self.scale))
        self.scale = scale
        self.num_rescalings += 1
        self.write(largest)

    def write(self, rescaled_to: float | None = None) -> None:
        """Copy the matrices into their rows, in place. `rescaled_to`: if only the factor changed, the larger of
        both."""
        import torch

        if not self._places:
            denoiser = component_of(self.pipe, "denoiser")
            layers = named_layers(denoiser)
            self._places = {name: layers[name] for name in self.rows}
            self._owners = owners_of(denoiser, self._places.values())
        with torch.inference_mode(mode=False), torch.no_grad():
            self._write_rows(rescaled_to)
            for owner in self._owners:
                owner.write_loras(rescaled_to)
            if followers := getattr(self.pipe, _FOLLOWERS, ()):
                written = self._written()
                for follow in followers:
                    follow(written)

    def _write_rows(self, rescaled_to: float | None) -> None:
        import torch

        slots = {name for name, place in self._places.items() if hasattr(place, "reserve_rank")}
        if slots:  # each has a factor for every rank
            amounts = [
                self._places[name].amount[self.rows[name] : self.rows[name] + self.max_rank] for name in slots
            ]
            torch._foreach_zero_(amounts)
            torch._foreach_add_(amounts, self.scale)
        changed = [name for name in self.rows if rescaled_to is None or name not in slots]
        layers = self.layers.on(self._device, needs_values=bool(changed))
        for name in changed:
            first = self.rows[name]
            place, own = self._places[name], slice(first, first + self.max_rank)
            matrices = layers.get(name)
            amount = 1.0 if name in slots else self.scale
            down, up = buffers(place)
            if rescaled_to is None:
                values = None if matrices is None else matrices.down.reshape(-1, *down.shape[1:])
                _fill(down[own], values)
            scaled = None if matrices is None else matrices.up.float() * (amount * matrices.scale)
            _fill(up[:, own].t(), None if scaled is None else scaled.t())

    def _written(self) -> list[torch.Tensor]:
        plain = [place for place in self._places.values() if not hasattr(place, "reserve_rank")]
        tensors = [tensor for place in plain for tensor in buffers(place)]
        return tensors + [tensor for owner in self._owners for tensor in owner.lora_tensors()]

    def _check_rank(self, path: str, layers: PackedLayers) -> None:
        rank = layers.rank
        if rank > self.max_rank:
            raise Unsupported(
                f"{path} has rank {rank}, and slots were reserved for rank {self.max_rank}; load with "
                f"lora(PATH, hot=True, max_rank={rank})"
            )

    def facts(self) -> dict[str, int | float | str]:
        now: dict[str, int | float | str] = {
            f"lora.{self.name}": f"{self.sha256}, rank {self.rank} of {self.max_rank}, scale {self.scale:g}",
            f"lora.{self.name}.exchanges": self.num_exchanges,
        }
        return now | ({f"lora.{self.name}.notes": "; ".join(self.notes)} if self.notes else {})


def hot_loras(pipe: Any) -> tuple[HotLora, ...]:
    return tuple(getattr(pipe, _LORAS, ()))


def follow_writes(pipe: Any, follow: Callable[[Sequence[torch.Tensor]], Any]) -> None:
    """Pass the tensors that exchanges write (of the denoiser, or views) to `follow`."""
    setattr(pipe, _FOLLOWERS, [*getattr(pipe, _FOLLOWERS, ()), follow])


def exchange(pipe: Any, path: str | None, scale: float | None, instead_of: str | None) -> tuple[str, ...]:
    """Replace the file or scale of a hot LoRA, see `Session.set_lora`; return notes for the user."""
    loras = hot_loras(pipe)
    if not loras:
        raise UsageError("there is no LoRA to exchange; load one by lora(PATH, hot=True) in the recipe")
    named = [lora for lora in loras if instead_of in (None, lora.path, lora.name)]
    loaded = ", ".join(lora.path for lora in loras)
    if len(named) != 1:
        problem = "there are several LoRAs" if instead_of is None else f"no single LoRA is '{instead_of}'"
        raise UsageError(f"{problem}; say which by instead_of= (loaded: {loaded})")
    if path is None and scale is None:
        raise UsageError("give another LoRA's path, a scale, or both")
    if scale is not None and not -100 <= scale <= 100:
        raise UsageError(f"scale {scale}: give a number from -100 to 100")
    lora = named[0]
    if path is not None:
        lora.load(path, lora.scale if scale is None else scale)
        return lora.notes
    if scale is not None:
        lora.rescale(scale)
    return ()


def attach(
    pipe: Any,
    path: str,
    sha256: str,
    read: LoraFile,
    scale: float,
    components: tuple[Component, ...],
    max_rank: int,
    *,
    everywhere: bool,
) -> HotLora:
    """Add a LoRA beside the denoiser's layers that it changes, or `everywhere`; `max_rank` 0: the file's own."""
    own = denoiser_layers(pipe, path, read, components)
    denoiser = component_of(pipe, "denoiser")
    packed = PackedLayers(own, denoiser.device)
    lora = HotLora(pipe, path, sha256, scale, max_rank or packed.rank, packed, components, read.notes)
    lora._check_rank(path, packed)
    lora._keep(sha256, _Parsed(packed, read.notes, packed.num_bytes))
    modules = named_layers(denoiser)
    names = list(own)
    if everywhere:
        names += [name for name, module in modules.items() if name not in own and can_have_one(module)]
    for name in names:
        lora.rows[name] = reserve(denoiser, modules[name], lora.max_rank)
    setattr(pipe, _LORAS, [*hot_loras(pipe), lora])
    lora.write()
    return lora


def chosen(layers: LoraLayers, components: tuple[Component, ...]) -> LoraLayers:
    return {component: part for component, part in layers.items() if component in components}


def denoiser_layers(
    pipe: Any, path: str, read: LoraFile, components: tuple[Component, ...]
) -> Mapping[str, Matrices]:
    """Return a hot LoRA's layers; Unsupported where it is not for this pipeline, or not for the denoiser alone."""
    layers = chosen(read.layers, components)
    if (reason := read.problem(components) or why_not_hot(pipe, path, layers)) is not None:
        raise Unsupported(f"lora: {reason}")
    return {name: layer.matrices for name, layer in layers["denoiser"].items() if layer.matrices is not None}


def why_not_hot(pipe: Any, path: str, layers: LoraLayers) -> str | None:
    """Return why a LoRA that fits the pipeline cannot be beside its layers; None if it can."""
    others: list[Component] = [component for component in layers if component != "denoiser"]
    if "denoiser" not in layers:
        return f"{path} changes nothing of the denoiser, and only its layers can have a LoRA beside them"
    if others:
        return (
            f"{path} also changes the {' and the '.join(others)}, and prompts are encoded before a LoRA is exchanged; "
            "merge it (without hot), or leave those parts out with @denoiser"
        )
    wholes = [name for name, layer in layers["denoiser"].items() if layer.matrices is None]
    if wholes:
        return (
            f"{path} changes {len(wholes)} of {len(layers['denoiser'])} layers by more or other than two matrices "
            f"({', '.join(wholes[:_NUM_NAMED])}), and only two can be beside a layer; merge it (without hot)"
        )
    modules = named_layers(component_of(pipe, "denoiser"))
    unable = [name for name in layers["denoiser"] if not can_have_one(modules[name])]
    if unable:
        kind = type(modules[unable[0]]).__name__
        return (
            f"{path} changes {unable[0]}, a {kind}, which can have no LoRA beside it; merge it (without hot)"
        )
    return None


def _fill(rows: torch.Tensor, values: torch.Tensor | None) -> None:
    used = 0 if values is None else len(values)
    if values is not None:
        rows[:used].copy_(values)
    if used < len(rows):
        rows[used:].zero_()


def _host_memory(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    import torch

    if device.type == "cuda":
        try:
            return torch.empty(size, dtype=dtype, pin_memory=True)
        except RuntimeError:  # the host grants no more: copies are slower
            pass
    return torch.empty(size, dtype=dtype)


def can_have_one(module: torch.nn.Module) -> bool:
    import torch

    if hasattr(module, "reserve_rank"):
        return True
    if "forward" in vars(module):  # replaced on the instance, which then never calls its class's
        return False
    if isinstance(module, torch.nn.Conv2d):
        return bool(module.groups == 1 and module.padding_mode == "zeros")
    return hasattr(module, "in_features") and hasattr(module, "out_features") and hasattr(module, "weight")


def reserve(denoiser: torch.nn.Module, layer: torch.nn.Module, rank: int) -> int:
    """Give a layer more rows; return the first of them."""
    import torch

    if hasattr(layer, "reserve_rank"):
        first_row: int = layer.reserve_rank(rank, denoiser.device)
        return first_row
    present = hasattr(layer, DOWN)
    is_convolution = isinstance(layer, torch.nn.Conv2d)
    inner = (layer.in_channels, *layer.kernel_size) if is_convolution else (layer.in_features,)
    outer = layer.out_channels if is_convolution else layer.out_features
    like = {"device": layer.weight.device, "dtype": _compute_dtype(layer, denoiser)}
    down, up = torch.zeros(rank, *inner, **like), torch.zeros(outer, rank, **like)
    first = 0
    if present:
        before = buffers(layer)
        first = len(before[0])
        down, up = torch.cat([before[0], down]), torch.cat([before[1], up], dim=1)
    else:
        kind: Any = type(layer)
        layer.__class__ = _with_lora(kind)
    layer.register_buffer(DOWN, down, persistent=False)
    layer.register_buffer(UP, up.contiguous(), persistent=False)
    return first


def _compute_dtype(layer: torch.nn.Module, denoiser: torch.nn.Module) -> torch.dtype:
    """Return the dtype that the layer computes in. A quantised weight may report that of its bytes."""

    def is_wide(dtype: Any) -> bool:
        return dtype is not None and dtype.is_floating_point and dtype.itemsize >= 2

    bias = getattr(layer, "bias", None)
    dtypes = (layer.weight.dtype, getattr(layer, "compute_dtype", None), getattr(bias, "dtype", None))
    for dtype in dtypes:
        if is_wide(dtype):
            return dtype
    kinds = Counter(p.dtype for p in denoiser.parameters() if is_wide(p.dtype))
    import torch

    return kinds.most_common(1)[0][0] if kinds else torch.float32


def buffers(layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    if hasattr(layer, "reserve_rank"):
        return layer.down, layer.up
    return getattr(layer, DOWN), getattr(layer, UP)


@functools.cache
def _with_lora(kind: Any) -> Any:
    """Return a class of layers like `kind` that add B A x to their output.

    A separate class, and no hook: torch.compile checks the classes of modules before it uses compiled code again, but
    not their hooks, and would run code of the same model without a LoRA.
    """
    import torch

    add = _convolution if issubclass(kind, torch.nn.Conv2d) else _linear

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = kind.forward(self, *args, **kwargs)
        return output + add(self, *args, **kwargs).to(output.dtype)

    def reduced(self: Any, _: Any) -> Any:
        return _without_init, (kind,), self.__dict__

    namespace = {"forward": forward, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), namespace)


def _without_init(kind: Any) -> Any:
    made = _with_lora(kind)
    return made.__new__(made)


def _linear(layer: Any, input: torch.Tensor) -> torch.Tensor:
    import torch

    down, up = buffers(layer)
    return torch.nn.functional.linear(torch.nn.functional.linear(input.to(down.dtype), down), up)


def _convolution(layer: Any, input: torch.Tensor) -> torch.Tensor:
    import torch

    down, up = buffers(layer)
    conv2d = torch.nn.functional.conv2d
    inner = conv2d(input.to(down.dtype), down, None, layer.stride, layer.padding, layer.dilation)
    return conv2d(inner, up[:, :, None, None])
