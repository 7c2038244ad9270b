"""Patterns that B's images have at fixed places and A's do not: seams, the grid of JPEG, checkerboards, few levels.

A decoder that works in tiles leaves seams, an encoder of 8 by 8 pixels a grid, a wrong upsampling a checkerboard. They
are at the same place in every image, so they show in the mean over images.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from vivace.measure.image_metrics import Pixels, luminance
from vivace.proofs.image_findings import ImageFinding, RequestOf, is_lossy
from vivace.proofs.pair_figures import PairFigures
from vivace.proofs.same import Nearness, OwnDistances, nearness
from vivace.report.value_text import count

_LEAST_PAIRS = 10
"""With fewer, nearly all may have a step at the same place by chance."""
_NEARLY_ALL = 0.9
_STRONG = 0.15
"""What a seam adds at least, of the mean step between neighbours."""
_STRONG_GRID = 0.03  # the mean of many edges
_LEAST_EDGES = 4
_AROUND = 7  # columns
_MOST_PLACES = 6  # that are listed
_GRID = 8
_CHECKER_LEVELS = 1.0
_SPARSE = 0.6
"""Share of the levels between the darkest and the brightest below which an image is banded."""
_DENSE = 0.8
_CELLS = 8  # a side
_PLACE_SHARE = 0.8
_PLACE_CELLS = 4


def patterns(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return the patterns that most of B's images have and A's have not: few levels, a checkerboard, a watermark."""
    chosen = _comparable(pairs, own)
    if not chosen:
        return []
    return _findings(
        chosen, own, [*_checkers(_lights(chosen)), *_levels(chosen)] or [*_places(chosen, own)], request_of
    )


def seams(pairs: Sequence[PairFigures], own: OwnDistances, request_of: RequestOf) -> list[ImageFinding]:
    """Return the lines along which B's images have steps that A's have not, which images that are moved have too."""
    chosen = [pair for pair in _comparable(pairs, own) if not is_lossy(pair.b)]
    return _findings(chosen, own, [*_seams(_lights(chosen))], request_of) if chosen else []


def _comparable(pairs: Sequence[PairFigures], own: OwnDistances) -> list[PairFigures]:
    """Return the pairs of the commonest size; none if they are few, or none of them differs."""
    sound = [pair for pair in pairs if pair.is_complete and not (pair.a.faults or pair.b.faults)]
    sizes = [pair.a.size for pair in sound]
    size = max(set(sizes), key=sizes.count, default=None)
    chosen = [pair for pair in sound if pair.a.size == pair.b.size == size]
    return chosen if len(chosen) >= _LEAST_PAIRS and any(_differs(pair, own) for pair in chosen) else []


def _lights(pairs: Sequence[PairFigures]) -> list[tuple[Pixels, Pixels]]:
    return [(luminance(pair.a.pixels), luminance(pair.b.pixels)) for pair in pairs]


def _findings(
    pairs: Sequence[PairFigures], own: OwnDistances, texts: Sequence[str], request_of: RequestOf
) -> list[ImageFinding]:
    pair = next(pair for pair in pairs if _differs(pair, own))
    summary = f"in {count(len(pairs), 'image')} of B"
    return [ImageFinding(f"pattern: {text}, {summary}", pair.label, request_of(pair)) for text in texts]


def _differs(pair: PairFigures, own: OwnDistances) -> bool:
    return bool(pair.against) and nearness(pair.against, own) is not Nearness.ITSELF


def _seams(lights: Sequence[tuple[Pixels, Pixels]]) -> Iterator[str]:
    columns = _added_steps(lights)
    rows = _added_steps([(a.T, b.T) for a, b in lights])
    if _is_grid(columns) and _is_grid(rows):
        yield f"a grid of {_GRID} pixels, as of JPEG"
        return
    parts = []
    for name, added in (("column", columns), ("row", rows)):
        places = [int(k) + 1 for k in np.flatnonzero(_is_in_most(added, _STRONG))]
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


def _places(pairs: Sequence[PairFigures], own: OwnDistances) -> Iterator[str]:
    """Yield the place at which all images differ, and only there."""
    same = [pair for pair in pairs if pair.against["match"] >= 0.5 and _differs(pair, own)]
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
