"""Detect alterations of B's images: red and blue swapped, upside down, moved, other tones, softened, encoded as JPEG.

Each alteration is done to A's images, with its amount fitted to all of them together. It is named if it explains most
of the squared difference to B's images, in most of the images that differ. Rounding, another scheduler and another seed
are not alterations.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from vivace.measure.damage.details import blurred
from vivace.measure.image_metrics import Pixels, luminance, pixels
from vivace.proofs.image_findings import ImageFinding, RequestOf, is_lossy
from vivace.proofs.pair_figures import PairFigures
from vivace.proofs.same import Nearness, OwnDistances, nearness
from vivace.report.value_text import count

_MOST_PAIRS = 12
"""Number of differing pairs that are examined, evenly chosen."""
_LEAST_PAIRS = 3
_MOST_OF_THEM = 0.75
_LEFT = 0.15
"""Share of the squared difference that an alteration may leave unexplained."""
_LEFT_OF_JPEG = 0.35  # the encoder's tables are not known
_LEFT_OF_ZOOM = 0.35  # nor is its interpolation
_ZOOMS = tuple(1 + step / 200 for step in (-20, -16, -10, -6, -4, -2, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20))
_EDGE = 8  # pixels
_FREEDOM = 2.0
"""Cost of a curve of tones, which fits anything a little better than an amount of one number does."""
_CAST = 1.5
"""Levels by which means of colours move apart."""
_CAST_SHARE = 0.5
"""Of the largest move, by which they are apart at least."""
_REACH = 16  # pixels by which an image may be moved
_SUBSAMPLINGS = (0, 2)  # of colours, as PIL counts them: none, and by 2 in both directions
_QUALITIES = (50, 60, 70, 75, 80, 85, 90, 95)
_SIGMAS = (0.6, 1.5)  # pixels, of the details that are softened or sharpened
Change = Callable[[Pixels], Pixels]


class _Two(NamedTuple):
    a: Pixels
    b: Pixels


@dataclass(frozen=True)
class Alteration:
    """A possible alteration of images.

    Attributes:
        left: share of the squared difference that it may leave unexplained.
        margin: pixels at the edges that do not count.
        freedom: factor on what it leaves, where another alteration fits too.
    """

    words: str
    change: Change
    left: float = _LEFT
    margin: int = 0
    freedom: float = 1.0

    def explains(self, two: _Two) -> float:
        """Return the share of the squared difference that remains; infinite if the size would change."""
        altered = self.change(two.a)
        if altered.shape != two.b.shape:
            return float("inf")
        inside = slice(self.margin, -self.margin or None)
        before, after = (
            float(((image - two.b)[inside, inside] ** 2).mean())
            for image in (two.a, np.clip(altered, 0, 255))
        )
        return after / max(before, 1e-9)


_EXACT = (
    Alteration("red and blue are swapped", lambda image: image[..., ::-1]),
    Alteration("they are upside down", lambda image: image[::-1]),
    Alteration("they are mirrored", lambda image: image[:, ::-1]),
    Alteration("they are turned by 180 degrees", lambda image: image[::-1, ::-1]),
    Alteration("rows and columns are swapped", lambda image: image.transpose(1, 0, 2)),
    Alteration("they are turned by 90 degrees", lambda image: np.rot90(image)),
    Alteration("they are turned by 270 degrees", lambda image: np.rot90(image, 3)),
    Alteration("they are negatives", lambda image: 255 - image),
    Alteration("they are grey", lambda image: np.repeat(luminance(image)[..., None], 3, axis=2)),
)


def altered(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return the alteration that explains most of B's images that differ from A's, if there is one.

    JPEG encoding is no finding for files that are JPEGs anyway.
    """
    sound = [pair for pair in pairs if pair.against and not (pair.a.faults or pair.b.faults)]
    differ = [pair for pair in sound if nearness(pair.against, own) is not Nearness.ITSELF]
    if len(differ) < _LEAST_PAIRS:
        return []
    chosen = [differ[k] for k in np.linspace(0, len(differ) - 1, min(_MOST_PAIRS, len(differ))).astype(int)]
    twos = [_Two(pair.a.pixels, pair.b.pixels) for pair in chosen]
    says_so = any(is_lossy(pair.b) for pair in chosen)
    for group in _alterations(twos, with_jpeg=not says_so):
        fitting: list[tuple[float, Alteration, PairFigures]] = []
        for alteration in group:
            left = [alteration.explains(two) for two in twos]
            number = sum(share <= alteration.left for share in left)
            if number >= max(_LEAST_PAIRS, _MOST_OF_THEM * len(twos)):
                cost = float(np.median(left)) * alteration.freedom
                fitting.append((cost, alteration, chosen[int(np.argmin(left))]))
        if fitting:
            _, alteration, example = min(fitting, key=lambda each: each[0])
            summary = f"altered: {count(len(differ), 'image')} of B differ from A's as if {alteration.words}"
            return [ImageFinding(summary, example.label, request_of(example))]
    return []


