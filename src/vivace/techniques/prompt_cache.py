"""Prompts that were encoded before are not encoded again; the text encoders may leave the GPU meanwhile.

Why: the negative prompt is nearly always the same, and so is the prompt when seeds or settings are tried. A hit costs a
    copy of the embeddings. FLUX's T5 alone is 9.5 GB in bf16: with `free_encoders` it is in the host's memory
    whenever nothing new has to be encoded.
Costs: the embeddings that are kept (FLUX: 4 MB a prompt in bf16). With `free_encoders` a new prompt moves the encoders
    to the GPU and back again. The whole model has to fit once, since it is loaded first.
Needs: a pipeline with an `encode_prompt`. `free_encoders` needs a GPU: on a CPU there is nowhere to go.
Source: diffusers, "Reduce memory usage" (prompt embeddings computed ahead); seen in most serving systems.

A hit needs the same arguments of `encode_prompt` (prompts and negative prompts, pictures per prompt, guidance on or
off, sequence length, clip skip, LoRA scale, device) and the same encoders (dtype, adapters, added tokens); the weights
themselves are taken to be final. Embeddings that the caller brings pass through. A bench repeats its prompts on
purpose, so its timed calls hit, as calls with new prompts would not: the record counts both.
"""

from __future__ import annotations

import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, ClassVar

from vivace.contract import Component, Effect, Stage, Target, Technique, component_of, knob
from vivace.errors import NoEffect

_ENCODERS: tuple[Component, ...] = ("text_encoder", "text_encoder_2")
_MARK = "_vivace_prompt_cache"


class PromptCache(Technique):
    name: ClassVar[str] = "prompt_cache"
    summary: ClassVar[str] = "prompts that were encoded before are not encoded again"
    stage: ClassVar[Stage] = Stage.SCHEDULE
    owns: ClassVar[str] = "text encoding"
    same_picture: ClassVar[bool] = True

    keep: int = knob(
        32, ge=1, le=4096, tune=[32], about="calls whose embeddings are kept, the latest used ones"
    )
    free_encoders: bool = knob(
        False,
        tune=[False, True],
        about="text encoders wait in the host's memory while nothing new is encoded",
    )

    def unsupported(self, target: Target) -> str | None:
        if self.free_encoders and not target.machine.is_cuda:
            return "on a CPU the text encoders are in the host's memory already; leave free_encoders out"
        if target.pipe is None:
            return None
        name = type(target.pipe).__name__
        if not hasattr(target.pipe, "encode_prompt"):
            return f"{name} has no encode_prompt whose results could be kept"
        if self.free_encoders and not _encoders(target.pipe):
            return f"this {name} has no text encoders that could be freed"
        return None

    def apply(self, target: Target) -> Effect:
        pipe = target.pipe
        encode = pipe.encode_prompt
        if hasattr(encode, _MARK):
            raise NoEffect("the pipeline keeps its prompts already", already_so=True)
        cache = _Cache(encode, functools.partial(_state, pipe), self.keep)
        shelf = _Shelf(_encoders(pipe), target.model.has_weights) if self.free_encoders else None

        @functools.wraps(encode)
        def encode_once(*args: Any, **kwargs: Any) -> Any:
            try:
                return cache(*args, **kwargs)
            finally:
                if shelf is not None:
                    shelf.put_away()

        setattr(encode_once, _MARK, True)
        encode_once.moves_encoders = self.free_encoders  # type: ignore[attr-defined]  # for whoever would move them
        pipe.encode_prompt = encode_once

        def evidence() -> dict[str, int | float | str]:
            found: dict[str, int | float | str] = {
                "prompt_cache_hits": cache.hits,
                "prompt_cache_misses": cache.misses,
                "prompt_cache_passed_through": cache.passed_through,
            }
            return found | ({} if shelf is None else {"text_encoders_freed": shelf.num_put_away})

        def refuted(_: dict[str, Any]) -> str | None:
            if shelf is not None and cache.misses and not shelf.num_put_away:
                return "the text encoders were not freed: something else moves them already"
            if cache.passed_through and not cache.hits:
                return "the calls brought their own embeddings, so there was nothing to keep"
            if cache.misses > 1 and not cache.hits:
                return f"none of {cache.misses} calls repeated a prompt"
            return None

        changed: dict[str, int | float | str] = {"kept_prompts": self.keep}
        if shelf is not None:
            changed["freed_text_encoders"] = len(_encoders(pipe))
        return Effect(changed=changed, evidence=evidence, refuted=refuted)


