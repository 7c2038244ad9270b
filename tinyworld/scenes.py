"""Scenes: random labels, and their images rendered from anti-aliased signed-distance fields.

Everything is batched torch, so the same code renders sixteen images on a laptop and a few thousand per second on a GPU,
also inside a CUDA graph (nothing synchronises with the device). Lengths are in pixels, x to the right, y down.
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache

import torch
from torch import Tensor

from tinyworld.words import (
    COLOURS,
    GRADIENT,
    KINDS,
    OPPOSITE,
    PALETTE,
    POSITIONS,
    RADII,
    RELATIONS,
    SHAPES,
    SIDE,
    SIZES,
    TONES,
    TWO_TONES,
)  # fmt: skip

CELLS = (28.0, 64.0, 100.0)
"""Centres of the three columns, and of the three rows, that a lone object's position names."""
JITTER = 4.0
MARGIN = 2.0
GAP = 6.0
"""Least clear space between two objects."""
PERIOD = 32
"""Period of stripes and checks: each tone covers two latent cells, in phase with them, which is easy for the VAE."""

# Half-extent of each shape in units of its radius (the larger of x and y), and area in units of radius squared.
_TRIANGLE_HALF_BASE, _TRIANGLE_HALF_HEIGHT = 1.125, 0.975
_SQUARE, _DIAMOND, _STAR, _NOTCH, _CROSS, _ARM = 0.89, 1.2, 1.25, 0.62, 1.1, 0.42
EXTENTS = (1.0, _SQUARE, _TRIANGLE_HALF_BASE, _DIAMOND, _STAR, _CROSS)
AREAS = (
    math.pi,
    4 * _SQUARE**2,
    2 * _TRIANGLE_HALF_BASE * _TRIANGLE_HALF_HEIGHT,
    2 * _DIAMOND**2,
    5 * _STAR * _NOTCH * math.sin(math.pi / 5),
    8 * _ARM * _CROSS - 4 * _ARM**2,
)


@dataclass(frozen=True)
class Labels:
    """Exact labels of N scenes; integers index the tables in `words`. Slot 1 of a lone object's row is meaningless."""

    count: Tensor  # (N,) 1 or 2 objects
    colour: Tensor  # (N, 2)
    shape: Tensor  # (N, 2)
    size: Tensor  # (N, 2)
    layout: Tensor  # (N,) a position if count is 1, the relation of object 0 to object 1 if it is 2
    tone: Tensor  # (N,)
    kind: Tensor  # (N,)
    centre: Tensor  # (N, 2, 2) x and y
    radius: Tensor  # (N, 2)

    def __len__(self) -> int:
        return len(self.count)

    def __getitem__(self, index: Tensor | slice) -> "Labels":
        return Labels(*(getattr(self, field.name)[index] for field in fields(self)))

    def to(self, device: torch.device | str) -> "Labels":
        return Labels(*(getattr(self, field.name).to(device) for field in fields(self)))


def held_out_key(*words: str) -> bool:
    """Whether this combination of words is one of the tenth that training never sees (a hash, so no list to keep)."""
    return hashlib.blake2b(" ".join(words).encode(), digest_size=4).digest()[0] % 10 == 0


@cache
def held_out_tables() -> tuple[Tensor, Tensor]:
    """Two boolean tables: alone[colour, shape, size, position] and pair[colour, shape, colour, shape, relation].

    "A above B" and "B below A" are one scene, so the pair's hash is taken of the form with "left of" or "above".
    """
    alone = torch.tensor(
        [held_out_key(*key) for key in itertools.product(COLOURS, SHAPES, SIZES, POSITIONS)]
    ).reshape(len(COLOURS), len(SHAPES), len(SIZES), len(POSITIONS))
    pair = torch.zeros(len(COLOURS), len(SHAPES), len(COLOURS), len(SHAPES), len(RELATIONS), dtype=torch.bool)
    things = list(itertools.product(range(len(COLOURS)), range(len(SHAPES))))
    for (c0, s0), (c1, s1), relation in itertools.product(things, things, (0, 2)):
        if held_out_key(COLOURS[c0], SHAPES[s0], RELATIONS[relation], COLOURS[c1], SHAPES[s1]):
            pair[c0, s0, c1, s1, relation] = True
            pair[c1, s1, c0, s0, OPPOSITE[relation]] = True
    return alone, pair


