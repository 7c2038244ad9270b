"""Cache prompt embeddings, so that a repeated prompt is not encoded again; optionally offload the text encoders.

Why: the negative prompt is nearly always the same, and so is the prompt when seeds or settings are varied. A cache hit
    costs a copy of the embeddings. FLUX's T5 alone is 9.5 GB in bf16: with `free_encoders` it is offloaded to host
    memory whenever no new prompt is encoded.
Costs: memory for the embeddings (FLUX: 4 MB per prompt in bf16). With `free_encoders` each new prompt onloads the
    encoders to the GPU and offloads them again. The whole model must fit once, since it is loaded first.
Needs: a pipeline with an `encode_prompt`. `free_encoders` needs a GPU.
Source: diffusers, "Reduce memory usage" (prompt embeddings computed ahead); common in serving systems.

A hit needs the same arguments of `encode_prompt` (prompts and negative prompts, pixels of images that the encoder
sees, images per prompt, guidance on or off, sequence length, clip skip, LoRA scale, device) and the same encoders: each
weight's identity, version and a few of its values, adapters with their scales, added tokens. A write through `.data`
that changes few values may not be seen; `session.forget_prompts()` after it. Embeddings given by the caller pass
through. In a benchmark the prompts of every call count as new, so it is `no_effect` there, and `free_encoders` moves
the encoders in every call; with `--text repeated` all timed calls have one prompt. The record counts hits and misses.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from vivace.errors import NoEffect
from vivace.machinery.offloading.offloaded_module import is_moved_by_hooks
from vivace.machinery.technique import (
    TEXT_ENCODERS,
    Effect,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    Trait,
    component_of,
    knob,
)
from vivace.models.sources import sha_of

if TYPE_CHECKING:
    import torch

_NUM_VALUES = 8
"""Of each weight, to see writes that do not raise its version."""
_OF_ADAPTERS = ("scaling", "active_adapters", "merged_adapters", "disable_adapters")


class PromptCache(Technique):
    name: ClassVar[str] = "prompt_cache"
    summary: ClassVar[str] = "a repeated prompt is not encoded again"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE,
        owns="text encoding",
        same_picture=True,
        needs_repeated_prompts=True,
        not_searched="it gains only where a prompt is drawn again; if yours are, --keep prompt_cache",
        belongs_to_pipeline=True,
    )

    keep: int = knob(
        32,
        ge=1,
        le=4096,
        tune=[32],
        about="number of calls whose embeddings are kept, the most recently used",
    )
    free_encoders: bool = knob(
        False,
        tune=[False, True],
        about="keep text encoders in host memory while no new prompt is encoded",
    )

    @property
    def facts(self) -> TechniqueFacts:
        return replace(
            self.declared,
            provides=frozenset({Trait.MOVED}) if self.free_encoders else frozenset(),
        )

    def unsupported(self, target: Target) -> str | None:
        if self.free_encoders and target.machine.backend in ("cpu", "mps"):
            where = "Apple's GPUs share host memory, so" if target.machine.is_gpu else "on a CPU"
            return f"{where} the text encoders are in host memory already; leave free_encoders out"
        if target.pipe is None:
            return None
        name = type(target.pipe).__name__
        if not hasattr(target.pipe, "encode_prompt"):
            return f"{name} has no encode_prompt, whose results could be cached"
        if self.free_encoders and not _encoders(target.pipe):
            return f"this {name} has no text encoders to offload; leave free_encoders out"
        return None

    def apply(self, target: Target) -> Effect:
        return self._caching(target.pipe, _move_to_host)

    def predict(self, target: Target) -> Effect:
        return self._caching(target.pipe, _empty)

    def _caching(self, pipe: Any, free: Callable[[torch.nn.Module], None]) -> Effect:
        """Cache prompts; `free` takes an encoder's weights from the device."""
        encode = pipe.encode_prompt
        if isinstance(encode, functools.partial) and encode.func is _encode_once:
            raise NoEffect("the pipeline already caches its prompts", already_so=True)
        cache = _Cache(encode, functools.partial(_state, pipe), self.keep)
        offload = _EncoderOffload(_encoders(pipe), free) if self.free_encoders else None

        pipe.encode_prompt = functools.update_wrapper(functools.partial(_encode_once, cache, offload), encode)

        def evidence() -> dict[str, int | float | str]:
            facts: dict[str, int | float | str] = {
                "prompt_cache_hits": cache.hits,
                "prompt_cache_misses": cache.misses,
                "prompt_cache_passed_through": cache.passed_through,
            }
            return facts | ({} if offload is None else {"text_encoders_freed": offload.num_offloaded})

        def refuted(_: dict[str, Any]) -> str | None:
            if offload is not None and cache.misses and not offload.num_offloaded:
                return "the text encoders were not offloaded: something else moves them already"
            if cache.passed_through and not cache.hits:
                return "the calls were given embeddings, so there was nothing to cache"
            if offload is None and cache.misses > 1 and not cache.hits:
                return f"none of {cache.misses} calls repeated a prompt; if yours do, benchmark with --text repeated"
            return None

        changed: dict[str, int | float | str] = {"kept_prompts": self.keep}
        if offload is not None:
            changed["freed_text_encoders"] = len(_encoders(pipe))
        return Effect(changed=changed, evidence=evidence, forget=cache.forget, refuted=refuted)