class _Cache:
    """`encode` with its latest results kept; each caller gets copies, so that nobody can change what is kept.

    Args:
        encode: the pipeline's own encode_prompt.
        state: what its result depends on besides its arguments.
        keep: how many results.
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
            asked = self._asked(args, kwargs)
        except (
            TypeError
        ):  # an argument that is no text and no number: embeddings, or what the pipeline will refuse
            self.passed_through += 1
            return self._encode(*args, **kwargs)
        key = asked, self._state()
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

    def _asked(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Hashable:
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return _frozen(bound.arguments)


def _frozen(value: Any) -> Hashable:
    """A hashable stand-in that is equal only for equal values of equal type.

    Raises:
        TypeError: for anything but texts, numbers, devices, dtypes, and lists and dicts of them.
    """
    import torch

    if value is None or isinstance(value, str | bool | int | float | torch.device | torch.dtype):
        return type(value).__name__, str(value) if isinstance(value, torch.device) else value
    if isinstance(value, list | tuple):
        return type(value).__name__, tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return "dict", tuple((key, _frozen(item)) for key, item in value.items())
    raise TypeError(f"{type(value).__name__} cannot be a key")


def _state(pipe: Any) -> Hashable:
    """What decides about embeddings besides the arguments of the call."""
    encoders = tuple(
        (id(encoder), encoder.dtype, encoder.training, tuple(getattr(encoder, "peft_config", ())))
        for encoder in _encoders(pipe)
    )
    tokenizers = [getattr(pipe, name, None) for name in ("tokenizer", "tokenizer_2")]
    return encoders, tuple(len(words) if words is not None else 0 for words in tokenizers)


def _encoders(pipe: Any) -> list[Any]:
    return [encoder for name in _ENCODERS if (encoder := component_of(pipe, name)) is not None]


def _copied(result: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, torch.clone, result)


class _Shelf:
    """Text encoders that are moved to the host's memory, and come back by themselves when they are called.

    Without data (see `Target.has_data`) what they held is given up instead.
    """

    def __init__(self, encoders: list[Any], has_data: bool) -> None:
        self.num_put_away = 0
        self._encoders = encoders
        self._has_data = has_data
        self._homes: dict[int, Any] = {}
        for encoder in encoders:
            encoder.register_forward_pre_hook(self._bring_back, with_kwargs=True)

    def put_away(self) -> None:
        for encoder in self._encoders:
            if id(encoder) in self._homes or _is_managed(encoder):
                continue
            self._homes[id(encoder)] = encoder.device
            self.num_put_away += 1
            if self._has_data:
                _move(encoder, "cpu")
            else:
                _empty(encoder)

    def _bring_back(self, encoder: Any, args: Any, kwargs: Any) -> Any:
        home = self._homes.pop(id(encoder), None)
        if home is None:
            return None
        _move(encoder, home)
        # SDXL and FLUX put the words where they find the encoder, which was the host's memory.
        return _on(home, (args, kwargs))


def _on(device: Any, tensors: Any) -> Any:
    import torch
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), tensors)


def _move(module: Any, device: Any) -> None:
    import torch

    torch.nn.Module.to(module, device)


def _empty(module: Any) -> None:
    """Give up a module's tensors; dtype and device can still be asked for."""
    import torch

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                part._parameters[name] = torch.nn.Parameter(nothing, requires_grad=False)


def _is_managed(module: Any) -> bool:
    """Whether hooks of accelerate or diffusers move this module between devices."""
    from diffusers.hooks.group_offloading import _is_group_offload_enabled

    return hasattr(module, "_hf_hook") or bool(_is_group_offload_enabled(module))