def held_out(labels: Labels) -> Tensor:
    """(N,) bool: the scenes whose combination of attributes is held out from training."""
    alone, pair = held_out_tables()
    c, s, z = labels.colour, labels.shape, labels.size
    lone = alone[c[:, 0], s[:, 0], z[:, 0], labels.layout]
    two = pair[c[:, 0], s[:, 0], c[:, 1], s[:, 1], labels.layout % len(RELATIONS)]
    return torch.where(labels.count == 1, lone, two)


def sample(number: int, seed: int, split: str = "train") -> Labels:
    """`number` random labels on the CPU: split "train" leaves out every held-out combination, "held_out" has no other.

    Six scenes in ten hold two objects, never two of the same colour and shape.
    """
    is_held_out = {"train": False, "held_out": True}[split]
    generator = torch.Generator().manual_seed(seed)
    parts: list[Labels] = []
    missing = number
    while missing > 0:
        # A tenth is held out, so one more round is rare for "train" and the rule for "held_out".
        labels = _sample_any(max(64, missing * (14 if is_held_out else 2)), generator)
        same = (labels.colour[:, 0] == labels.colour[:, 1]) & (labels.shape[:, 0] == labels.shape[:, 1])
        keep = (held_out(labels) == is_held_out) & ~(same & (labels.count == 2))
        parts.append(labels[keep.nonzero()[:missing, 0]])
        missing -= len(parts[-1])
    return Labels(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(Labels)))


