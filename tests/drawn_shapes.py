"""Images of coloured shapes by prompt and seed: what a good model would draw, in a millisecond."""

import hashlib
import random
import time
from typing import Any

from PIL import Image, ImageDraw

COLOURS = {
    "red": (210, 40, 40),
    "blue": (40, 70, 210),
    "green": (40, 160, 60),
    "yellow": (230, 200, 40),
    "purple": (140, 50, 180),
    "orange": (235, 130, 30),
}


def draw(
    prompt: str,
    seed: int,
    width: int = 96,
    height: int = 96,
    num_inference_steps: int = 8,
    guidance_scale: float = 4.0,
) -> Any:
    """Return an image of the prompt's colours. Each argument changes it a little, or where things are."""
    random_ = random.Random(hashlib.sha256(f"{prompt}/{seed}".encode()).digest())
    shade = 150 + random_.randrange(60)
    picture = Image.new("RGB", (width, height), (shade, shade, shade - 10))
    pen = ImageDraw.Draw(picture)
    for stripe in range(0, width, 12):
        pen.line((stripe, 0, stripe + random_.randrange(10), height), fill=(shade - 30,) * 3)
    colours = [COLOURS[word] for word in prompt.split() if word in COLOURS] or [(90, 90, 90)]
    for colour in colours * 2:
        size = random_.randrange(width // 5, width // 2)
        x, y = random_.randrange(width - size), random_.randrange(max(1, height - size))
        shape = pen.ellipse if random_.random() < 0.5 else pen.rectangle
        shape((x, y, x + size, y + size), fill=colour)
    edge = 1 + num_inference_steps // 4
    pen.rectangle((0, 0, width - 1, edge), fill=(int(20 * guidance_scale) % 256, 60, 60))
    return picture


def draw_soft(prompt: str, seed: int, **settings: Any) -> Any:
    """As `draw`, by a decoder that blurs."""
    from PIL import ImageFilter

    return draw(prompt, seed, **settings).filter(ImageFilter.GaussianBlur(1.5))


def draw_soft_if_tall(prompt: str, seed: int, width: int = 96, height: int = 96) -> Any:
    """As `draw`, by a decoder that blurs images that are higher than wide."""
    return (draw_soft if height > width else draw)(prompt, seed, width=width, height=height)


def draw_slowly(prompt: str, seed: int) -> Any:
    time.sleep(0.02)
    return draw(prompt, seed)


def draw_quickly(prompt: str, seed: int) -> Any:
    time.sleep(0.005)
    return draw(prompt, seed)


def draw_rounded(prompt: str, seed: int, **settings: Any) -> Any:
    """As `draw`, with other rounding: every third row is one level brighter."""
    import numpy as np

    values = np.asarray(draw(prompt, seed, **settings)).astype(int)
    values[::3] = np.minimum(values[::3] + 1, 255)
    return Image.fromarray(values.astype(np.uint8))


def draw_not_finite(prompt: str, seed: int) -> Any:
    import numpy as np

    values = np.asarray(draw(prompt, seed)).astype(np.float32) / 255
    values[0, 0, 0] = np.nan
    return values


def fail_sometimes(prompt: str, seed: int) -> Any:
    if "red" in prompt:
        raise RuntimeError("out of paint")
    return draw(prompt, seed)


def tinted(picture: Any, strength: float) -> Any:
    """As by a LoRA: red from the left to the right."""
    import numpy as np

    values = np.asarray(picture).astype(float)
    values[..., 0] += strength * np.linspace(-60, 60, values.shape[1])
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))


def draw_with_lora(prompt: str, seed: int, **settings: Any) -> Any:
    return tinted(draw(prompt, seed, **settings), 1.0)


def draw_in_eight_steps(prompt: str, seed: int, num_inference_steps: int = 8) -> Any:
    """As `draw`, with an argument that it ignores."""
    return draw(prompt, seed)
