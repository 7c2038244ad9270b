"""Patterns that B's images have at fixed places and A's do not: seams, the grid of JPEG, checkerboards, few levels.

A decoder that works in tiles leaves seams, an encoder of 8 by 8 pixels a grid, a wrong upsampling a checkerboard. They
are at the same place in every image, so they show in the mean over images.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vivace.measure.image_metrics import Pixels, luminance
from vivace.proofs.image_findings import ImageFinding, RequestOf, is_lossy
from vivace.proofs.pair_figures import PairFigures, ReadImage
from vivace.proofs.same import Nearness, OwnDistances, nearness
from vivace.report.value_text import count

_MOST_PAIRS = 40  # that are in memory at once
_LEAST_PAIRS = 10
"""With fewer, nearly all may have a step at the same place by chance."""
_NEARLY_ALL = 0.9
_STRONG = 0.15
"""What a seam adds at least, of the mean step between neighbours."""
_STRONG_OF_OTHERS = 0.5  # where the images show something else than A's, whose edges may lie there by chance
_STRONG_GRID = 0.03  # the mean of many edges
_LEAST_EDGES = 4
_AROUND = 7  # columns
_MOST_PLACES = 6  # that are listed
_GRID = 8
_CHECKER_LEVELS = 1.0
_SPARSE = 0.6
"""Share of the levels between the darkest and the brightest below which an image is banded."""
_DENSE = 0.8
_SAME_SCENE = 0.5
"""Match from which an image shows what A's does."""
_FIXED_SHARE, _FIXED_LEVELS = 0.5, 0.25
"""Share of the squared difference that all images have in common, at least, and its size."""
_OF_LINES = 0.8
"""Share of it that is the same along a line, and of the steps across, that one line has."""
_MOST_COLOURS = 256
_CELLS = 8  # a side
_PLACE_SHARE = 0.8
_PLACE_CELLS = 4


