"""What fused components make of a call: hooks that cast what it gives them, since they compute in bf16, and refusals of
what they do not compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.errors import Unsupported
from vivace.machinery.compilation.captured import num_writes

_MOST_TENSORS = 2
"""Tensors whose values are remembered: guidance may take two calls."""


class TensorValueCache:
    """What is read from the device once for a tensor, not in each step, unless it is written to; not for copies."""

    def __init__(self, read: Callable[..., Any]) -> None:
        self._read = read
        self._seen: list[tuple[Any, int | None, Any]] = []

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_seen": []}

    def __call__(self, tensor: Any, *more: Any) -> Any:
        version = num_writes(tensor)
        for seen, number, known in self._seen:
            if seen is tensor and number == version:
                return known
        new = self._read(tensor, *more)
        self._seen = [*self._seen[1 - _MOST_TENSORS :], (tensor, version, new)]
        return new


def cast(value: Any) -> Any:
    import torch

    if isinstance(value, (list, tuple)):
        return type(value)(cast(item) for item in value)
    return value.bfloat16() if torch.is_tensor(value) and value.is_floating_point() else value


def cast_all(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(cast(value) for value in args)


def cast_all_named(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return cast_all(None, args), {name: cast(value) for name, value in kwargs.items()}


def cast_last(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (*args[:-1], args[-1].bfloat16())


def cast_inputs(cast_one: Callable[..., Any], *layers: Any) -> None:
    """Cast what layers get, if there are such, in any dtype; also where a step cache calls diffusers' forward."""
    for layer in layers:
        if layer is not None:
            layer.register_forward_pre_hook(cast_one)


def cast_output(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
    """Cast a transformer's output to the latents' dtype, in which its small layers or a step cache may not compute."""
    latents = args[0] if args else next(kwargs[name] for name in ("hidden_states", "x") if name in kwargs)
    dtype = (latents[0] if isinstance(latents, list) else latents).dtype

    def in_dtype(sample: Any) -> Any:
        return [each.to(dtype) for each in sample] if isinstance(sample, list) else sample.to(dtype)

    if isinstance(output, tuple):
        return (in_dtype(output[0]), *output[1:])
    output.sample = in_dtype(output.sample)
    return output


class SampleCasts:
    """Casts a UNet's inputs to bf16, and its output back to the dtype of the latents."""

    _KEPT = (1, "timestep", "added_cond_kwargs")
    """Times and sizes, whose integers bf16 cannot represent."""

    def before(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        self._dtype = (args[0] if args else kwargs["sample"]).dtype
        positional = [value if index in self._KEPT else cast(value) for index, value in enumerate(args)]
        named = {name: value if name in self._KEPT else cast(value) for name, value in kwargs.items()}
        return tuple(positional), named

    def after(self, _: Any, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0].to(self._dtype), *output[1:])
        output.sample = output.sample.to(self._dtype)
        return output


def refuse_controlnet(*samples: Any) -> None:
    """Raise Unsupported for what a ControlNet adds to blocks."""
    if any(each is not None for each in samples):
        raise Unsupported(
            "fused: the fused blocks take no ControlNet; leave fused out, or call without control images"
        )


def refuse_extras(attention_kwargs: dict[str, Any] | None) -> None:
    extras = [name for name, value in (attention_kwargs or {}).items() if (name, value) != ("scale", 1.0)]
    if extras:
        raise Unsupported(
            f"fused: the fused blocks take no attention_kwargs ({', '.join(extras)}); leave fused out, or call "
            "without adapters"
        )