def _sample_any(n: int, generator: torch.Generator) -> Labels:
    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(shape, generator=generator)

    two = torch.rand(n, generator=generator) < 0.6
    shape, size = integers(len(SHAPES), n, 2), integers(len(SIZES), n, 2)
    position, relation = integers(len(POSITIONS), n), integers(len(RELATIONS), n)
    radius = torch.tensor(RADII)[size] * uniform(0.96, 1.04, n, 2)

    extent = torch.tensor(EXTENTS)[shape] * radius
    limit = MARGIN + extent  # of a centre, from either side
    cells = torch.tensor(CELLS)
    alone = torch.stack([cells[position % 3], cells[position // 3]], dim=-1) + uniform(-JITTER, JITTER, n, 2)
    alone = torch.minimum(torch.maximum(alone, limit[:, :1]), SIDE - limit[:, :1])

    # Along the relation's axis the first object's box, a gap and the second's box share the side; what is left of it
    # (at most 40 px, so that two small objects do not drift to opposite edges) is spread by two sorted uniforms.
    room = SIDE - 2 * MARGIN - GAP - 2 * extent.sum(1)
    slack = room.clamp(max=40.0)
    low, high = uniform(0, 1, n, 2).sort(dim=1).values.unbind(1)
    edge = MARGIN + (room - slack) / 2
    near_first = relation % 2 == 0  # "left of", "above": object 0 comes first along the axis
    first = torch.where(near_first, extent[:, 0], extent[:, 1])
    last = torch.where(near_first, extent[:, 1], extent[:, 0])
    along_first = edge + first + slack * low
    along_last = SIDE - edge - last - slack * (1 - high)
    along = torch.stack(
        [torch.where(near_first, along_first, along_last), torch.where(near_first, along_last, along_first)],
        dim=1,
    )
    across = 64 + uniform(-14, 14, n, 1) + uniform(-5, 5, n, 2)
    across = torch.minimum(torch.maximum(across, limit), SIDE - limit)
    sideways = (relation < 2)[:, None]
    pair = torch.stack([torch.where(sideways, along, across), torch.where(sideways, across, along)], dim=-1)

    return Labels(
        count=1 + two.long(),
        colour=integers(len(COLOURS), n, 2),
        shape=shape,
        size=size,
        layout=torch.where(two, relation, position),
        tone=integers(len(TONES), n),
        kind=integers(len(KINDS), n),
        centre=torch.where(two[:, None, None], pair, alone[:, None, :].expand(n, 2, 2)),
        radius=radius,
    )


def _box(x: Tensor, y: Tensor, half_x: Tensor, half_y: Tensor) -> Tensor:
    dx, dy = x - half_x, y - half_y
    return torch.hypot(dx.clamp(min=0), dy.clamp(min=0)) + torch.maximum(dx, dy).clamp(max=0)


def _circle(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return torch.hypot(x, y) - r


def _square(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return _box(x.abs(), y.abs(), _SQUARE * r, _SQUARE * r)


def _triangle(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    base, height = _TRIANGLE_HALF_BASE, 2 * _TRIANGLE_HALF_HEIGHT
    slope = (x.abs() * height - (y + height / 2 * r) * base) / math.hypot(base, height)
    return torch.maximum(slope, y - height / 2 * r)


def _diamond(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    return (x.abs() + y.abs() - _DIAMOND * r) / math.sqrt(2)


def _star(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    # Fold the plane into half of one of the five rays; one straight edge, from tip to notch, is left.
    tenth = math.pi / 5
    angle = torch.atan2(x, -y)
    angle = (torch.remainder(angle + tenth, 2 * tenth) - tenth).abs()
    rho = torch.hypot(x, y)
    normal_x, normal_y = _NOTCH * math.sin(tenth), _STAR - _NOTCH * math.cos(tenth)
    along = (rho * angle.cos() - _STAR * r) * normal_x + rho * angle.sin() * normal_y
    return along / math.hypot(normal_x, normal_y)


def _cross(x: Tensor, y: Tensor, r: Tensor) -> Tensor:
    x, y = x.abs(), y.abs()
    return torch.minimum(_box(x, y, _CROSS * r, _ARM * r), _box(x, y, _ARM * r, _CROSS * r))


DISTANCES: tuple[Callable[[Tensor, Tensor, Tensor], Tensor], ...] = (
    _circle, _square, _triangle, _diamond, _star, _cross,
)  # fmt: skip
"""Signed distance to each of SHAPES (negative inside) at offsets x, y from the centre, for radius r."""


def backgrounds(device: torch.device | str = "cpu") -> Tensor:
    """(tones, kinds, 128, 128) grey levels in 0..1: all there are, since phase and contrast are fixed."""
    at = torch.arange(SIDE, device=device)
    stripe = (at // (PERIOD // 2)) % 2
    flat = torch.zeros(SIDE, SIDE, device=device)
    mixes = [
        flat,
        flat + (at / (SIDE - 1))[:, None],
        flat + stripe[None, :],
        flat + (stripe[None, :] ^ stripe[:, None]),
    ]
    rows = []
    for two, ends in zip(TWO_TONES, GRADIENT, strict=True):
        pairs = [two, ends, two, two]
        rows.append(torch.stack([a + (b - a) * mix for (a, b), mix in zip(pairs, mixes, strict=True)]))
    return torch.stack(rows) / 255


def paints(device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """The palette (8, 3) and the backgrounds on a device: made before a CUDA graph is captured, not in it."""
    return torch.tensor(list(PALETTE.values()), device=device) / 255, backgrounds(device)


def draw(labels: Labels, paint: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """Pictures (N, 3, 128, 128) in 0..1 and the signed distance to the nearest object (N, 128, 128) in pixels."""
    device = labels.count.device
    palette, ground = paint or paints(device)
    at = torch.arange(SIDE, device=device, dtype=torch.float32) + 0.5
    picture = ground[labels.tone, labels.kind][:, None].expand(-1, 3, -1, -1)
    nearest = torch.full((len(labels), SIDE, SIDE), float(SIDE), device=device)
    for slot in range(2):
        x = at[None, None, :] - labels.centre[:, slot, 0, None, None]
        y = at[None, :, None] - labels.centre[:, slot, 1, None, None]
        r, shape = labels.radius[:, slot, None, None], labels.shape[:, slot, None, None]
        distance = DISTANCES[0](x, y, r)
        for index in range(1, len(SHAPES)):
            distance = torch.where(shape == index, DISTANCES[index](x, y, r), distance)
        distance = torch.where((labels.count > slot)[:, None, None], distance, float(SIDE))
        cover = (0.5 - distance).clamp(0, 1)[:, None]
        picture = picture + cover * (palette[labels.colour[:, slot]][:, :, None, None] - picture)
        nearest = torch.minimum(nearest, distance)
    return picture, nearest


def to_uint8(pictures: Tensor) -> Tensor:
    """(N, 3, H, W) in 0..1 to (N, H, W, 3) bytes, rounded as diffusers rounds."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous()
