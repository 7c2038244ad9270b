"""The report as one self-contained HTML file: no network, no scripts, no other files.

Prompts, recipes, reasons and command lines are untrusted. All text is autoescaped by the template, and a
content-security policy allows only the page's style sheet (by its hash) and embedded images. Even with a mistake in
the escaping, the page could not run or fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from vivace.report.gate import broken_pictures
from vivace.report.grid import Grid, ReadPicture, grid
from vivace.report.plots import Breakdown, Scatter, WaterfallBar, breakdowns, scatter, waterfall
from vivace.report.quality import Fidelity
from vivace.report.rows import Row, shared_warnings
from vivace.report.summary import gpu_in_words, limit_in_words, noise_floor, paid_back, seconds, size, summary
from vivace.report.text import between_s, breakable, count, date, sentence, shortened
from vivace.spec.record import Record
from vivace.stats import Gate, Interval

MAX_PICTURE_BYTES = 12_000_000  # of all embedded images together, so that the file can be mailed
_SCATTER_SIZES = (("wide", 660, 380), ("narrow", 340, 320))


@dataclass(frozen=True)
class Section:
    """One run of the report: the command line that reproduces it, and its rows with the baseline first."""

    command: str
    started_at: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class Line:
    """One row of the table.

    `quality` is the gate's verdict with short evidence; `quality_reason` is the full reason unless it passed.
    `warnings` and `quality_reason` leave out what several rows share, which is printed once below the table.
    """

    number: int
    row: Row
    quality: tuple[str, str] | None
    quality_reason: str | None
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Figures:
    """All figures of the quality pass: column headings, and the cells of each recipe."""

    headings: tuple[str, ...]
    rows: tuple[tuple[Line, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _View:
    """The template's variables for one section."""

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
    waterfall: tuple[WaterfallBar, ...]
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
    """Return the whole report as one HTML document.

    Args:
        sections: the runs, in the order in which they are shown.
        read_picture: returns the PNG of an image by its sha256, or None if its file is missing.
    """
    style = style_sheet()
    filled = [s for s in sections if s.rows]
    max_bytes = MAX_PICTURE_BYTES // max(1, len(filled))
    views = [section_view(f"run-{i}", s, read_picture, max_bytes) for i, s in enumerate(filled, 1)]
    # Only two trusted texts are exempt from escaping: the style sheet, whose bytes are hashed, and the policy.
    return (
        environment()
        .get_template("page.html")
        .render(sections=views, style=Markup(style), policy=Markup(policy_for(style)))
    )


def style_sheet() -> str:
    return resources.files("vivace.report").joinpath("templates", "style.css").read_text("utf-8")


def policy_for(style: str) -> str:
    """Return the content-security policy of a page with this style sheet and embedded images."""
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def environment(*packages: str) -> Environment:
    """Return the templates of these packages and of the report, with the report's filters."""
    found = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "vivace.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "seconds": seconds,
        "size": size,
        "between_s": between_s,
        "ratio": lambda interval: f"{interval.point:.2f}×",
        "between": lambda i: None if i.low is None else f"{i.low:.2f} to {i.high:.2f}",
        "paid_back": lambda row: sentence(paid_back(row)),
        "gpu": lambda row: sentence(gpu_in_words(row)),
        "limit": lambda row: sentence(limit_in_words(row)),
        "spaced": lambda value: value.replace("_", " "),
        "breakable": breakable,
        "shortened": lambda text: breakable(shortened(text)),
    }
    return found


def section_view(id_: str, section: Section, read_picture: ReadPicture, max_bytes: int) -> _View:
    """Return what the template section.html shows of a run."""
    rows = section.rows
    record = rows[0].record
    shared = tuple(shared_warnings(rows))
    reasons = _shared_quality_reasons(rows)
    lines = tuple(_line(i, row, rows[0], shared, reasons) for i, row in enumerate(rows, 1))
    scatters = [(name, scatter(rows, width, height)) for name, width, height in _SCATTER_SIZES]
    return _View(
        id=id_,
        title=rows[0].model,
        device=record.environment.device_name + _at_place(record),
        started_at=section.started_at,
        started=date(section.started_at),
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
        waterfall=waterfall(rows),
        breakdowns=breakdowns(rows),
        scatters=tuple((name, found) for name, found in scatters if found is not None),
        unplotted=tuple(line for line in lines if line.row.latency is None),
        grid=grid(rows, read_picture, max_bytes),
        facts=_facts(rows[0]),
    )