def _encode_once(cache: _Cache, offload: _EncoderOffload | None, /, *args: Any, **kwargs: Any) -> Any:
    try:
        return cache(*args, **kwargs)
    finally:
        if offload is not None:
            offload.offload()


class _Cache:
    """An LRU cache around `encode`. Callers get copies, so that they cannot change cached embeddings.

    Args:
        encode: the pipeline's encode_prompt.
        state: returns what its result depends on besides its arguments.
        keep: number of results to keep.
    """

    def __init__(self, encode: Callable[..., Any], state: Callable[[], Hashable], keep: int) -> None:
        self.hits = self.misses = self.passed_through = 0
        self._encode = encode
        self._signature = inspect.signature(encode)
        self._state = state
        self._keep = keep
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            arguments = self._bound(args, kwargs)
        except TypeError:  # embeddings, or an argument that the pipeline will refuse
            self.passed_through += 1
            return self._encode(*args, **kwargs)
        key = arguments, self._state()
        if key in self._kept:
            self.hits += 1
            self._kept.move_to_end(key)
            return _copied(self._kept[key])
        result = self._encode(*args, **kwargs)
        self.misses += 1
        self._kept[key] = _copied(result)
        if len(self._kept) > self._keep:
            self._kept.popitem(last=False)
        return result

    def forget(self) -> None:
        self._kept.clear()

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _frozen(bound.arguments)


def _frozen(value: Any) -> Hashable:
    """Return a hashable key that is equal only for equal values of equal type. An image's are its pixels.

    Raises:
        TypeError: for anything but texts, numbers, images, devices, dtypes, and lists and dicts of them.
    """
    import torch
    from PIL.Image import Image

    if value is None or isinstance(value, str | bool | int | float | torch.device | torch.dtype):
        return type(value).__name__, str(value) if isinstance(value, torch.device) else value
    if isinstance(value, Image):
        return "picture", sha_of(value)
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((key, _frozen(item)) for key, item in value.items())
    raise TypeError(f"{type(value).__name__} cannot be a key")


def _state(pipe: Any) -> Hashable:
    """Return the conditions of the embeddings besides the arguments of the call."""
    encoders = tuple((id(encoder), encoder.training, _weights(encoder)) for encoder in _encoders(pipe))
    tokenizers = [getattr(pipe, name, None) for name in ("tokenizer", "tokenizer_2", "tokenizer_3")]
    return encoders, tuple(len(words) if words is not None else 0 for words in tokenizers)


def _weights(encoder: torch.nn.Module) -> Hashable:
    """Return what differs after any change of a module's weights.

    PEFT, for one, merges adapters by `weight.data +=`, which raises no version. Weights that other libraries bring in
    for a moment have neither identity nor values here.
    """
    import torch

    facts: list[Hashable] = []
    values: dict[Hashable, list[torch.Tensor]] = {}
    for part in encoder.modules():
        if "base_layer" in part._modules:
            facts.append(str([getattr(part, name, None) for name in _OF_ADAPTERS]))
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is None:
                continue
            facts.append((tensor.dtype, tensor.shape))
            if tensor.is_meta:
                continue
            facts.append((id(tensor), 0 if tensor.is_inference() else tensor._version))
            if type(tensor) in (torch.Tensor, torch.nn.Parameter):
                flat = tensor.detach().flatten()
                values.setdefault((tensor.dtype, tensor.device), []).append(
                    flat[:: max(1, len(flat) // _NUM_VALUES)]
                )
    read = (torch.cat(several).cpu().view(torch.uint8).numpy().tobytes() for several in values.values())
    return tuple(facts), tuple(read)


def _encoders(pipe: Any) -> list[Any]:
    return [encoder for name in TEXT_ENCODERS if (encoder := component_of(pipe, name)) is not None]


def _copied(result: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.clone, result)


class _EncoderOffload:
    """Offloads text encoders, and onloads them when they are called.

    Args:
        free: takes an encoder's weights from the device.
    """

    def __init__(self, encoders: list[Any], free: Callable[[torch.nn.Module], None]) -> None:
        self.num_offloaded = 0
        self._encoders = encoders
        self._free = free
        self._devices: dict[int, Any] = {}
        for encoder in encoders:
            encoder.register_forward_pre_hook(self._onload, with_kwargs=True)

    def offload(self) -> None:
        for encoder in self._encoders:
            if id(encoder) in self._devices or is_moved_by_hooks(encoder):
                continue
            self._devices[id(encoder)] = encoder.device
            self.num_offloaded += 1
            self._free(encoder)

    def _onload(self, encoder: Any, args: Any, kwargs: Any) -> Any:
        device = self._devices.pop(id(encoder), None)
        if device is None:
            return None
        _move(encoder, device)
        # SDXL and FLUX put the token ids on the encoder's device, which was the CPU.
        return _to_device(device, (args, kwargs))


def _to_device(device: Any, tensors: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tensors)


def _move(module: Any, device: Any) -> None:
    import torch

    torch.nn.Module.to(module, device)


def _move_to_host(module: Any) -> None:
    _move(module, "cpu")


def _empty(module: Any) -> None:
    """Replace a module's parameters with empty ones of the same dtype and device."""
    import torch

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                empty = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                part._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)
