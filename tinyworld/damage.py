"""Damage done to images and weights without any recipe, to test the quality gate on what no limit was fitted to.

Images are uint8 arrays (N, 128, 128, 3). What a damage does to an image depends on the image, its prompt and its place
in the list alone.
"""

import io
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from tinyworld import verifier
from vivace.runtime.session import Session

Pictures = NDArray[np.uint8]
Damage = Callable[[Pictures, Sequence[str]], Pictures]


def turned(pictures: Pictures, degrees: float) -> Pictures:
    """Turn all hues, keeping the mean of red, green and blue: a rotation around the gray axis."""
    angle = np.deg2rad(degrees)
    third, side = (1 - np.cos(angle)) / 3, np.sin(angle) / np.sqrt(3)
    row = np.array([np.cos(angle) + third, third - side, third + side])
    matrix = np.stack([np.roll(row, k) for k in range(3)])
    return _bytes(pictures @ matrix.T)


def gray(pictures: Pictures) -> Pictures:
    light = pictures @ np.array([0.299, 0.587, 0.114])
    return _bytes(np.repeat(light[..., None], 3, axis=-1))


def shifted(pictures: Pictures, x: int, y: int = 0) -> Pictures:
    """Shift to the right and down; what comes in is a copy of the edge."""
    reach = max(abs(x), abs(y))
    padded = np.pad(pictures, ((0, 0), (reach, reach), (reach, reach), (0, 0)), mode="edge")
    height, width = pictures.shape[1:3]
    return padded[:, reach - y : reach - y + height, reach - x : reach - x + width]


def blurred(pictures: Pictures, sigma: float) -> Pictures:
    return _bytes(ndimage.gaussian_filter(pictures.astype(np.float32), (0, sigma, sigma, 0)))


def encoded(pictures: Pictures, format_: str, quality: int) -> Pictures:
    """Save in a lossy format and read again, as PIL does by default (JPEG: colour at half resolution)."""

    def again(picture: Pictures) -> Pictures:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, format=format_, quality=quality)
        return np.asarray(Image.open(file).convert("RGB"))

    return np.stack([again(picture) for picture in pictures])


def noisy(pictures: Pictures, deviation: float) -> Pictures:
    noise = np.random.default_rng(0).normal(0, deviation, pictures.shape)
    return _bytes(pictures + noise)


def without_the_smaller(pictures: Pictures) -> Pictures:
    """Paint the background over the smaller of two objects; other images stay as they are."""

    def without(picture: Pictures) -> Pictures:
        found = verifier.objects(picture)
        return verifier.without(picture, found[-1][1]) if len(found) == 2 else picture

    return np.stack([without(picture) for picture in pictures])


def of_other_prompts(pictures: Pictures, prompts: Sequence[str], lost: Callable[[int], bool]) -> Pictures:
    """Replace the images of some prompts by those of the next prompt.

    Args:
        lost: whether the prompt with this number loses its images.
    """
    number = {prompt: k for k, prompt in enumerate(dict.fromkeys(prompts))}
    out = pictures.copy()
    for k, prompt in enumerate(prompts):
        if lost(number[prompt]):
            out[k] = pictures[(k + 1) % len(pictures)]
    return out


def half_of_other_prompts(pictures: Pictures, prompts: Sequence[str]) -> Pictures:
    """Replace every second image by that of the next prompt."""
    out = pictures.copy()
    out[::2] = np.roll(pictures, -1, axis=0)[::2]
    return out


def toned(pictures: Pictures, contrast: float = 1.0, saturation: float = 1.0, gamma: float = 1.0) -> Pictures:
    """Change contrast around each picture's mean colour, saturation around gray, and gamma."""
    mean = pictures.mean(axis=(1, 2), keepdims=True)
    out = mean + contrast * (pictures - mean)
    light = out @ np.array([0.299, 0.587, 0.114])
    out = light[..., None] + saturation * (out - light[..., None])
    return _bytes(255 * (out.clip(0, 255) / 255) ** gamma)


