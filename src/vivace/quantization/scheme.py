"""What a scheme is: which layers it takes, and how it changes one. One entry a scheme, in its library's table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from vivace.contract import Machine


@dataclass(frozen=True)
class Settings:
    """The knobs that schemes look at, and where the layers are. `has_data` as in `Target`.

    scale: of the layer's inputs, for a scheme that `is_calibrated`; None without data.
    """

    machine: Machine
    has_data: bool = True
    granularity: Literal["row", "tensor"] = "row"
    convolutions: bool = False
    double_quantization: bool = True
    scale: Any = None


def nothing(settings: Settings) -> None:
    return None


def anything(layer: Any, name: str, settings: Settings) -> None:
    return None


@dataclass(frozen=True)
class Scheme:
    """One way of storing the weights of a layer in fewer bits.

    package: what is imported, and what is said when it is missing (`pip install ...`).
    weights: how they are stored: bits and scales (of a scheme that `has_tensor_scales`, those are the settings').
    products: what is multiplied.
    change: gets a Linear, or a Conv2d where `takes_convolutions`, and returns what takes its place: the layer
        itself with another weight, or another layer.
    keeps: why a layer is left alone, or None. Asked before anything is changed.
    lacks: why this machine or installation cannot, in words, or None.
    has_tensor_scales: knows granularity=tensor.
    has_single_scales: knows double_quantization=False.
    keeps_dtype: cannot be cast to another precision afterwards, as pipelines do with a VAE in fp16.
    hides_dtype: its weights say the dtype of the stored bytes; layers whose model asks them for it are left alone.
    is_calibrated: the scale of a layer's inputs is chosen before, by looking at what is drawn.
    """

    package: tuple[str, str]
    weights: str
    products: str
    change: Callable[[Any, Settings], Any]
    keeps: Callable[[Any, str, Settings], str | None] = anything
    lacks: Callable[[Settings], str | None] = nothing
    takes_convolutions: bool = False
    has_tensor_scales: bool = False
    has_single_scales: bool = False
    keeps_dtype: bool = False
    hides_dtype: bool = False
    is_calibrated: bool = False
