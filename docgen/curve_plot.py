"""A plot of curves as a standalone SVG: speed-up across, fidelity up, the front marked.

It has its own background, since the page's is unknown where an image is shown, and follows the reader's light or dark
setting. One layout fits all widths: 480 units across with text of 15, which is 11 px on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _TOP, _HEIGHT = 480, 58, 14, 34, 380
_ROW = 24
_PER_ROW = 2
_SSIM_TICKS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
_SPEEDUP_TICKS = (1, 1.1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 15, 20)
_BEST = 0.9995
"""Higher SSIMs are drawn here: on this axis 1 is infinitely far up."""

# (light, dark), distinguishable for the colour-blind too, helped by the shapes.
_COLOURS = (
    ("#1b1c1e", "#e8e8e5"),
    ("#0072b2", "#56b4e9"),
    ("#c25700", "#ff9d4d"),
    ("#00795a", "#2fc79a"),
    ("#a3377e", "#e58cc4"),
    ("#7a6a00", "#e0cf4f"),
    ("#b3261e", "#f28b82"),
    ("#5b4bb5", "#a99cf5"),
    ("#5f6368", "#a0a5aa"),
)


@dataclass(frozen=True)
class Mark:
    """A recipe. `failed` leaves it hollow; `on_front` puts a ring around it. `title` is its tooltip."""

    speedup: float
    ssim: float
    title: str
    failed: bool
    on_front: bool


def draw(curves: Sequence[tuple[str, Sequence[Mark]]], x_name: str, label: str) -> str:
    """Return the SVG's text.

    Args:
        curves: names and their marks; each curve is joined by a line, by speed-up.
        x_name: the name of the horizontal axis.
        label: alternative text: the plot in a sentence.
    """
    marks = [mark for _, curve in curves for mark in curve]
    bottom = _TOP + _HEIGHT
    rows = math.ceil((len(curves) + 2) / _PER_ROW)
    height = bottom + 52 + rows * _ROW + 8
    across = _Scale.over([m.speedup for m in marks], math.log, _LEFT, _WIDTH - _RIGHT)
    up = _Scale.over([m.ssim for m in marks], _raised, bottom, _TOP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" '
        f'role="img" aria-label="{escape(label)}">',
        f"<style>{_style(len(curves))}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}" rx="6"/>',
    ]
    for tick in _labelled_ticks(_SSIM_TICKS, up):
        y = up.place(tick)
        lines.append(f'<path class="rule" d="M{_LEFT} {y}H{_WIDTH - _RIGHT}"/>')
        lines.append(f'<text class="tick" x="{_LEFT - 6}" y="{y + 5:g}" text-anchor="end">{tick:g}</text>')
    for tick in _labelled_ticks(_SPEEDUP_TICKS, across):
        x = across.place(tick)
        lines.append(f'<path class="axis" d="M{x} {bottom}v5"/>')
        lines.append(f'<text class="tick" x="{x}" y="{bottom + 20}" text-anchor="middle">{tick:g}x</text>')
    lines += [
        f'<path class="axis" d="M{_LEFT} {bottom}H{_WIDTH - _RIGHT}"/>',
        '<text class="name" x="8" y="20">SSIM to the baseline</text>',
        f'<text class="name" x="{_WIDTH - _RIGHT}" y="{bottom + 40}" text-anchor="end">{escape(x_name)}</text>',
    ]
    front = sorted((m for m in marks if m.on_front), key=lambda m: m.speedup)
    if len(front) > 1:
        lines.append(f'<polyline class="front" points="{_joined(front, across, up)}"/>')
    for number, (_, curve) in enumerate(curves):
        ordered = sorted(curve, key=lambda m: m.speedup)
        lines.append(f'<polyline class="c{number} line" points="{_joined(ordered, across, up)}"/>')
    for number, (name, curve) in enumerate(curves):
        for mark in curve:
            x, y = across.place(mark.speedup), up.place(mark.ssim)
            if mark.on_front:
                lines.append(f'<circle class="ring" cx="{x}" cy="{y}" r="9.5"/>')
            title = escape(f"{name}: {mark.title}")
            lines.append(f"{_shape(number, x, y, mark.failed, title)}")
    lines += _key([name for name, _ in curves], bottom + 52)
    return "\n".join([*lines, "</svg>"]) + "\n"


@dataclass(frozen=True)
class _Scale:
    """A map from values to coordinates, through a function that spreads them."""

    low: float
    high: float
    start: float
    end: float
    spread: str

    @classmethod
    def over(cls, values: Sequence[float], spread: object, start: float, end: float) -> _Scale:
        name = "log" if spread is math.log else "raised"
        positions = [_SPREAD[name](value) for value in values]
        pad = 0.06 * (max(positions) - min(positions)) or 0.1
        return cls(min(positions) - pad, max(positions) + pad, start, end, name)

    def place(self, value: float) -> float:
        share = (_SPREAD[self.spread](value) - self.low) / (self.high - self.low)
        return round(self.start + (self.end - self.start) * share, 1)

    def holds(self, value: float) -> bool:
        return self.low <= _SPREAD[self.spread](value) <= self.high


def _raised(ssim: float) -> float:
    """Return a logarithmic scale of what is lost: 0.9, 0.99 and 0.999 are equally far apart."""
    return -math.log10(1 - min(ssim, _BEST))


_SPREAD: dict[str, Callable[[float], float]] = {"log": math.log, "raised": _raised}


def _labelled_ticks(ticks: Sequence[float], scale: _Scale) -> list[float]:
    """Return the ticks in range, without those that would overlap a neighbour."""
    labels: list[float] = []
    for tick in ticks:
        apart = 36 if scale.spread == "log" else 18
        if scale.holds(tick) and (not labels or abs(scale.place(tick) - scale.place(labels[-1])) >= apart):
            labels.append(tick)
    return labels


def _joined(marks: Sequence[Mark], across: _Scale, up: _Scale) -> str:
    return " ".join(f"{across.place(m.speedup)},{up.place(m.ssim)}" for m in marks)


def _shape(number: int, x: float, y: float, hollow: bool, title: str) -> str:
    """Return one of eight outlines around (x, y)."""
    kind = number % 8
    if kind == 0:
        body = f'<circle cx="{x}" cy="{y}" r="5.2"'
    else:
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in _OUTLINES[kind])
        body = f'<polygon points="{points}"'
    return (
        f'{body} class="c{number} mark{" hollow" if hollow else ""}"><title>{title}</title>{_closing(kind)}'
    )


def _closing(kind: int) -> str:
    return "</circle>" if kind == 0 else "</polygon>"


def _star(points: int, inner: float) -> tuple[tuple[float, float], ...]:
    corners = []
    for k in range(2 * points):
        radius, angle = (6.8 if k % 2 == 0 else inner), math.pi * k / points - math.pi / 2
        corners.append((radius * math.cos(angle), radius * math.sin(angle)))
    return tuple(corners)


_OUTLINES: tuple[tuple[tuple[float, float], ...], ...] = (
    (),
    ((-4.8, -4.8), (4.8, -4.8), (4.8, 4.8), (-4.8, 4.8)),
    ((0, -6.4), (5.8, 4.4), (-5.8, 4.4)),
    ((0, -6.6), (6.6, 0), (0, 6.6), (-6.6, 0)),
    ((0, 6.4), (5.8, -4.4), (-5.8, -4.4)),
    _star(5, 3.0),
    _star(4, 2.6),
    ((-3.2, -5.6), (3.2, -5.6), (6.4, 0), (3.2, 5.6), (-3.2, 5.6), (-6.4, 0)),
)


def _key(names: Sequence[str], top: float) -> list[str]:
    """Return the legend, two entries to a row."""
    lines = []
    for number, name in enumerate([*names, "on the Pareto front", "hollow: fails the gate"]):
        x = 18 + (number % _PER_ROW) * _WIDTH / _PER_ROW
        y = top + _ROW * (number // _PER_ROW) + 10
        if number < len(names):
            lines.append(_shape(number, x, y, False, escape(name)))
        elif number == len(names):
            lines.append(f'<circle class="ring" cx="{x}" cy="{y}" r="8"/>')
        else:
            lines.append(f'<circle class="c0 mark hollow" cx="{x}" cy="{y}" r="5.2"/>')
        lines.append(f'<text class="name" x="{x + 16}" y="{y + 5}">{escape(name)}</text>')
    return lines


def _style(num: int) -> str:
    light = "".join(f".c{k}{{--c:{_COLOURS[k % len(_COLOURS)][0]}}}" for k in range(num))
    dark = "".join(f".c{k}{{--c:{_COLOURS[k % len(_COLOURS)][1]}}}" for k in range(num))
    return (
        "svg{--paper:#fdfdfc;--ink:#1b1c1e;--quiet:#5f6368;--rule:#e3e3de;--front:#c9dedb}"
        f"{light}"
        "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans',sans-serif;font-size:15px}"
        ".paper{fill:var(--paper)}.name{fill:var(--ink)}.tick{fill:var(--quiet);font-size:14px}"
        ".rule{stroke:var(--rule)}.axis{stroke:var(--quiet)}"
        ".front{fill:none;stroke:var(--front);stroke-width:9;stroke-linejoin:round;stroke-linecap:round}"
        ".ring{fill:none;stroke:var(--quiet);stroke-width:1.5}"
        ".line{fill:none;stroke:var(--c);stroke-width:1.5}"
        ".mark{fill:var(--c);stroke:var(--c);stroke-width:1.8}.hollow{fill:var(--paper)}"
        "@media (prefers-color-scheme:dark){"
        "svg{--paper:#131516;--ink:#e8e8e5;--quiet:#a0a5aa;--rule:#2b2f31;--front:#24504c}"
        f"{dark}}}"
    )
