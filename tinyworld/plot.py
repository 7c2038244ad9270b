"""The plot of docs/tinyworld.md as an SVG: a step cache on tiny-flux at rising thresholds, from the record."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

WIDTH, HEIGHT = 760, 300
LEFT, TOP, PANEL_WIDTH, PANEL_HEIGHT = 56, 44, 290, 190
GAP = 90


@dataclass(frozen=True)
class Panel:
    """One quantity over the thresholds. A value of None is off the scale: the very same pictures."""

    title: str
    unit: str
    values: Sequence[float | None]
    top: float
    colour: str
    none_says: str = ""


def cache_plot(record: dict[str, Any]) -> str:
    """Steps reused and fidelity, side by side, over the thresholds in even steps."""
    rows = record["cache"]
    thresholds = [f"{row['threshold']:g}" for row in rows]
    panels = (
        Panel("steps reused", "%", [100 * row["hit_rate"] for row in rows], 100, "#0b5fa5"),
        Panel("PSNR to no cache", "dB", [row["psnr_db"] for row in rows], 80, "#a5360b", "the same pictures"),
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" role="img" aria-label="First-block cache of tiny-flux: as the threshold rises, more steps '
        f'are reused and the pictures get less faithful">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, thresholds, LEFT + number * (PANEL_WIDTH + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel, thresholds: Sequence[str], left: int) -> list[str]:
    bottom = TOP + PANEL_HEIGHT
    step = PANEL_WIDTH / (len(thresholds) - 1)

    def at(index: int, value: float) -> tuple[float, float]:
        return round(left + index * step, 1), round(bottom - PANEL_HEIGHT * value / panel.top, 1)

    parts = [f'<text x="{left}" y="{TOP - 18}" font-weight="bold">{panel.title} ({panel.unit})</text>']
    for tick in range(5):
        value = panel.top * tick / 4
        y = at(0, value)[1]
        parts.append(f'<path d="M{left} {y}H{left + PANEL_WIDTH}" stroke="#dddddd"/>')
        parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end" fill="#555555">{value:g}</text>')
    points = [at(index, value) for index, value in enumerate(panel.values) if value is not None]
    line = " ".join(f"{x},{y}" for x, y in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{panel.colour}" stroke-width="2"/>')
    parts += [f'<circle cx="{x}" cy="{y}" r="3.5" fill="{panel.colour}"/>' for x, y in points]
    for index, (threshold, value) in enumerate(zip(thresholds, panel.values, strict=True)):
        x = at(index, 0)[0]
        parts.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{threshold}</text>')
        if value is None:
            parts.append(f'<text x="{x + 6}" y="{TOP + 14}" fill="{panel.colour}">{panel.none_says}</text>')
    middle = left + PANEL_WIDTH / 2
    parts.append(f'<text x="{middle}" y="{bottom + 42}" text-anchor="middle" fill="#555555">threshold</text>')
    return parts