def _line(
    number: int, row: Row, baseline: Row, warnings: Sequence[str], shared_reasons: Mapping[str, Sequence[int]]
) -> Line:
    judged = row.judgement if row.latency is not None else None
    reason = None if judged is None or judged.gate is Gate.PASSED else judged.reason
    return Line(
        number,
        row,
        quality=None if judged is None else (judged.gate.value, _evidence(row, baseline)),
        quality_reason=None if reason in shared_reasons and not row.failed_quality else reason,
        warnings=tuple(w for w in row.warnings if w not in warnings),
    )


def _shared_quality_reasons(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Return the reasons for unclear quality that several rows share, with the numbers of those rows."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        if row.latency is not None and row.judgement is not None and row.judgement.gate is Gate.UNCLEAR:
            found.setdefault(row.judgement.reason, []).append(number)
    return {reason: numbers for reason, numbers in found.items() if len(numbers) > 1}


def _evidence(row: Row, baseline: Row) -> str:
    """Return short evidence for the verdict on quality: "match 0.994", "CLIP kept 97 % [95, 99]"."""
    found, limits = row.fidelity, row.limits
    if broken_pictures(row.record, baseline.record) is not None:
        return "broken images"
    if found is None:
        return ""
    if found.num_identical == found.num_pictures:
        return "identical"
    parts = []
    if limits.clip is not None:
        parts.append("no CLIP score" if found.clip_kept is None else f"CLIP kept {_percent(found.clip_kept)}")
    if found.witness is not None and limits.witness is not None:
        parts.append(f"second witness {_percent(found.witness.mean)}")
    if row.record.trial.recipe.same_picture:
        if found.match is not None and limits.match is not None:
            parts.append(f"match {found.match.mean.point:.3f}")
        if found.ssim is not None and limits.ssim is not None:
            parts.append(f"SSIM {found.ssim.point:.3f}")
        if found.psnr_db is not None and limits.psnr_db is not None:
            parts.append(f"PSNR {found.psnr_db.point:.1f} dB")
    return ", ".join(parts)


def _figures(lines: Sequence[Line]) -> Figures | None:
    """Return the table of figures, without columns that are empty for all recipes; None without a quality pass."""
    found = [(line, line.row.fidelity) for line in lines if line.row.fidelity is not None]
    cells = [(line, _figure_cells(fidelity, line.row.is_baseline)) for line, fidelity in found]
    headings = [h for h in (cells[0][1] if cells else ()) if any(c[h] != "–" for _, c in cells)]
    if not headings:
        return None
    return Figures(
        tuple(headings), tuple((line, tuple(figures[h] for h in headings)) for line, figures in cells)
    )


def _figure_cells(found: Fidelity, is_baseline: bool) -> dict[str, str]:
    """Return means by heading; no-reference figures with their change against the baseline."""
    missing = "–"

    def mean(interval: Interval | None, digits: int) -> str:
        return missing if is_baseline or interval is None else f"{interval.point:.{digits}f}"

    cells = {
        "identical": missing if is_baseline else f"{found.num_identical} of {found.num_pictures}",
        "match": mean(None if found.match is None else found.match.mean, 3),
        "SSIM": mean(found.ssim, 3),
        "PSNR, worst": missing
        if found.psnr_db is None or is_baseline
        else f"{found.psnr_db.point:.1f}, {found.worst_psnr_db:.1f} dB",
        "LPIPS": mean(found.lpips, 3),
        "CLIP kept": missing if found.clip_kept is None or is_baseline else _percent(found.clip_kept),
        "second witness": missing if found.witness is None or is_baseline else _percent(found.witness.mean),
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
    """Format a share, e.g. "97 % [95, 99]", breakable only before the bracket."""
    text = f"{100 * interval.point:.0f}\u00a0%"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} [{100 * interval.low:.0f},\u00a0{100 * interval.high:.0f}]"


def _quality_notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the quality limits, shared reasons for unclear quality, and the noise floor.

    Empty without a quality pass.
    """
    notes = []
    for reason, numbers in _shared_quality_reasons(rows).items():
        listed = f"{', '.join(map(str, numbers[:-1]))} and {numbers[-1]}"
        notes.append(f"The quality of {listed} is unclear: {reason}.")
    if any(row.judgement is not None for row in rows[1:]):
        limits = rows[0].limits
        minimums = [
            f"a mean {text}"
            for limit, text in (
                (limits.match, f"match of at least {limits.match:g}" if limits.match else ""),
                (limits.ssim, f"SSIM of at least {limits.ssim}"),
                (limits.psnr_db, f"PSNR of at least {limits.psnr_db} dB"),
            )
            if limit is not None
        ]
        clip = (
            f"Quality passes with {100 * limits.clip:g} % of the baseline’s CLIP margin"
            if isinstance(limits.clip, float)
            else "There is no limit on the CLIP margin"
        )
        same = f"; recipes that should give the same image also need {_listed(minimums)}" if minimums else ""
        notes.append(f"{clip}{same}. Any recipe fails with a black or noisy image, or with many flat images.")
    if floor := noise_floor(rows[0]):
        notes.append(f"{floor[0].upper()}{floor[1:]}.")
    return tuple(notes)


def _listed(parts: Sequence[str]) -> str:
    """Return e.g. "a, b and c"."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _workload(rows: Sequence[Row]) -> str:
    workload = rows[0].record.trial.workload
    counts = [r.latency.n for r in rows if r.latency is not None]
    parts = [
        f"{count(len(workload.prompts), 'prompt')} × {count(len(workload.seeds), 'seed')}",
        f"{workload.width} × {workload.height} px",
        count(workload.num_inference_steps, "step"),
        f"guidance {workload.guidance_scale:g}",
        count(max(len(r.record.rounds) for r in rows), "round"),
    ]
    if workload.batch > 1:
        parts.append(f"{workload.batch} images per call")
    if workload.text == "embeddings":
        parts.append("prompts encoded beforehand")
    if counts:
        low, high = min(counts), max(counts)
        parts.append(count(low, "timed call") if low == high else f"{low} to {high} timed calls")
        parts[-1] += " per recipe"
    return " · ".join(parts)


def _facts(row: Row) -> tuple[tuple[str, str], ...]:
    """Return the conditions of the measurement as names and values."""
    trial, environment = row.record.trial, row.record.environment
    device = environment.device_name
    if environment.device_capability:
        device += f", compute capability {environment.device_capability}"
    facts = [("Device", f"{device} ({environment.device})")]
    if environment.place is not None:
        facts.append(("Place", environment.place.name))
    if environment.driver:
        facts.append(("Driver", environment.driver))
    facts += [
        ("CPU", f"{environment.cpu}, {count(environment.num_cores, 'core')}"),
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


def _at_place(record: Record) -> str:
    """Return which of several places a comparison's records are from, e.g. ", GPU 1 (GPU-5f0c...)"."""
    place = record.environment.place
    return "" if place is None else f", {place.name}"


def _memory_note(rows: Sequence[Row]) -> str | None:
    """Say what the memory figures count, and how much memory was in use before the model was loaded."""
    found = [r.memory for r in rows if r.memory is not None]
    if not found:
        return None
    if rows[0].record.environment.device == "cpu":
        before = size(max(m.before_bytes for m in found))
        return (
            "Memory is the process's resident set, including Python and its libraries: "
            f"{before} were in use before the model was loaded."
        )
    return "Memory is what PyTorch allocated on the device; the CUDA context takes some more."