def patterns(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return the patterns that most of B's images have and A's have not: few levels, a checkerboard, a watermark."""
    chosen = _comparable(pairs)
    if not chosen:
        return []
    return _findings(
        chosen,
        [*_checkers(_lights(chosen)), *_levels(chosen)] or [*_colours(chosen)] or [*_places(chosen)],
        request_of,
    )


def fixed(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether the same is added to all images of B: noise that is always there, a shade towards the edges."""
    chosen = [pair for pair in _comparable(pairs) if pair.against.get("match", 0) >= _SAME_SCENE]
    if len(chosen) < _LEAST_PAIRS:
        return []
    chosen = chosen[:: -(-len(chosen) // _MOST_PAIRS)]
    residuals = np.array([luminance(pair.b.pixels) - luminance(pair.a.pixels) for pair in chosen])
    residuals -= residuals.mean(axis=(1, 2), keepdims=True)
    halves = [residuals[k::2].mean(axis=0) for k in (0, 1)]
    shared = float((halves[0] * halves[1]).mean())
    if shared < max(_FIXED_SHARE * float((residuals**2).mean()), _FIXED_LEVELS**2):
        return []
    lines = [*_lines(residuals.mean(axis=0))]
    text = f"the same is added to every image, {np.sqrt(shared):.1f} levels strong"
    return _findings(chosen, lines or [text], request_of)


def _lines(added: Pixels) -> Iterator[str]:
    """Yield the line at which what is added to all images changes, if it does so at one line alone."""
    for axis, name in ((0, "column"), (1, "row")):
        profile = added.mean(axis=axis)
        if profile.var() < _OF_LINES * added.var():
            continue
        steps = np.abs(np.diff(profile))
        if steps.max() > _OF_LINES * steps.sum():
            yield f"seams at {name} {int(steps.argmax()) + 1}"


def seams(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return the lines along which B's images have steps that A's have not, which images that are moved have too."""
    chosen = [pair for pair in _comparable(pairs) if not is_lossy(pair.b)]
    if not any(_differs(pair, own) for pair in chosen):
        return []
    return _findings(chosen, [*_seams(_lights(chosen), _is_same_scene(chosen))], request_of)


def _comparable(pairs: Sequence[PairFigures]) -> list[PairFigures]:
    """Return the pairs of the commonest size; none if they are few, or all are equal."""
    sound = [pair for pair in pairs if pair.is_complete and not (pair.a.faults or pair.b.faults)]
    sizes = [pair.a.size for pair in sound]
    size = max(set(sizes), key=sizes.count, default=None)
    chosen = [pair for pair in sound if pair.a.size == pair.b.size == size]
    return chosen if len(chosen) >= _LEAST_PAIRS and any(_is_off(pair) for pair in chosen) else []


def _is_off(pair: PairFigures) -> bool:
    return not math.isinf(pair.against.get("psnr_db", 0.0))


def _is_same_scene(pairs: Sequence[PairFigures]) -> bool:
    """Return whether most of the images show what A's do."""
    near = sum(pair.against.get("match", 0.0) >= _SAME_SCENE for pair in pairs)
    return near > len(pairs) // 2


def _lights(pairs: Sequence[PairFigures]) -> list[tuple[Pixels, Pixels]]:
    return [(luminance(pair.a.pixels), luminance(pair.b.pixels)) for pair in pairs]


def _findings(
    pairs: Sequence[PairFigures], texts: Sequence[str], request_of: RequestOf
) -> list[ImageFinding]:
    pair = max(pairs, key=lambda pair: bool(pair.against) and -pair.against["psnr_db"])
    summary = f"in {count(len(pairs), 'image')} of B"
    return [ImageFinding(f"pattern: {text}, {summary}", pair.label, request_of(pair)) for text in texts]


def _differs(pair: PairFigures, own: OwnDistances) -> bool:
    return bool(pair.against) and nearness(pair.against, own) is not Nearness.ITSELF


def _seams(lights: Sequence[tuple[Pixels, Pixels]], is_same_scene: bool = True) -> Iterator[str]:
    strong = _STRONG if is_same_scene else _STRONG_OF_OTHERS
    columns = _added_steps(lights)
    rows = _added_steps([(a.T, b.T) for a, b in lights])
    if _is_grid(columns) and _is_grid(rows):
        yield f"a grid of {_GRID} pixels, as of JPEG"
        return
    parts = []
    for name, added in (("column", columns), ("row", rows)):
        places = [int(k) + 1 for k in np.flatnonzero(_is_in_most(added, strong))]
        listed = ", ".join(map(str, places[:_MOST_PLACES])) + (", …" if len(places) > _MOST_PLACES else "")
        if places:
            parts.append(f"{name}{'s' if len(places) > 1 else ''} {listed}")
    if parts:
        yield f"seams at {' and '.join(parts)}"


def _added_steps(lights: Sequence[tuple[Pixels, Pixels]]) -> Pixels:
    """Return how much larger B's steps between columns are than A's, beside the columns around (images, columns - 1).

    They are in A's mean steps.
    """
    added = []
    for a, b in lights:
        steps = [np.abs(np.diff(light, axis=1)).mean(axis=0) for light in (a, b)]
        added.append((steps[1] - steps[0]) / max(1.0, float(steps[0].mean())))
    array = np.array(added)
    padded = np.pad(array, ((0, 0), (_AROUND // 2, _AROUND // 2)), mode="reflect")
    around = np.lib.stride_tricks.sliding_window_view(padded, _AROUND, axis=1)
    return np.asarray(array - np.median(around, axis=-1))


def _is_in_most(added: Pixels, strong: float) -> NDArray[np.bool_]:
    """Return for each column whether nearly all images have larger values there.

    The contents of images differ too much for a mean.
    """
    return np.asarray((np.median(added, axis=0) > strong) & ((added > 0).mean(axis=0) >= _NEARLY_ALL))


def _is_grid(added: Pixels) -> bool:
    """Return whether every eighth column has a larger step than its neighbours, and than those in the middle."""
    phase = np.arange(1, added.shape[1] + 1) % _GRID
    if (phase == 0).sum() < _LEAST_EDGES:
        return False
    edges, middles, others = (
        np.median(added[:, which], axis=1)
        for which in (phase == 0, phase == _GRID // 2, phase % (_GRID // 2) != 0)
    )
    return bool(_is_in_most((edges - np.maximum(middles, others))[:, None], _STRONG_GRID)[0])


def _checkers(lights: Sequence[tuple[Pixels, Pixels]]) -> Iterator[str]:
    height, width = lights[0][0].shape
    y, x = np.indices((height, width))
    for sign, words in (
        ((-1.0) ** (y + x), "a checkerboard of single pixels"),
        ((-1.0) ** x, "stripes of single columns"),
        ((-1.0) ** y, "stripes of single rows"),
    ):
        a, b = (
            np.array([float((light * sign).mean()) for light in part]) for part in zip(*lights, strict=True)
        )
        if abs(np.median(b)) > max(_CHECKER_LEVELS, 5 * np.abs(a).max()):
            yield f"{words}, {abs(np.median(b)):.1f} levels strong"


def _levels(pairs: Sequence[PairFigures]) -> Iterator[str]:
    """Yield that the images have fewer levels than 8 bits have."""
    counts = [np.zeros(256, dtype=np.int64) for _ in range(2)]
    for pair in pairs:
        for number, image in zip(counts, (pair.a, pair.b), strict=True):
            number += np.bincount(image.pixels.astype(np.int64).ravel(), minlength=256)
    a, b = (np.flatnonzero(number) for number in counts)
    share_a, share_b = (len(used) / (used[-1] - used[0] + 1) for used in (a, b))
    if share_a >= _DENSE and share_b < _SPARSE:
        yield f"{len(b)} levels of each colour where A has {len(a)}"


def _colours(pairs: Sequence[PairFigures]) -> Iterator[str]:
    """Yield that each image has few colours, as of a palette."""
    if _num_colours(pairs[0].b) > _MOST_COLOURS:
        return
    a, b = (
        [_num_colours(image) for image in images] for images in zip(*((p.a, p.b) for p in pairs), strict=True)
    )
    if max(b) <= _MOST_COLOURS < min(a) and np.median(a) > 2 * _MOST_COLOURS:
        yield f"at most {max(b)} colours in an image where A has {min(a)} at least"


def _num_colours(image: ReadImage) -> int:
    codes = image.pixels.astype(np.int64) @ np.array((1 << 16, 1 << 8, 1))
    return len(np.unique(codes))


def _places(pairs: Sequence[PairFigures]) -> Iterator[str]:
    """Yield the place at which all images differ, and only there."""
    same = [pair for pair in pairs if pair.against.get("match", 0.0) >= _SAME_SCENE and _is_off(pair)]
    if len(same) < max(_LEAST_PAIRS, len(pairs) // 2):
        return
    total = np.zeros((_CELLS, _CELLS))
    for pair in same:
        error = ((pair.a.pixels - pair.b.pixels) ** 2).mean(axis=-1)
        cells = np.array(
            [
                [part.mean() for part in np.array_split(band, _CELLS, axis=1)]
                for band in np.array_split(error, _CELLS)
            ]
        )
        total += cells / max(float(cells.sum()), 1e-9)
    most = np.sort((total / len(same)).ravel())[-_PLACE_CELLS:]
    if most.sum() < _PLACE_SHARE:
        return
    y, x = np.unravel_index(int(total.argmax()), total.shape)
    yield f"the difference is at one place, {_place_in_words(int(y), int(x))}, as of a watermark"


def _place_in_words(y: int, x: int) -> str:
    down = ("top", "middle", "bottom")[min(2, 3 * y // _CELLS)]
    across = ("left", "centre", "right")[min(2, 3 * x // _CELLS)]
    return f"{down} {across}"
