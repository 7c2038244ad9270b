"""The exact verifier: detects what an image shows without a network, and compares it with a caption.

Objects are found by chroma (backgrounds are neutral) and identified by colour (nearest in the palette), shape (overlap
with templates at equal area and centroid) and position. A broken image (noise, flat, strongly blurred) has no component
of a plausible size and shape, and scores close to zero.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import ndimage

from tinyworld.captions import Description, Thing, parse
from tinyworld.scenes import AREAS, CELLS, DISTANCES, backgrounds
from tinyworld.words import COLOURS, KINDS, PALETTE, POSITIONS, RADII, SHAPES, SIDE, SIZES, TONES

ATTRIBUTES = (
    "colour",
    "shape",
    "size",
    "position",
    "relation",
    "binding",
    "count",
    "background",
    "everything",
)

MIN_CHROMA = 60
"""Greatest minus least channel, of 255; the palest edge of an object that still counts."""
MAX_COLOUR_ERROR = 75.0
"""RGB distance from a palette colour beyond which a thing has no colour."""
MIN_OVERLAP = 0.85
"""Soft intersection over union with a template, below which a thing has no shape."""
MIN_AREA, MAX_AREA = 120, 2400  # square pixels; true ones run from 340 to 1,700
MAX_BACKGROUND_ERROR = 14.0
"""Mean absolute grey levels from the nearest of the twelve backgrounds."""

MAX_OBJECTS = 4
"""An image with more objects counts as empty: with enough blobs, some would match any caption."""

_STEEPER = 1.5
_GRID = 48  # template cells a side
_REACH = 1.0  # half-width of the template grid, in units of the square root of the area


@dataclass(frozen=True)
class DetectedThing:
    """One object seen. Centre (x, y) and radius in pixels; None where nothing fits."""

    colour: str | None
    shape: str | None
    size: str | None
    x: float
    y: float
    radius: float
    overlap: float


@dataclass(frozen=True)
class Verdict:
    """`hits[attribute]` is (right, asked): how many of what the caption says the picture shows."""

    described: Description
    things: tuple[DetectedThing, ...]
    tone: str | None
    kind: str | None
    hits: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        """Whether the image shows everything in the caption, and no other object."""
        return self.hits["everything"] == (1, 1)


def look(picture: NDArray[np.uint8]) -> tuple[tuple[DetectedThing, ...], str | None, str | None]:
    """Objects, largest first, then the background's tone and kind, of a (128, 128, 3) picture."""
    things = [thing for thing, _ in objects(picture)]
    if len(things) > MAX_OBJECTS:
        things = []
    rgb, chroma = _chroma(picture)
    return (tuple(things), *_background(rgb, chroma > MIN_CHROMA))


def objects(picture: NDArray[np.uint8]) -> list[tuple[DetectedThing, NDArray[np.bool_]]]:
    """Return each object, largest first, with the mask (128, 128) of its pixels."""
    rgb, chroma = _chroma(picture)
    recognised = [(_recognise(rgb, chroma, mask), mask) for mask in _components(rgb, chroma > MIN_CHROMA)]
    return sorted(
        ((thing, mask) for thing, mask in recognised if thing is not None), key=lambda pair: -pair[0].radius
    )