def _alterations(twos: Sequence[_Two], *, with_jpeg: bool) -> Iterator[list[Alteration]]:
    """Yield the alterations, the simplest first, with amounts that fit these images. Of a group the best one counts."""
    yield list(_EXACT)
    yield _moves(twos)
    toned = Alteration(_tone_in_words(twos), partial(_toned, curves=_curves(twos)), freedom=_FREEDOM)
    yield [toned, _saturated(twos), _detailed(twos)]
    yield [_enlarged(twos)]
    if with_jpeg:
        yield [_encoded(twos)]


def _enlarged(twos: Sequence[_Two]) -> Alteration:
    """Return the enlargement about the centre that fits best."""
    zooms = [
        Alteration(
            f"{'enlarged' if zoom > 1 else 'made smaller'} by {100 * abs(zoom - 1):.1f} %",
            partial(_zoomed, zoom=zoom),
            _LEFT_OF_ZOOM,
            _EDGE,
        )
        for zoom in _ZOOMS
    ]
    return min(zooms, key=lambda each: sum(each.explains(two) for two in twos[:_LEAST_PAIRS]))


def _zoomed(image: Pixels, zoom: float) -> Pixels:
    for axis in (0, 1):
        side = image.shape[axis]
        at = (np.arange(side) - (side - 1) / 2) / zoom + (side - 1) / 2
        low = np.clip(np.floor(at).astype(np.int64), 0, side - 1)
        high = np.minimum(low + 1, side - 1)
        shape = [1, 1, 1]
        shape[axis] = side
        share = np.clip(at - low, 0, 1).reshape(shape)
        image = image.take(low, axis) * (1 - share) + image.take(high, axis) * share
    return image


def _encoded(twos: Sequence[_Two]) -> Alteration:
    """Return the encoding as JPEG that fits best."""
    jpegs = [
        Alteration(
            f"encoded as JPEG (quality {q})", partial(_as_jpeg, quality=q, subsampling=k), _LEFT_OF_JPEG
        )
        for q in _QUALITIES
        for k in _SUBSAMPLINGS
    ]
    return min(jpegs, key=lambda each: sum(each.explains(two) for two in twos[:_LEAST_PAIRS]))


def _as_jpeg(image: Pixels, quality: int, subsampling: int) -> Pixels:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(image.astype(np.uint8)).save(file, "JPEG", quality=quality, subsampling=subsampling)
    return pixels(Image.open(file))


def _moves(twos: Sequence[_Two]) -> list[Alteration]:
    """Return the moves by whole pixels, of all colours or of one, that fit most of the images; empty if none does."""
    moves = []
    whole = _commonest([_moved_by(*map(luminance, two)) for two in twos])
    if whole != (0, 0):
        words = f"moved by {_move_in_words(whole)}"
        moves.append(Alteration(words, partial(np.roll, shift=whole, axis=(0, 1)), margin=_REACH))
    for k, colour in enumerate(("red", "green", "blue")):
        move = _commonest([_moved_by(two.a[..., k], two.b[..., k]) for two in twos])
        if move != (0, 0):
            words = f"{colour} is moved by {_move_in_words(move)}"
            moves.append(Alteration(words, partial(_with_moved, channel=k, move=move), margin=_REACH))
    return moves


def _commonest(moves: Sequence[tuple[int, int]]) -> tuple[int, int]:
    return Counter(moves).most_common(1)[0][0]


def _move_in_words(move: tuple[int, int]) -> str:
    parts = [(move[0], "down", "up"), (move[1], "right", "left")]
    return " and ".join(
        f"{count(abs(by), 'pixel')} {more if by > 0 else less}" for by, more, less in parts if by
    )


def _with_moved(image: Pixels, channel: int, move: tuple[int, int]) -> Pixels:
    moved = image.copy()
    moved[..., channel] = np.roll(image[..., channel], move, axis=(0, 1))
    return moved