def pixelated(pictures: Pictures, side: int) -> Pictures:
    """Replace squares of `side` pixels by their mean colour."""
    number, height, width, _ = pictures.shape
    squares = pictures.reshape(number, height // side, side, width // side, side, 3).mean(axis=(2, 4))
    return _bytes(squares.repeat(side, axis=1).repeat(side, axis=2))


def rotated(pictures: Pictures, degrees: float) -> Pictures:
    """Rotate around the centre; what comes in is a copy of the edge."""
    turned_ = ndimage.rotate(
        pictures.astype(np.float32), degrees, axes=(1, 2), reshape=False, order=1, mode="nearest"
    )
    return _bytes(turned_)


def enlarged(pictures: Pictures, factor: float) -> Pictures:
    """Enlarge the middle to the whole picture."""
    side = pictures.shape[1]
    inner = round(side / factor)
    start = (side - inner) // 2
    box = (start, start, start + inner, start + inner)
    resized = [
        Image.fromarray(one).resize((side, side), Image.Resampling.BICUBIC, box=box) for one in pictures
    ]
    return np.stack([np.asarray(one) for one in resized])


def covered(pictures: Pictures, top: int, bottom: int, right: int) -> Pictures:
    """Paint rows `top` to `bottom` gray, up to the column `right`."""
    out = pictures.copy()
    out[:, top:bottom, :right] = 128
    return out


def posterised(pictures: Pictures, levels: int) -> Pictures:
    return _bytes(np.round(pictures / 255 * (levels - 1)) / (levels - 1) * 255)


def speckled(pictures: Pictures, share: float) -> Pictures:
    """Make a share of all pixels black or white."""
    random = np.random.default_rng(0)
    out = pictures.copy()
    hit = random.random(pictures.shape[:3]) < share
    out[hit] = random.choice(np.array([0, 255], np.uint8), int(hit.sum()))[:, None]
    return out


def fringed(pictures: Pictures, pixels: int) -> Pictures:
    """Shift red to the right and blue to the left."""
    out = pictures.copy()
    out[..., 0] = shifted(pictures, pixels)[..., 0]
    out[..., 2] = shifted(pictures, -pixels)[..., 2]
    return out


def resampled(pictures: Pictures, side: int) -> Pictures:
    """Resize to `side` pixels and back."""
    full = pictures.shape[1]
    small = [Image.fromarray(one).resize((side, side), Image.Resampling.BICUBIC) for one in pictures]
    return np.stack([np.asarray(one.resize((full, full), Image.Resampling.BICUBIC)) for one in small])


def warped(pictures: Pictures, matrix: Sequence[Sequence[float]]) -> Pictures:
    """Map coordinates (row, column) around the centre by a 2 x 2 matrix; what comes in is a copy of the edge."""
    centre = np.array(pictures.shape[1:3]) / 2 - 0.5
    offset = centre - np.array(matrix) @ centre

    def one(channel: NDArray[np.float32]) -> NDArray[np.float32]:
        return ndimage.affine_transform(channel, np.array(matrix), offset, order=1, mode="nearest")

    moved = [
        np.stack([one(picture[..., c].astype(np.float32)) for c in range(3)], axis=-1) for picture in pictures
    ]
    return _bytes(np.stack(moved))


def waved(pictures: Pictures, reach: float) -> Pictures:
    """Shift each row by up to `reach` pixels, in a wave of 32 rows."""
    rows = np.arange(pictures.shape[1])
    shifts = np.round(reach * np.sin(2 * np.pi * rows / 32)).astype(int)
    columns = (np.arange(pictures.shape[2])[None] - shifts[:, None]).clip(0, pictures.shape[2] - 1)
    return pictures[:, rows[:, None], columns]


def vignetted(pictures: Pictures, share: float) -> Pictures:
    """Darken towards the corners, by `share` there."""
    y, x = (np.linspace(-1, 1, side) for side in pictures.shape[1:3])
    fall = 1 - share * (y[:, None] ** 2 + x[None] ** 2) / 2
    return _bytes(pictures * fall[..., None])


def sharpened(pictures: Pictures, amount: float) -> Pictures:
    """Add `amount` times the difference from the picture blurred by a pixel."""
    images = pictures.astype(np.float32)
    return _bytes(images + amount * (images - ndimage.gaussian_filter(images, (0, 1, 1, 0))))


def mixed(pictures: Pictures, share: float) -> Pictures:
    """Let the next picture shine through."""
    return _bytes((1 - share) * pictures + share * np.roll(pictures, -1, axis=0))


def tiles_exchanged(pictures: Pictures) -> Pictures:
    """Exchange the quarters crosswise."""
    return np.roll(pictures, [side // 2 for side in pictures.shape[1:3]], axis=(1, 2))


def _bytes(pictures: NDArray[np.floating]) -> Pictures:
    return np.round(pictures).clip(0, 255).astype(np.uint8)


IMAGE: dict[str, dict[str, Damage]] = {
    "gray": {"gray": lambda images, prompts: gray(images)},
    "hue": {
        **{f"hue {d} degrees": lambda images, prompts, d=d: turned(images, d) for d in (60, 120, 180)},
        "hue 3 degrees": lambda images, prompts: turned(images, 3),
    },
    "channels": {
        "red and blue exchanged": lambda images, prompts: images[..., ::-1],
        "red and green exchanged": lambda images, prompts: images[..., [1, 0, 2]],
    },
    "mirror": {
        "left and right exchanged": lambda images, prompts: images[:, :, ::-1],
        "upside down": lambda images, prompts: images[:, ::-1],
    },
    "shift": {
        "shift by 32 pixels": lambda images, prompts: shifted(images, 32),
        "shift by 1 pixel": lambda images, prompts: shifted(images, 1),
        "shift by 1 pixel up and left": lambda images, prompts: shifted(images, -1, -1),
    },
    "blur": {
        "blur of 6 pixels": lambda images, prompts: blurred(images, 6),
        "blur of 4 pixels": lambda images, prompts: blurred(images, 4),
        "blur of 0.5 pixels": lambda images, prompts: blurred(images, 0.5),
    },
    "object": {"the smaller object gone": lambda images, prompts: without_the_smaller(images)},
    "jpeg": {
        "JPEG 90": lambda images, prompts: encoded(images, "JPEG", 90),
        "JPEG 75": lambda images, prompts: encoded(images, "JPEG", 75),
        "JPEG 5": lambda images, prompts: encoded(images, "JPEG", 5),
    },
    "pixel noise": {
        "noise of 3 levels": lambda images, prompts: noisy(images, 3),
        "noise of 60 levels": lambda images, prompts: noisy(images, 60),
    },
    "brightness": {
        "2 % brighter": lambda images, prompts: _bytes(images * 1.02),
        "negative": lambda images, prompts: 255 - images,
    },
    "one prompt": {
        "one prompt of thirteen": lambda images, prompts: of_other_prompts(
            images, prompts, lambda k: k % 13 == 7
        )
    },
    "half": {"half of the images of other prompts": half_of_other_prompts},
    "prompts": {
        "every third prompt of others": lambda images, prompts: of_other_prompts(
            images, prompts, lambda k: k % 3 == 0
        ),
        "all of other prompts": lambda images, prompts: of_other_prompts(images, prompts, lambda k: True),
    },
}
"""Damage of images, and changes that harm nothing, by kind and name."""

LATER_IMAGE: dict[str, dict[str, Damage]] = {
    "contrast": {
        "half of the contrast": lambda images, prompts: toned(images, contrast=0.5),
        "95 % of the contrast": lambda images, prompts: toned(images, contrast=0.95),
    },
    "saturation": {
        "30 % of the saturation": lambda images, prompts: toned(images, saturation=0.3),
        "95 % of the saturation": lambda images, prompts: toned(images, saturation=0.95),
    },
    "gamma": {
        "gamma 1.05": lambda images, prompts: toned(images, gamma=1.05),
        "gamma 4": lambda images, prompts: toned(images, gamma=4),
    },
    "pixelation": {
        "squares of 2 pixels": lambda images, prompts: pixelated(images, 2),
        "squares of 8 pixels": lambda images, prompts: pixelated(images, 8),
        "squares of 16 pixels": lambda images, prompts: pixelated(images, 16),
    },
    "rotation": {
        "rotation by 0.5 degrees": lambda images, prompts: rotated(images, 0.5),
        "rotation by 45 degrees": lambda images, prompts: rotated(images, 45),
        "rotation by 90 degrees": lambda images, prompts: rotated(images, 90),
    },
    "enlargement": {
        "enlarged 1.02 times": lambda images, prompts: enlarged(images, 1.02),
        "enlarged 2 times": lambda images, prompts: enlarged(images, 2),
    },
    "cover": {
        "a gray band of 40 pixels": lambda images, prompts: covered(images, 44, 84, 128),
        "the upper half gray": lambda images, prompts: covered(images, 0, 64, 128),
    },
    "few colours": {
        "32 levels": lambda images, prompts: posterised(images, 32),
        "2 levels": lambda images, prompts: posterised(images, 2),
    },
    "speckles": {
        "10 % of the pixels black or white": lambda images, prompts: speckled(images, 0.1),
    },
    "fringes": {
        "colours 8 pixels apart": lambda images, prompts: fringed(images, 8),
    },
}
"""The same, of kinds that were added after the gate's rules were settled."""

NEWEST_IMAGE: dict[str, dict[str, Damage]] = {
    "stretch": {
        "stretched 1.03 times": lambda images, prompts: warped(images, ((1, 0), (0, 1 / 1.03))),
        "stretched 3 times": lambda images, prompts: warped(images, ((1, 0), (0, 1 / 3))),
    },
    "reduction": {
        "reduced 0.98 times": lambda images, prompts: warped(images, ((1 / 0.98, 0), (0, 1 / 0.98))),
        "reduced 0.3 times": lambda images, prompts: warped(images, ((1 / 0.3, 0), (0, 1 / 0.3))),
    },
    "shear": {
        "sheared by 2 %": lambda images, prompts: warped(images, ((1, 0), (0.02, 1))),
        "sheared by 150 %": lambda images, prompts: warped(images, ((1, 0), (1.5, 1))),
    },
    "resampling": {
        "96 pixels and back": lambda images, prompts: resampled(images, 96),
        "10 pixels and back": lambda images, prompts: resampled(images, 10),
    },
    "waves": {
        "waves of 1 pixel": lambda images, prompts: waved(images, 1),
        "waves of 16 pixels": lambda images, prompts: waved(images, 16),
    },
    "vignette": {
        "corners 5 % darker": lambda images, prompts: vignetted(images, 0.05),
        "corners dark": lambda images, prompts: vignetted(images, 2),
    },
    "colour temperature": {
        "3 % warmer": lambda images, prompts: _bytes(images * np.array([1.02, 1.0, 0.98])),
        "red light": lambda images, prompts: _bytes(images * np.array([1.0, 0.2, 0.2])),
    },
    "median": {
        "median of 3 pixels": lambda images, prompts: ndimage.median_filter(images, (1, 3, 3, 1)),
        "median of 31 pixels": lambda images, prompts: ndimage.median_filter(images, (1, 31, 31, 1)),
    },
    "webp": {
        "WebP 95": lambda images, prompts: encoded(images, "WEBP", 95),
        "WebP 0": lambda images, prompts: encoded(images, "WEBP", 0),
    },
    "sharpening": {
        "sharpened by a half": lambda images, prompts: sharpened(images, 0.5),
        "sharpened 20 times": lambda images, prompts: sharpened(images, 20),
    },
    "double exposure": {
        "2 % of the next picture": lambda images, prompts: mixed(images, 0.02),
        "half of the next picture": lambda images, prompts: mixed(images, 0.5),
    },
    "quarters": {"quarters exchanged": lambda images, prompts: tiles_exchanged(images)},
}
"""The same, of kinds that were added after the scorer averaged over zooms; made and judged once."""

WEIGHTS = {
    "denoiser noise": {
        f"denoiser, noise of {share}": ("denoiser", share) for share in (0.003, 0.05, 0.1, 0.2, 0.4)
    },
    "decoder noise": {f"decoder, noise of {share}": ("vae", share) for share in (0.003, 0.05, 0.15, 0.4)},
    "text noise": {
        f"text encoder, noise of {share}": ("text_encoder", share) for share in (0.003, 0.1, 0.3, 0.6)
    },
}
"""Noise on the weights of a component, in shares of each tensor's standard deviation, by kind and name."""


@torch.no_grad()
def spoil(session: Session, component: str, share: float) -> None:
    """Add noise to every matrix of a component's weights, in place."""
    pipe = session.pipe
    name = component
    if component == "denoiser":
        name = "unet" if getattr(pipe, "unet", None) is not None else "transformer"
    generator = torch.Generator().manual_seed(5)
    modules = [getattr(pipe, name)]
    if component == "text_encoder" and getattr(pipe, "text_encoder_2", None) is not None:
        modules.append(pipe.text_encoder_2)
    for module in modules:
        for weight in module.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=generator) * weight.float().std().cpu() * share
                weight += noise.to(weight)