def without(picture: NDArray[np.uint8], mask: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """Paint the image's background over a mask and its edge."""
    rgb, chroma = _chroma(picture)
    tone, kind = _background(rgb, chroma > MIN_CHROMA)
    edge = ndimage.binary_dilation(mask, iterations=3)
    out = picture.copy()
    if tone is None or kind is None:
        out[edge] = np.median(picture[chroma <= MIN_CHROMA], axis=0)
    else:
        out[edge] = np.round(_background_levels()[TONES.index(tone), KINDS.index(kind)])[edge, None]
    return out


def _chroma(picture: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the picture as floats, and the greatest minus the least channel of each pixel."""
    if picture.shape != (SIDE, SIDE, 3) or picture.dtype != np.uint8:
        raise ValueError(
            f"expected a uint8 picture of shape {(SIDE, SIDE, 3)}, got {picture.dtype} {picture.shape}"
        )
    rgb = picture.astype(np.float32)
    return rgb, rgb.max(-1) - rgb.min(-1)


def _components(rgb: NDArray[np.float32], rough: NDArray[np.bool_]) -> Iterable[NDArray[np.bool_]]:
    """Connected regions of an object's size; two touching objects of different colours come apart."""
    names, number = ndimage.label(rough)
    if number > 200:  # a noisy picture: nothing in it is an object, and reading on would take seconds
        return
    areas = np.bincount(names.ravel(), minlength=number + 1)
    for index in range(1, number + 1):
        if areas[index] < MIN_AREA:
            continue
        mask = names == index
        core = ndimage.binary_erosion(mask, iterations=2)
        nearest = _nearest_colour(rgb[core])[0]
        shares = np.bincount(nearest, minlength=len(COLOURS)) / max(1, len(nearest))
        parts = np.flatnonzero(shares > 0.15)
        if len(parts) < 2:
            yield mask
            continue
        whose = np.full(mask.shape, -1)
        palette = _palette()[parts]
        whose[mask] = parts[((rgb[mask][:, None] - palette) ** 2).sum(-1).argmin(-1)]
        for part in parts:
            pieces, _ = ndimage.label(ndimage.binary_opening(whose == part))
            sizes = np.bincount(pieces.ravel())[1:]
            if len(sizes) and sizes.max() >= MIN_AREA:
                yield pieces == 1 + sizes.argmax()


@cache
def _palette() -> NDArray[np.float32]:
    return np.array(list(PALETTE.values()), dtype=np.float32)


def _nearest_colour(pixels: NDArray[np.float32]) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """Index and RGB distance of each pixel's nearest palette colour."""
    squared = ((pixels[:, None] - _palette()) ** 2).sum(-1)
    return squared.argmin(-1), np.sqrt(squared.min(-1))


def _recognise(
    rgb: NDArray[np.float32], chroma: NDArray[np.float32], mask: NDArray[np.bool_]
) -> DetectedThing | None:
    core = ndimage.binary_erosion(mask, iterations=2)
    if core.sum() < 20:
        return None
    # Backgrounds have no chroma, so chroma over the core's is the share of the pixel that the object covers.
    near = ndimage.binary_dilation(mask, iterations=2)
    full = float(np.median(chroma[core]))
    # JPEG keeps colour at half the resolution, so a little of it leaks over every edge: the edge is made steeper.
    cover = np.where(near, np.clip(_STEEPER * (chroma / full - 0.5) + 0.5, 0, 1), 0)
    area = float(cover.sum())
    if not MIN_AREA <= area <= MAX_AREA:
        return None
    index, error = _nearest_colour(np.median(rgb[core], axis=0)[None])
    colour = COLOURS[int(index[0])] if error[0] <= MAX_COLOUR_ERROR else None

    ys, xs = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    x, y = float((cover * xs).sum() / area), float((cover * ys).sum() / area)
    overlaps = _overlaps(cover, x, y, area)
    best = int(overlaps.argmax())
    shape = SHAPES[best] if overlaps[best] >= MIN_OVERLAP else None
    radius = float(np.sqrt(area / (AREAS[best] if shape else np.mean(AREAS))))
    size = None
    if 0.75 * RADII[0] <= radius <= 1.3 * RADII[1]:
        size = SIZES[int(radius > np.sqrt(RADII[0] * RADII[1]))]
    return DetectedThing(colour, shape, size, x, y, radius, float(overlaps[best]))


@cache
def _templates() -> NDArray[np.float32]:
    """(shapes, 48, 48) coverage of each shape at unit area, centroid in the middle."""
    fine = 8 * _GRID  # drawn finer, then averaged, as a pixel averages
    at = (torch.arange(fine) + 0.5) / fine * 2 * _REACH - _REACH
    out = []
    for distance, unit_area in zip(DISTANCES, AREAS, strict=True):
        r = torch.tensor(unit_area**-0.5)
        inside = (distance(at[None, :], at[:, None], r) < 0).float()
        y = float((inside * at[:, None]).sum() / inside.sum())
        inside = (distance(at[None, :], at[:, None] + y, r) < 0).float()
        out.append(inside.reshape(_GRID, 8, _GRID, 8).mean((1, 3)).numpy())
    return np.stack(out)


def _overlaps(cover: NDArray[np.float32], x: float, y: float, area: float) -> NDArray[np.float32]:
    """Soft intersection over union of one object with every template, at equal area and centroid."""
    at = ((np.arange(_GRID) + 0.5) / _GRID * 2 - 1) * _REACH * np.sqrt(area)
    rows, columns = np.meshgrid(at + y - 0.5, at + x - 0.5, indexing="ij")
    covered = ndimage.map_coordinates(cover, [rows, columns], order=1, mode="constant")
    templates = _templates()
    return np.minimum(templates, covered).sum((1, 2)) / np.maximum(templates, covered).sum((1, 2))


@cache
def _background_levels() -> NDArray[np.float32]:
    return backgrounds().numpy().astype(np.float32) * 255


def _background(rgb: NDArray[np.float32], rough: NDArray[np.bool_]) -> tuple[str | None, str | None]:
    clear = ~ndimage.binary_dilation(rough, iterations=3)
    if clear.mean() < 0.3:
        return None, None
    pixels = rgb[clear]
    levels = _background_levels()[:, :, clear]
    errors = np.abs(levels[..., None] - pixels).mean((-1, -2))
    tone, kind = np.unravel_index(errors.argmin(), errors.shape)
    if errors[tone, kind] > MAX_BACKGROUND_ERROR:
        return None, None
    return TONES[tone], KINDS[kind]


def verify(picture: NDArray[np.uint8], caption: str) -> Verdict:
    """Judge one (128, 128, 3) picture against its caption."""
    described = parse(caption)
    things, tone, kind = look(picture)
    return Verdict(described, things, tone, kind, _judge(described, things, tone, kind))


def _judge(
    described: Description, detected: tuple[DetectedThing, ...], tone: str | None, kind: str | None
) -> dict[str, tuple[int, int]]:
    hits = dict.fromkeys(ATTRIBUTES, (0, 0))

    def ask(attribute: str, right: bool) -> None:
        so_far, total = hits[attribute]
        hits[attribute] = so_far + bool(right), total + 1

    pairs = _assign(described.things, detected)
    for thing, detected_thing in pairs:
        for attribute in ("colour", "shape", "size"):
            expected = getattr(thing, attribute)
            if expected is not None:
                ask(attribute, detected_thing is not None and getattr(detected_thing, attribute) == expected)
    if described.position is not None:
        ask("position", pairs[0][1] is not None and _cell(pairs[0][1]) == described.position)
    if len(pairs) == 2:
        (first, a), (second, b) = pairs
        ask("binding", a is not None and b is not None and _matches(first, a) == 2 == _matches(second, b))
        if described.relation is not None:
            ask("relation", a is not None and b is not None and _relation(a, b) == described.relation)
    if described.things:
        ask("count", len(detected) == len(described.things))
    if described.tone is not None or described.kind is not None:
        # An empty picture has a background by default; it earns nothing for that.
        ask(
            "background",
            bool(detected)
            and described.tone in (None, tone)
            and tone is not None
            and described.kind in (None, kind),
        )
    ask("everything", all(right == total for right, total in hits.values()))
    return hits


def _matches(thing: Thing, candidate: DetectedThing) -> int:
    """How many of colour and shape agree; what the caption leaves open agrees with anything."""
    return (thing.colour in (None, candidate.colour)) + (thing.shape in (None, candidate.shape))


def _assign(
    things: Sequence[Thing], detected: Sequence[DetectedThing]
) -> list[tuple[Thing, DetectedThing | None]]:
    """Give each described thing an object of its own, as many colours and shapes agreeing as can be."""
    if not things:
        return []
    if len(things) == 1:
        best = max(detected, key=lambda candidate: _matches(things[0], candidate), default=None)
        return [(things[0], best)]
    seats: list[DetectedThing | None] = [*detected, None, None]
    best_score, best_pair = -1, (seats[0], seats[1])
    for i, a in enumerate(seats):
        for j, b in enumerate(seats):
            if i == j:
                continue
            score = sum(
                1 + 10 * _matches(thing, candidate)
                for thing, candidate in zip(things, (a, b), strict=True)
                if candidate is not None
            )
            if score > best_score:
                best_score, best_pair = score, (a, b)
    return list(zip(things, best_pair, strict=True))


def _cell(candidate: DetectedThing) -> str:
    column, row = (int(np.abs(np.array(CELLS) - value).argmin()) for value in (candidate.x, candidate.y))
    return POSITIONS[3 * row + column]


def _relation(a: DetectedThing, b: DetectedThing) -> str:
    """Where a lies, seen from b: along the axis on which they are further apart."""
    dx, dy = b.x - a.x, b.y - a.y
    if abs(dx) > abs(dy):
        return "left of" if dx > 0 else "right of"
    return "above" if dy > 0 else "below"


Tally = dict[str, tuple[int, int]]
"""Right and asked, of each attribute."""


def tally(pictures: Iterable[NDArray[np.uint8]], captions: Sequence[str]) -> Tally:
    """Hits of many pictures added up. "where" is positions and relations together: no caption asks for both."""
    totals = dict.fromkeys((*ATTRIBUTES, "where"), (0, 0))
    for picture, caption in zip(pictures, captions, strict=True):
        hits = verify(picture, caption).hits
        hits["where"] = _plus(hits["position"], hits["relation"])
        totals = {attribute: _plus(totals[attribute], hits[attribute]) for attribute in totals}
    return totals


def _plus(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    return a[0] + b[0], a[1] + b[1]


def accuracies(totals: Tally) -> dict[str, dict[str, float]]:
    """{attribute: {accuracy, right, asked}}; attributes that no caption asked for are left out."""
    return {
        attribute: {"accuracy": right / total, "right": right, "asked": total}
        for attribute, (right, total) in totals.items()
        if total
    }


def score(pictures: Iterable[NDArray[np.uint8]], captions: Sequence[str]) -> dict[str, dict[str, float]]:
    """Accuracy of many pictures against their captions, attribute by attribute."""
    return accuracies(tally(pictures, captions))
