"""The rows of the page's tables: results with their verdict on quality, and all figures of the images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vivace.foundation.stats import Gate, Interval, Verdict
from vivace.report.fidelity import Fidelity
from vivace.report.quality_gate import broken_images
from vivace.report.rows import Row

_VERDICTS = (Verdict.FASTER, Verdict.SAME, Verdict.UNCLEAR, Verdict.SLOWER)
_GATES = (Gate.PASSED, Gate.UNCLEAR, Gate.FAILED)


@dataclass(frozen=True)
class TextLine:
    """One row of the table.

    `quality` is the gate's verdict with short evidence; `quality_reason` is the full reason unless it passed.
    `warnings` and `quality_reason` leave out what several rows share, which is printed once below the table.
    """

    number: int
    row: Row
    quality: tuple[str, str] | None
    quality_reason: str | None
    warnings: tuple[str, ...]

    @property
    def verdict_rank(self) -> int:
        """Return the place of a verdict in the sorted table: the faster the earlier, failed quality last."""
        if self.row.failed_quality or self.row.verdict is None:
            return len(_VERDICTS) + self.row.failed_quality
        return _VERDICTS.index(self.row.verdict)

    @property
    def quality_rank(self) -> int:
        """Return the place of the quality in the sorted table: passed, unclear, failed."""
        return 0 if self.quality is None else [gate.value for gate in _GATES].index(self.quality[0])


@dataclass(frozen=True)
class RowFigures:
    """All figures of the quality pass: column headings, and the cells of each recipe."""

    headings: tuple[str, ...]
    rows: tuple[tuple[TextLine, tuple[str, ...]], ...]


def line_of(
    number: int, row: Row, baseline: Row, warnings: Sequence[str], shared_reasons: Mapping[str, Sequence[int]]
) -> TextLine:
    judgement = row.judgement if row.latency is not None else None
    reason = None if judgement is None or judgement.gate is Gate.PASSED else judgement.reason
    return TextLine(
        number,
        row,
        quality=None if judgement is None else (judgement.gate.value, _evidence(row, baseline)),
        quality_reason=None if reason in shared_reasons and not row.failed_quality else reason,
        warnings=tuple(w for w in row.warnings if w not in warnings),
    )


def shared_quality_reasons(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the reasons for unclear quality that several rows share, with the numbers of those rows."""
    numbers: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
            numbers.setdefault(row.judgement.reason, []).append(number)
    return {reason: numbers for reason, numbers in numbers.items() if len(numbers) > 1}


def _evidence(row: Row, baseline: Row) -> str:
    """Return short evidence for the verdict on quality: "match 0.994", "CLIP kept 97 % [95, 99]"."""
    fidelity, limits = row.fidelity, row.limits
    if broken_images(row.record, baseline.record) is not None:
        return "broken images"
    if fidelity is None:
        return ""
    if fidelity.num_identical == fidelity.num_pictures:
        return "identical"
    parts = []
    if limits.clip is not None:
        parts.append(
            "no CLIP score" if fidelity.clip_kept is None else f"CLIP kept {_percent(fidelity.clip_kept)}"
        )
    if fidelity.witness is not None and limits.witness is not None:
        parts.append(f"second witness {_percent(fidelity.witness.mean)}")
    if row.record.trial.recipe.same_picture:
        if fidelity.match is not None and limits.match is not None:
            parts.append(f"match {fidelity.match.mean.point:.3f}")
        if fidelity.ssim is not None and limits.ssim is not None:
            parts.append(f"SSIM {fidelity.ssim.point:.3f}")
        if fidelity.psnr_db is not None and limits.psnr_db is not None:
            parts.append(f"PSNR {fidelity.psnr_db.point:.1f} dB")
    return ", ".join(parts)


def figures_of(lines: Sequence[TextLine]) -> RowFigures | None:
    """Return the table of figures, without columns that are empty for all recipes; None without a quality pass."""
    fidelity = [(line, line.row.fidelity) for line in lines if line.row.fidelity is not None]
    cells = [(line, _figure_cells(fidelity, line.row.is_baseline)) for line, fidelity in fidelity]
    headings = [h for h in (cells[0][1] if cells else ()) if any(c[h] != "–" for _, c in cells)]
    if not headings:
        return None
    return RowFigures(
        tuple(headings), tuple((line, tuple(figures[h] for h in headings)) for line, figures in cells)
    )


def _figure_cells(fidelity: Fidelity, is_baseline: bool) -> dict[str, str]:
    """Return means by heading; no-reference figures with their change against the baseline."""
    missing = "–"

    def mean(interval: Interval | None, digits: int) -> str:
        return missing if is_baseline or interval is None else f"{interval.point:.{digits}f}"

    cells = {
        "identical": missing if is_baseline else f"{fidelity.num_identical} of {fidelity.num_pictures}",
        "match": mean(None if fidelity.match is None else fidelity.match.mean, 3),
        "SSIM": mean(fidelity.ssim, 3),
        "PSNR, worst": missing
        if fidelity.psnr_db is None or is_baseline
        else f"{fidelity.psnr_db.point:.1f}, {fidelity.worst_psnr_db:.1f} dB",
        "LPIPS": mean(fidelity.lpips, 3),
        "CLIP kept": missing if fidelity.clip_kept is None or is_baseline else _percent(fidelity.clip_kept),
        "second witness": missing
        if fidelity.witness is None or is_baseline
        else _percent(fidelity.witness.mean),
        "CLIP similarity": mean(fidelity.clip_similarity, 1),
    }
    for name, heading, digits in (
        ("clip_score", "CLIP score", 1),
        ("sharpness", "sharpness", 0),
        ("colourfulness", "colourfulness", 1),
        ("entropy_bits", "entropy, bits", 2),
    ):
        compared = fidelity.alone.get(name)
        cells[heading] = missing if compared is None else f"{compared.mean:.{digits}f}"
        if compared is not None and not is_baseline:
            change = round(compared.difference.point, digits) + 0.0  # no "−0.0"
            cells[heading] += f" ({change:+.{digits}f})".replace("-", "−")
    return cells


def _percent(interval: Interval) -> str:
    """Format a share, e.g. "97 % [95, 99]", breakable only before the bracket."""
    text = f"{100 * interval.point:.0f}\u00a0%"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:.0f},\u00a0{100 * interval.high:.0f}]"
