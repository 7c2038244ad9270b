"""The report as one HTML file that needs nothing else: no network, no script, no file beside it.

Prompts, recipes, reasons and command lines come from outside. All text passes the template's autoescaping, and a
content-security policy allows nothing but the page's one style sheet (named by its hash) and embedded pictures, so
that a mistake in the escaping could still not run or fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vivace.report.grid import Grid, ReadPicture, grid
from vivace.report.plots import Breakdown, Fall, Scatter, breakdowns, scatter, waterfall
from vivace.report.quality import Fidelity, broken_pictures
from vivace.report.rows import Row, shared_warnings
from vivace.report.summary import noise_floor, paid_back, seconds, size, summary
from vivace.stats import Gate, Interval

MAX_PICTURE_BYTES = 12_000_000  # of all embedded pictures together, so that the file can be mailed
_BRIEF = 60  # characters
_SEAM = re.compile(r"(?<=\+)(?=[A-Za-z])|(?<=[^\s])(?=@)")
_SCATTER_SIZES = (("wide", 660, 380), ("narrow", 340, 320))


@dataclass(frozen=True)
class Section:
    """One run of the report: the command line that reproduces it, and its rows, the baseline first."""

    command: str
    started_at: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Line:
    """One row of the table.

    `quality` is the gate's verdict and the shortest evidence for it, `doubt` the whole reason unless it passed.
    `warnings` and `doubt` leave out what several rows share and is said once below the table.
    """

    number: int
    row: Row
    quality: tuple[str, str] | None
    doubt: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Figures:
    """All figures of the quality pass: a heading a column, and the recipes' cells under them."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Line, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _View:
    """What the template shows of one section."""

    id: str
    title: str
    device: str
    started_at: str
    started: str
    verdict: str
    workload: str
    command: str
    is_tiny: bool
    is_synthetic: bool
    lines: tuple[Line, ...]
    figures: Figures | None
    shared_warnings: tuple[str, ...]
    memory_note: str | None
    quality_notes: tuple[str, ...]
    falls: tuple[Fall, ...]
    breakdowns: tuple[Breakdown, ...]
    scatters: tuple[tuple[str, Scatter], ...]
    unplotted: tuple[Line, ...]
    grid: Grid
    facts: tuple[tuple[str, str], ...]

    @property
    def any_changes_picture(self) -> bool:
        return any(not line.row.record.trial.recipe.same_picture for line in self.lines)

    @property
    def has_effects(self) -> bool:
        return any(line.row.effects or line.row.record.rounds[0].evidence for line in self.lines)


