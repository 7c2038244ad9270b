"""Faults as servers and caches have them, planted in images of `drawn_shapes`. Some come at every few images alone."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image, ImageFilter

from tests.drawn_shapes import draw, tinted

OFTEN = 4
"""What comes at times comes at every fourth image."""
_state: dict[str, Any] = {"count": 0, "before": None}


def forget() -> None:
    """Begin to count anew."""
    _state.update(count=0, before=None)


def _comes() -> bool:
    _state["count"] += 1
    return bool(_state["count"] % OFTEN == 0)


def _altered(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def altered(prompt: str, seed: int, **settings: Any) -> Any:
        return change(draw(prompt, seed, **settings))

    return altered


def _levels(change: Callable[[Any], Any]) -> Callable[..., Any]:
    def of_levels(picture: Any) -> Any:
        values = change(np.asarray(picture).astype(float))
        return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))

    return _altered(of_levels)


def _encoded(kind: str, quality: int) -> Callable[..., Any]:
    def encoded(picture: Any) -> Any:
        file = io.BytesIO()
        picture.save(file, kind, quality=quality)
        return Image.open(file).convert("RGB")

    return _altered(encoded)


def fewer_steps(prompt: str, seed: int, num_inference_steps: int, **settings: Any) -> Any:
    return draw(prompt, seed, num_inference_steps=num_inference_steps * 2 // 3, **settings)


def half_the_steps(prompt: str, seed: int, num_inference_steps: int, **settings: Any) -> Any:
    return draw(prompt, seed, num_inference_steps=num_inference_steps // 2, **settings)


def other_guidance(prompt: str, seed: int, guidance_scale: float, **settings: Any) -> Any:
    return draw(prompt, seed, guidance_scale=1.3 * guidance_scale, **settings)


def _half_moved(values: Any) -> Any:
    values[:, 48:] += 12
    return values


lora_ignored = _levels(lambda values: np.asarray(tinted(Image.fromarray(values.astype(np.uint8)), -0.5)))
strong_latents = _levels(lambda values: 128 + 1.15 * (values - 128))
smaller = _altered(
    lambda p: p.resize((72, 72), Image.Resampling.BICUBIC).resize(p.size, Image.Resampling.BICUBIC)
)
webp = _encoded("WEBP", 60)
jpeg = _encoded("JPEG", 60)
seams = _levels(_half_moved)
colours_moved = _levels(lambda values: values + np.array((8, 0, -8)))
swapped_colours = _altered(lambda p: Image.merge("RGB", p.split()[::-1]))
softened = _altered(lambda p: p.filter(ImageFilter.GaussianBlur(1.2)))
other_vae = _levels(lambda values: values + np.random.default_rng(1).normal(0, 1.5, values.shape))


def wrong_seeds(prompt: str, seed: int, **settings: Any) -> Any:
    return draw(prompt, seed + 1000 * _comes(), **settings)


def neighbours_seed(prompt: str, seed: int, **settings: Any) -> Any:
    return draw(prompt, (seed + _comes()) % 2, **settings)


def old_buffer(prompt: str, seed: int, **settings: Any) -> Any:
    picture = draw(prompt, seed, **settings)
    given = _state["before"] if _comes() else picture
    _state["before"] = picture
    return given


def mixed_batch(prompt: str, seed: int, **settings: Any) -> Any:
    given = draw(_state["before"] if _comes() else prompt, seed, **settings)
    _state["before"] = prompt
    return given


def black_squares(prompt: str, seed: int, **settings: Any) -> Any:
    picture = draw(prompt, seed, **settings)
    if _comes():
        picture.paste((0, 0, 0), (30, 40, 54, 64))
    return picture
