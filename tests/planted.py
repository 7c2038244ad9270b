"""Faults as servers and caches have them, planted in images of `drawn_shapes`. Some come at every few images alone."""

import io
from collections.abc import Callable
from typing import Any

from PIL import Image, ImageFilter

from tests.drawn_shapes import draw

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


def _compressed(picture: Any) -> Any:
    file = io.BytesIO()
    picture.save(file, "WEBP", quality=60)
    return Image.open(file).convert("RGB")


def fewer_steps(prompt: str, seed: int, num_inference_steps: int, **settings: Any) -> Any:
    return draw(prompt, seed, num_inference_steps=num_inference_steps * 2 // 3, **settings)


def half_the_steps(prompt: str, seed: int, num_inference_steps: int, **settings: Any) -> Any:
    return draw(prompt, seed, num_inference_steps=num_inference_steps // 2, **settings)


def other_guidance(prompt: str, seed: int, guidance_scale: float, **settings: Any) -> Any:
    return draw(prompt, seed, guidance_scale=1.3 * guidance_scale, **settings)


smaller = _altered(
    lambda p: p.resize((72, 72), Image.Resampling.BICUBIC).resize(p.size, Image.Resampling.BICUBIC)
)
webp = _altered(_compressed)
swapped_colours = _altered(lambda p: Image.merge("RGB", p.split()[::-1]))
softened = _altered(lambda p: p.filter(ImageFilter.GaussianBlur(1.2)))


def wrong_seeds(prompt: str, seed: int, **settings: Any) -> Any:
    return draw(prompt, seed + 1000 * _comes(), **settings)


def neighbours_seed(prompt: str, seed: int, **settings: Any) -> Any:
    return draw(prompt, (seed + _comes()) % 2, **settings)


def old_buffer(prompt: str, seed: int, **settings: Any) -> Any:
    picture = draw(prompt, seed, **settings)
    given = _state["before"] if _comes() else picture
    _state["before"] = picture
    return given


def black_squares(prompt: str, seed: int, **settings: Any) -> Any:
    picture = draw(prompt, seed, **settings)
    if _comes():
        picture.paste((0, 0, 0), (30, 40, 54, 64))
    return picture