def render_page(sections: Sequence[Section], read_picture: ReadPicture) -> str:
    """The whole report as one HTML document.

    Args:
        sections: in the order in which they are shown.
        read_picture: gives the PNG of a picture by its sha256, or None if its file is missing.
    """
    style = resources.files("vivace.report").joinpath("templates", "style.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    filled = [s for s in sections if s.rows]
    max_bytes = MAX_PICTURE_BYTES // max(1, len(filled))
    views = [_view(f"run-{i}", s, read_picture, max_bytes) for i, s in enumerate(filled, 1)]
    # Only our own two texts are exempt from escaping: the style sheet, whose bytes are hashed, and the policy.
    return (
        _environment()
        .get_template("page.html")
        .render(sections=views, style=Markup(style), policy=Markup(policy))
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("vivace.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": seconds,
        "size": size,
        "between_s": _between_s,
        "ratio": lambda interval: f"{interval.point:.2f}×",
        "between": lambda i: None if i.low is None else f"{i.low:.2f} to {i.high:.2f}",
        "paid_back": lambda row: _sentence(paid_back(row)),
        "words": lambda value: value.replace("_", " "),
        "breakable": _breakable,
        "brief": lambda text: _breakable(_brief(text)),
    }
    return environment


def _view(id_: str, section: Section, read_picture: ReadPicture, max_bytes: int) -> _View:
    rows = section.rows
    record = rows[0].record
    shared = tuple(shared_warnings(rows))
    doubts = _shared_doubts(rows)
    lines = tuple(_line(i, row, rows[0], shared, doubts) for i, row in enumerate(rows, 1))
    scatters = [(name, scatter(rows, width, height)) for name, width, height in _SCATTER_SIZES]
    return _View(
        id=id_,
        title=rows[0].model,
        device=record.environment.device_name,
        started_at=section.started_at,
        started=_date(section.started_at),
        verdict=summary(rows),
        workload=_workload(rows),
        command=section.command,
        is_tiny=rows[0].model.startswith("tiny-"),
        is_synthetic=record.trial.model.is_synthetic,
        lines=lines,
        figures=_figures(lines),
        shared_warnings=shared,
        memory_note=_memory_note(rows),
        quality_notes=_quality_notes(rows),
        falls=waterfall(rows),
        breakdowns=breakdowns(rows),
        scatters=tuple((name, found) for name, found in scatters if found is not None),
        unplotted=tuple(line for line in lines if line.row.latency is None),
        grid=grid(rows, read_picture, max_bytes),
        facts=_facts(rows[0]),
    )


def _line(
    number: int, row: Row, baseline: Row, warnings: Sequence[str], doubts: Mapping[str, Sequence[int]]
) -> Line:
    judged = row.judgement if row.latency is not None else None
    doubt = None if judged is None or judged.gate is Gate.PASSED else judged.reason
    return Line(
        number,
        row,
        quality=None if judged is None else (judged.gate.value, _evidence(row, baseline)),
        doubt=None if doubt in doubts and not row.failed_quality else doubt,
        warnings=tuple(w for w in row.warnings if w not in warnings),
    )


def _shared_doubts(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Why quality is unclear, where more than one row says the same, and the rows' numbers."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
            found.setdefault(row.judgement.reason, []).append(number)
    return {reason: numbers for reason, numbers in found.items() if len(numbers) > 1}


def _evidence(row: Row, baseline: Row) -> str:
    """What the verdict on quality stands on, as short as it can be said: "SSIM 0.994", "CLIP kept 97 % [95, 99]"."""
    found, limits = row.fidelity, row.limits
    if broken_pictures(row.record, baseline.record) is not None:
        return "broken pictures"
    if found is None:
        return ""
    if found.num_identical == found.num_pictures:
        return "identical"
    if not row.record.trial.recipe.same_picture:
        return "no CLIP score" if found.clip_kept is None else f"CLIP kept {_percent(found.clip_kept)}"
    parts = []
    if found.ssim is not None and (limits.ssim is not None or limits.psnr_db is None):
        parts.append(f"SSIM {found.ssim.point:.3f}")
    if found.psnr_db is not None and limits.psnr_db is not None:
        parts.append(f"PSNR {found.psnr_db.point:.1f} dB")
    return ", ".join(parts)


def _figures(lines: Sequence[Line]) -> Figures | None:
    """Figures that no recipe has get no column; None without a quality pass."""
    found = [(line, line.row.fidelity) for line in lines if line.row.fidelity is not None]
    cells = [(line, _figure_cells(fidelity, line.row.is_baseline)) for line, fidelity in found]
    headings = [h for h in (cells[0][1] if cells else ()) if any(c[h] != "–" for _, c in cells)]
    if not headings:
        return None
    return Figures(
        tuple(headings), tuple((line, tuple(figures[h] for h in headings)) for line, figures in cells)
    )


def _figure_cells(found: Fidelity, is_baseline: bool) -> dict[str, str]:
    """Means by heading; of figures of pictures alone also the change against the baseline."""
    missing = "–"

    def mean(interval: Interval | None, digits: int) -> str:
        return missing if is_baseline or interval is None else f"{interval.point:.{digits}f}"

    cells = {
        "identical": missing if is_baseline else f"{found.num_identical} of {found.num_pictures}",
        "SSIM": mean(found.ssim, 3),
        "PSNR, worst": missing
        if found.psnr_db is None or is_baseline
        else f"{found.psnr_db.point:.1f}, {found.worst_psnr_db:.1f} dB",
        "LPIPS": mean(found.lpips, 3),
        "CLIP kept": missing if found.clip_kept is None or is_baseline else _percent(found.clip_kept),
        "CLIP similarity": mean(found.clip_similarity, 1),
    }
    for name, heading, digits in (
        ("clip_score", "CLIP score", 1),
        ("sharpness", "sharpness", 0),
        ("colourfulness", "colourfulness", 1),
        ("entropy_bits", "entropy, bits", 2),
    ):
        compared = found.alone.get(name)
        cells[heading] = missing if compared is None else f"{compared.mean:.{digits}f}"
        if compared is not None and not is_baseline:
            change = round(compared.difference.point, digits) + 0.0  # no "−0.0"
            cells[heading] += f" ({change:+.{digits}f})".replace("-", "−")
    return cells


def _percent(interval: Interval) -> str:
    """ "97 % [95, 99]" of a share, with spaces that do not break but between the two."""
    text = f"{100 * interval.point:.0f}\u00a0%"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:.0f},\u00a0{100 * interval.high:.0f}]"


def _quality_notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """What quality was held to, why it is unclear, and how close the baseline is to itself; empty without a pass."""
    notes = []
    for reason, numbers in _shared_doubts(rows).items():
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        notes.append(f"The quality of {listed} is unclear: {reason}.")
    if any(row.judgement is not None for row in rows[1:]):
        limits = rows[0].limits
        held = [
            f"a mean {text}"
            for limit, text in (
                (limits.ssim, f"SSIM of at least {limits.ssim}"),
                (limits.psnr_db, f"PSNR of at least {limits.psnr_db} dB"),
            )
            if limit is not None
        ]
        clip = (
            f"{100 * limits.clip:g} % of the baseline’s CLIP margin"
            if isinstance(limits.clip, float)
            else None
        )
        notes.append(
            (f"Quality passes with {' and '.join(held)}" if held else "Quality is held to no likeness")
            + (f"; recipes that change the picture must instead keep {clip}" if clip else "")
            + ". A black or noisy picture, or many flat ones, fail any recipe."
        )
    if floor := noise_floor(rows[0]):
        notes.append(f"{floor[0].upper()}{floor[1:]}.")
    return tuple(notes)


def _workload(rows: Sequence[Row]) -> str:
    workload = rows[0].record.trial.workload
    counts = [r.latency.n for r in rows if r.latency is not None]
    parts = [
        f"{_count(len(workload.prompts), 'prompt')} × {_count(len(workload.seeds), 'seed')}",
        f"{workload.width} × {workload.height} px",
        _count(workload.num_inference_steps, "step"),
        f"guidance {workload.guidance_scale:g}",
        _count(max(len(r.record.rounds) for r in rows), "round"),
    ]
    if workload.batch > 1:
        parts.append(f"{workload.batch} pictures a call")
    if workload.text == "embeddings":
        parts.append("prompts encoded beforehand")
    if counts:
        low, high = min(counts), max(counts)
        parts.append(_count(low, "timed call") if low == high else f"{low} to {high} timed calls")
        parts[-1] += " a recipe"
    return " · ".join(parts)


def _facts(row: Row) -> tuple[tuple[str, str], ...]:
    """The conditions of the measurement, name and value."""
    trial, environment = row.record.trial, row.record.environment
    device = environment.device_name
    if environment.device_capability:
        device += f", compute capability {environment.device_capability}"
    facts = [("Device", f"{device} ({environment.device})")]
    if environment.driver:
        facts.append(("Driver", environment.driver))
    facts += [
        ("CPU", f"{environment.cpu}, {_count(environment.num_cores, 'core')}"),
        ("Threads", str(environment.num_threads)),
        ("Memory", size(environment.memory_bytes)),
        ("Platform", environment.platform),
        ("Python", environment.python),
        *environment.libraries.items(),
        *environment.variables.items(),
        (
            "vivace",
            environment.vivace + (f" ({environment.source_revision})" if environment.source_revision else ""),
        ),
        ("Weights", f"{trial.model.name}, {trial.model.source}, {trial.model.revision}"),
    ]
    return tuple(facts)


def _memory_note(rows: Sequence[Row]) -> str | None:
    """What the memory figures count, and how much was there before the model."""
    found = [r.memory for r in rows if r.memory is not None]
    if not found:
        return None
    if rows[0].record.environment.device == "cpu":
        before = size(max(m.before_bytes for m in found))
        return (
            "Memory is the process's resident set, with Python and its libraries in it: "
            f"{before} were there before the model was loaded."
        )
    return "Memory is what PyTorch had allocated on the device; the driver and its context hold some more."


def _between_s(interval: Interval) -> str | None:
    """ "0.783 to 0.905 s": the ends of an interval, both in the unit that `seconds` gives the middle."""
    if interval.low is None or interval.high is None:
        return None
    unit, factor = ("ms", 1e3) if interval.point < 0.1 else ("s", 1.0)
    low, high = (
        f"{v:.0f}" if v >= 99.95 else f"{v:.3g}" for v in (interval.low * factor, interval.high * factor)
    )
    return f"{low} to {high} {unit}"


def _breakable(text: str) -> Markup:
    """The text with a chance to break its line between a recipe's parts; `join` escapes them."""
    return Markup("<wbr>").join(_SEAM.split(text))


def _brief(text: str) -> str:
    """A long recipe for charts and heads of columns: both ends, since recipes of one study differ at either."""
    return text if len(text) <= _BRIEF else f"{text[: _BRIEF // 2 - 4]} … {text[-_BRIEF // 2 :]}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _date(text: str) -> str:
    """ "2026-11-20 11:04 UTC"; a text that is no date stays as it is."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{found.astimezone(UTC) if found.tzinfo else found:%Y-%m-%d %H:%M} UTC"