def _moved_by(a: Pixels, b: Pixels) -> tuple[int, int]:
    """Return the move (y, x) of B's plane, from its correlation with A's; (0, 0) if it is not within reach."""
    of_a, of_b = (np.fft.rfft2(plane - plane.mean()) for plane in (a, b))
    cross = of_b * of_a.conj()
    peaks = np.fft.irfft2(cross / np.maximum(np.abs(cross), 1e-9), s=a.shape)
    y, x = (int(k) for k in np.unravel_index(int(peaks.argmax()), peaks.shape))
    height, width = peaks.shape
    y, x = (y - height if y > height // 2 else y), (x - width if x > width // 2 else x)
    is_near = max(abs(y), abs(x)) <= min(_REACH, min(height, width) // 4)
    return (y, x) if is_near else (0, 0)


def _curves(twos: Sequence[_Two]) -> Pixels:
    """Return B's mean level for each of A's, of each channel (3, 256)."""
    sums, numbers = np.zeros((3, 256)), np.zeros((3, 256))
    for a, b in twos:
        for k in range(3):
            levels = np.rint(a[..., k]).astype(np.int64).ravel()
            sums[k] += np.bincount(levels, b[..., k].ravel(), 256)
            numbers[k] += np.bincount(levels, minlength=256)
    return np.where(numbers > 0, sums / np.maximum(numbers, 1), np.arange(256))


def _toned(image: Pixels, curves: Pixels) -> Pixels:
    levels = np.rint(image).astype(np.int64)
    return np.stack([curves[k][levels[..., k]] for k in range(3)], axis=-1)


def _tone_in_words(twos: Sequence[_Two]) -> str:
    """Return the change of tones as a gamma or as a gain with an offset, whichever fits better."""
    moved = np.mean([(two.b - two.a).mean(axis=(0, 1)) for two in twos], axis=0)
    if moved.max() - moved.min() > max(_CAST, _CAST_SHARE * np.abs(moved).max()):
        return "colours are moved by {:+.0f} (red), {:+.0f} (green) and {:+.0f} (blue) levels".format(*moved)
    a, b = (np.concatenate([part.ravel()[::7] for part in column]) for column in zip(*twos, strict=True))
    gain, offset = np.polyfit(a, b, 1)
    inner = (a > 8) & (a < 247) & (b > 0)
    gamma = float(np.median(np.log(b[inner] / 255) / np.log(a[inner] / 255))) if inner.any() else 1.0
    of_gain = float(((gain * a + offset - b) ** 2).mean())
    of_gamma = float(((255 * (a / 255) ** gamma - b) ** 2).mean())
    if of_gamma < of_gain:
        twice = ", as of sRGB that is encoded twice" if 0.38 < gamma < 0.55 else ""
        return f"tones have a gamma of {gamma:.2f}{twice}"
    return f"tones are stretched by {gain:.2f} and moved by {offset:+.0f} levels"


def _saturated(twos: Sequence[_Two]) -> Alteration:
    products = squares = 0.0
    for a, b in twos:
        of_a, of_b = a - luminance(a)[..., None], b - luminance(b)[..., None]
        products += float((of_a * of_b).sum())
        squares += float((of_a**2).sum())
    factor = products / max(squares, 1e-9)

    def change(image: Pixels) -> Pixels:
        light = luminance(image)[..., None]
        return light + factor * (image - light)

    return Alteration(f"their saturation is {100 * factor:.0f} % of A's", change)


def _detailed(twos: Sequence[_Two]) -> Alteration:
    """Return the softening or sharpening, as gains of the finest details and of those next to them."""
    products, squares = np.zeros(2), np.zeros((2, 2))
    for a, b in twos:
        bands = [band.ravel() for band in _bands(a)]
        products += [float(band @ (b - a).ravel()) for band in bands]
        squares += [[float(band @ other) for other in bands] for band in bands]
    gains = np.linalg.lstsq(squares, products, rcond=None)[0]

    def change(image: Pixels) -> Pixels:
        fine, coarse = _bands(image)
        return np.asarray(image + gains[0] * fine + gains[1] * coarse)

    kind = "softened" if gains[0] < 0 else "sharpened"
    return Alteration(f"they are {kind} (the finest details × {max(0.0, 1 + gains[0]):.2f})", change)


def _bands(image: Pixels) -> tuple[Pixels, Pixels]:
    first, second = (blurred(image, sigma) for sigma in _SIGMAS)
    return image - first, first - second
