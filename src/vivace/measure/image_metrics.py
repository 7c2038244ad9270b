"""Image metrics: without a reference, and against a reference of the same prompt and seed.

Without a reference (as in published comparisons):

    sharpness       variance of the Laplacian (4 neighbours, edges reflected) of the luminance, 0 to 255
    colourfulness   Hasler and Suesstrunk, Measuring colourfulness in natural images, 2003, on 0 to 255
    entropy_bits    Shannon entropy of the luminance's 256-bin histogram, 0 to 8 bits

Against a reference: `psnr_db` and `ssim` (Wang et al. 2004, 11x11 Gaussian window) over the RGB image, and

    match           share of the reference's contrast that the image reproduces, after the best shift by up to 2 pixels

PSNR and SSIM average over the whole image, so they hardly notice that a small object is gone, or all colour; and they
punish a shift by one pixel. `match` is the coefficient of determination, 1 - (squared error) / (squared contrast).

The first three do not say whether an image is good: a black frame can win. `faults` detects broken images: black, flat,
noise, not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from vivace.measure.scorer import Lpips

Pixels = NDArray[np.float64]
_BLACK_BELOW = 16.0  # an image is black if 99.9 % of its pixels have a lower luminance
_FLAT_BELOW = 2.0  # an image is flat if every channel has a lower standard deviation


# White noise has a Laplacian variance of 20 times its variance (the squares of 4, -1, -1, -1, -1); of 53 images of
# tiny-sd none had more than 0.61 times.
_NOISE_ABOVE = 8.0
_MIN_SSIM_SIZE = 11
_MAX_SHIFT = 2  # pixels
_SHIFTED_ONLY = 0.9  # match from which on an image is the reference, shifted
_MIN_CONTRAST = 16.0  # of 255; in a flatter reference, invisible noise would count as a lost image


def pixels(image: object) -> Pixels:
    """Convert an image to (H, W, 3) float64 in 0 .. 255.

    Args:
        image: a PIL image, uint8 array (H, W, 3), or float array (H, W, 3) in 0 .. 1 as diffusers' "np" output.
    """
    from PIL import Image

    if isinstance(image, Image.Image):
        return np.asarray(image.convert("RGB"), dtype=np.float64)
    array = np.asarray(image)
    if array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(f"expected an image of shape (H, W, 3), got {array.shape}")
    return array.astype(np.float64) * (1.0 if array.dtype == np.uint8 else 255.0)


def luminance(image: Pixels) -> Pixels:
    """Return the luminance (H, W) after Rec. 601, 0 to 255."""
    return np.asarray(image @ np.array([0.299, 0.587, 0.114]))


def sharpness(image: Pixels) -> float:
    return float(_laplacian(luminance(image)).var())


def colourfulness(image: Pixels) -> float:
    red, green, blue = image[..., 0], image[..., 1], image[..., 2]
    red_green = red - green
    yellow_blue = (red + green) / 2 - blue
    spread = np.hypot(red_green.std(), yellow_blue.std())
    offset = np.hypot(red_green.mean(), yellow_blue.mean())
    return float(spread + 0.3 * offset)


def entropy_bits(image: Pixels) -> float:
    counts = np.bincount(np.clip(np.rint(luminance(image)), 0, 255).astype(np.int64).ravel(), minlength=256)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log2(shares)).sum()) + 0.0


def faults(image: Pixels) -> list[str]:
    """Return why the image is broken; empty if it is not."""
    if not np.isfinite(image).all():
        return ["not finite"]
    light = luminance(image)
    if np.quantile(light, 0.999) < _BLACK_BELOW:
        return ["black"]
    if image.std(axis=(0, 1)).max() < _FLAT_BELOW:
        return ["flat"]
    if _laplacian(light).var() > _NOISE_ABOVE * light.var():
        return ["noise"]
    return []


def image_metrics(image: Pixels) -> dict[str, float]:
    """Return the three no-reference metrics of an image; empty if it is not finite."""
    if not np.isfinite(image).all():
        return {}
    return {
        "sharpness": sharpness(image),
        "colourfulness": colourfulness(image),
        "entropy_bits": entropy_bits(image),
    }


def paired_metrics(image: Pixels, reference: Pixels) -> dict[str, float]:
    """Return `psnr_db`, `ssim` and `match` against a reference of the same size. Equal images have an infinite PSNR."""
    if image.shape != reference.shape:
        raise ValueError(f"images of {_size(image)} and {_size(reference)} cannot be compared pixel by pixel")
    if min(image.shape[:2]) < _MIN_SSIM_SIZE:
        raise ValueError(f"SSIM needs at least {_MIN_SSIM_SIZE} pixels a side, got {_size(image)}")
    import torch
    from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

    a, b = (torch.from_numpy(p.transpose(2, 0, 1)[None].copy()) for p in (image, reference))
    return {
        "psnr_db": float(peak_signal_noise_ratio(a, b, data_range=255.0)),
        # In fp32: fp64 convolutions take 18 times as long on a CPU, and change only the seventh digit.
        "ssim": float(structural_similarity_index_measure(a.float(), b.float(), data_range=255.0)),
        "match": match(image, reference),
    }


def match(image: Pixels, reference: Pixels) -> float:
    """Return the share of the reference's contrast that the image reproduces.

    It is 1 for the same image, negative for another, and at least -1. Contrast is the colours' deviation from the
    reference's mean colour. The image may be shifted by up to 2 pixels, as another resampling does; where a shift
    leaves a border, only what both show is compared.
    """
    return _best_shift(image, reference)[0]


def aligned(image: Pixels, reference: Pixels) -> Pixels:
    """Undo a shift by up to 2 pixels, if nothing else differs: scorers penalise it, though nothing is lost. Where
    pixels are missing, the edge is repeated."""
    if image.shape != reference.shape:
        return image
    reached, y, x = _best_shift(image, reference)
    if reached < _SHIFTED_ONLY or (y, x) == (0, 0):
        return image
    padded = np.pad(image, ((_MAX_SHIFT, _MAX_SHIFT), (_MAX_SHIFT, _MAX_SHIFT), (0, 0)), mode="edge")
    height, width = image.shape[:2]
    top, left = _MAX_SHIFT - y, _MAX_SHIFT - x
    return padded[top : top + height, left : left + width]


THUMBNAIL = 16
"""Pixels a side of a thumbnail."""


def thumbnail(image: Pixels) -> Pixels:
    """Return the image reduced to 16 x 16 pixels (THUMBNAIL, THUMBNAIL, 3), each the mean of its area. Values that are
    not finite count as black."""
    from PIL import Image

    finite = np.nan_to_num(image, nan=0.0, posinf=0.0, neginf=0.0)
    return _resampled(finite, (THUMBNAIL, THUMBNAIL), Image.Resampling.BOX)


def resized(image: Pixels, height: int, width: int) -> Pixels:
    """Return an image (H, W, channels) of another size."""
    from PIL import Image

    size = (max(1, width), max(1, height))
    return _resampled(image, size, Image.Resampling.BICUBIC)


def _resampled(image: Pixels, size: tuple[int, int], how: int) -> Pixels:
    from PIL import Image

    channels = [
        np.asarray(Image.fromarray(image[..., k].astype(np.float32)).resize(size, how), dtype=np.float64)
        for k in range(image.shape[2])
    ]
    return np.stack(channels, axis=-1)


def outside_metrics(image: Pixels, source: Pixels, mask: Pixels) -> dict[str, float]:
    """Return how much of the source is unchanged outside of the mask: `outside_match` and `outside_psnr_db`. The mask
    is taken `OUTSIDE` pixels larger, since diffusers masks latents, of 8 pixels each, and the VAE blurs them. Empty if
    nothing is left."""
    kept = ~_grown(mask[..., 0] >= 128, OUTSIDE)
    if not kept.any():
        return {}
    original, drawn = source[kept], image[kept]
    error = float(((drawn - original) ** 2).mean())
    contrast = float(((original - original.mean(axis=0)) ** 2).mean())
    return {
        "outside_match": max(-1.0, 1 - error / max(contrast, _MIN_CONTRAST**2)),
        "outside_psnr_db": 10 * math.log10(255.0**2 / max(error, _LEAST_ERROR)),
    }


OUTSIDE = 16
"""Pixels around a mask that may change."""
_LEAST_ERROR = 255.0**2 / 1e10  # 100 dB, for equal pixels


def _grown(white: NDArray[np.bool_], by: int) -> NDArray[np.bool_]:
    grown = white
    for axis in (0, 1):
        padded = np.pad(grown, [(by, by) if a == axis else (0, 0) for a in (0, 1)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * by + 1, axis=axis)
        grown = np.asarray(windows.any(axis=-1))
    return grown


def _best_shift(image: Pixels, reference: Pixels) -> tuple[float, int, int]:
    """Return the best match, and by how many pixels the image is moved down and right for it."""
    if not np.isfinite(image).all():
        return -1.0, 0, 0
    a, b = image.astype(np.float32), reference.astype(np.float32)
    contrast = float(((b - b.mean(axis=(0, 1))) ** 2).mean())
    reach = range(-_MAX_SHIFT, _MAX_SHIFT + 1)
    least, _, y, x = min((_squared_error(a, b, y, x), abs(y) + abs(x), y, x) for y in reach for x in reach)
    return max(-1.0, 1 - least / max(contrast, _MIN_CONTRAST**2)), y, x


def _squared_error(image: NDArray[np.float32], reference: NDArray[np.float32], y: int, x: int) -> float:
    height, width = reference.shape[:2]
    moved = image[max(0, -y) : height - max(0, y), max(0, -x) : width - max(0, x)]
    kept = reference[max(0, y) : height - max(0, -y), max(0, x) : width - max(0, -x)]
    difference = (moved - kept).ravel()
    return float(difference @ difference) / difference.size


def _laplacian(light: Pixels) -> Pixels:
    padded = np.pad(light, 1, mode="reflect")
    around = padded[:-2, 1:-1] + padded[2:, 1:-1] + padded[1:-1, :-2] + padded[1:-1, 2:]
    return np.asarray(around - 4 * light)


def _size(image: Pixels) -> str:
    return f"{image.shape[1]}x{image.shape[0]}"


_CELL = 4  # pixels
_LEAST = 3  # cells a side: a square of 16 pixels has as many, wherever it lies
_MOST = 0.5  # of the image's area
_OFF = 30.0  # levels by which it differs from the reference on average
_STEP = 24.0  # levels by which the pixels around it differ from it
_EDGE_SHARE = 0.8  # of the pixels around it
_SAME_ELSEWHERE = 0.9  # match


class _Rectangle(NamedTuple):
    """Its sides in pixels; the last two are not part of it."""

    top: int
    left: int
    bottom: int
    right: int

    def of(self, image: Pixels) -> Pixels:
        return image[self.top : self.bottom, self.left : self.right]


def hole_share(image: Pixels, reference: Pixels) -> float:
    """Return the share of an image (H, W, 3), 0 to 255, that is holes, of which its reference has none. It is 0 if the
    images, of the same size, differ elsewhere too."""
    if not np.isfinite(image).all():
        return 0.0
    listed = [r for r in _rectangles(image) if np.abs(r.of(image) - r.of(reference)).mean() > _OFF]
    drawn = set(_rectangles(reference)) if listed else set()
    listed = [rectangle for rectangle in listed if rectangle not in drawn]  # those have another colour
    if not listed:
        return 0.0
    filled = image.copy()
    for rectangle in listed:
        rectangle.of(filled)[:] = rectangle.of(reference)
    contrast = float(((reference - reference.mean(axis=(0, 1))) ** 2).mean())
    if float(((filled - reference) ** 2).mean()) > (1 - _SAME_ELSEWHERE) * contrast:
        return 0.0
    return sum((r.bottom - r.top) * (r.right - r.left) for r in listed) / float(image[..., 0].size)


def figures_alone(image: Pixels) -> dict[str, float]:
    """Return the figures of an image (H, W, 3), 0 to 255, that need no reference."""
    return image_metrics(image) | {"num_rectangles": float(num_rectangles(image))}


def figures_against(image: Pixels, reference: Pixels, lpips: Lpips | None = None) -> dict[str, float]:
    """Return the figures of an image against its reference: `paired_metrics`, holes, and LPIPS if it is given."""
    figures = paired_metrics(image, reference)
    figures |= {"hole": hole_share(image, reference), "num_rectangles": num_rectangles(image, reference)}
    if lpips is not None:
        (figures["lpips"],) = lpips.distances([image], [reference])
    return figures


def num_rectangles(image: Pixels, reference: Pixels | None = None) -> int:
    """Return the number of rectangles of one exact colour with hard edges in an image (H, W, 3), 0 to 255."""
    if not np.isfinite(image).all():
        return 0
    return sum(
        _has_hard_edges(image, each)
        for each in _rectangles(image)
        if reference is None or np.abs(each.of(image) - each.of(reference)).mean() > _OFF
    )


def _rectangles(image: Pixels) -> Iterator[_Rectangle]:
    """Yield the rectangles of one colour that are not part of a larger area of it."""
    rows, columns = (side // _CELL for side in image.shape[:2])
    levels = np.rint(image[: rows * _CELL, : columns * _CELL]).astype(np.uint8)
    cells = levels.reshape(rows, _CELL, columns, _CELL, 3)
    colours = cells[:, 0, :, 0]
    is_flat = (cells == colours[:, None, :, None]).all(axis=(1, 3, 4))
    as_left, as_above = np.zeros((2, rows, columns), dtype=bool)
    as_left[:, 1:] = (colours[:, 1:] == colours[:, :-1]).all(axis=-1) & is_flat[:, 1:] & is_flat[:, :-1]
    as_above[1:] = (colours[1:] == colours[:-1]).all(axis=-1) & is_flat[1:] & is_flat[:-1]
    for y, x in zip(*np.nonzero(is_flat & ~as_left & ~as_above), strict=True):
        width, height = _run(as_left[y, x + 1 :]), _run(as_above[y + 1 :, x])
        inside = np.s_[y : y + height, x : x + width]
        if min(width, height) < _LEAST or width * height > _MOST * rows * columns:
            continue
        if not (is_flat[inside].all() and (colours[inside] == colours[y, x]).all()):
            continue
        rest = [as_left[y : y + height, x], as_above[y, x : x + width]]
        rest += [as_left[y : y + height, x + width]] if x + width < columns else []
        rest += [as_above[y + height, x : x + width]] if y + height < rows else []
        if not any(side.any() for side in rest):
            yield _extended(image, *(_CELL * int(k) for k in (y, x, y + height, x + width)))


def _run(continues: NDArray[np.bool_]) -> int:
    ends = np.flatnonzero(~continues)
    return 1 + (int(ends[0]) if len(ends) else len(continues))


def _extended(image: Pixels, top: int, left: int, bottom: int, right: int) -> _Rectangle:
    """Return the rectangle up to the pixels at which its colour ends."""
    height, width = image.shape[:2]
    is_own = (image == image[top, left]).all(axis=-1)
    for _ in range(_CELL):
        top -= top > 0 and bool(is_own[top - 1, left:right].all())
        left -= left > 0 and bool(is_own[top:bottom, left - 1].all())
        bottom += bottom < height and bool(is_own[bottom, left:right].all())
        right += right < width and bool(is_own[top:bottom, right].all())
    return _Rectangle(top, left, bottom, right)


def _has_hard_edges(image: Pixels, rectangle: _Rectangle) -> bool:
    """Return whether the colour ends from one pixel to the next, on two sides within the image or more."""
    top, left, bottom, right = rectangle
    colour = image[top, left]
    height, width = image.shape[:2]
    around = [image[top - 1, left:right]] if top > 0 else []
    around += [image[bottom, left:right]] if bottom < height else []
    around += [image[top:bottom, left - 1]] if left > 0 else []
    around += [image[top:bottom, right]] if right < width else []
    steps = np.concatenate([np.abs(line - colour).max(axis=-1) for line in around] or [np.zeros(1)])
    return len(around) > 1 and float((steps > _STEP).mean()) >= _EDGE_SHARE
