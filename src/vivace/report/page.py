"""The report as one HTML file that needs nothing else: no network, no script, no file beside it.

Prompts, recipes, reasons and command lines come from outside. All text passes the template's autoescaping, and a
content-security policy allows nothing but the page's one style sheet (named by its hash) and embedded pictures, so
that a mistake in the escaping could still not run or fetch anything.
"""

from __future__ import annotations

import base64
import hashlib
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from PIL import Image

from vivace.report.plots import Breakdown, Fall, Scatter, breakdowns, scatter, waterfall
from vivace.report.rows import Row, shared_warnings
from vivace.report.summary import fidelity, seconds, size, summary
from vivace.spec.record import Picture
from vivace.stats import Interval

ReadPicture = Callable[[str], bytes | None]

MAX_EMBEDDED_SIDE = 512  # pixels; a larger picture is embedded as a thumbnail, so that the file can be mailed
THUMBNAIL_SIDE = 384
_SMALL_SIDE = 160  # pictures up to this side are shown in narrow columns, near their own size
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
    """One row of the table. `warnings` leaves out those that every measured row shares."""

    number: int
    row: Row
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Cell:
    """A picture in the grid, or why there is none."""

    uri: str | None
    width: int
    height: int
    title: str
    note: str | None


@dataclass(frozen=True)
class GridRow:
    prompt: str
    seed: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Grid:
    """The same prompt and seed across a row, one recipe a column, the baseline first."""

    columns: tuple[Line, ...]
    rows: tuple[GridRow, ...]
    without: tuple[Line, ...]
    is_small: bool
    has_thumbnails: bool


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
    lines: tuple[Line, ...]
    shared_warnings: tuple[str, ...]
    memory_note: str | None
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
    views = [_view(f"run-{i}", s, read_picture) for i, s in enumerate(sections, 1) if s.rows]
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
        "fidelity": fidelity,
        "size": size,
        "between_s": _between_s,
        "ratio": lambda interval: f"{interval.point:.2f}×",
        "between": lambda i: None if i.low is None else f"{i.low:.2f} to {i.high:.2f}",
        "words": lambda value: value.replace("_", " "),
        "breakable": _breakable,
        "brief": lambda text: _breakable(_brief(text)),
    }
    return environment


def _view(id_: str, section: Section, read_picture: ReadPicture) -> _View:
    rows = section.rows
    record = rows[0].record
    shared = tuple(shared_warnings(rows))
    lines = tuple(
        Line(i, row, tuple(w for w in row.warnings if w not in shared)) for i, row in enumerate(rows, 1)
    )
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
        lines=lines,
        shared_warnings=shared,
        memory_note=_memory_note(rows),
        falls=waterfall(rows),
        breakdowns=breakdowns(rows),
        scatters=tuple((name, found) for name, found in scatters if found is not None),
        unplotted=tuple(line for line in lines if line.row.latency is None),
        grid=_grid(lines, read_picture),
        facts=_facts(rows[0]),
    )


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


def _grid(lines: Sequence[Line], read_picture: ReadPicture) -> Grid:
    pictures = {line.number: _pictures(line.row) for line in lines}
    columns = tuple(line for line in lines if pictures[line.number])
    places = sorted({place for found in pictures.values() for place in found})
    embedded: dict[str, Cell] = {}
    rows = []
    for place in places:
        cells = []
        for line in columns:
            picture = pictures[line.number].get(place)
            if picture is None:
                cells.append(Cell(None, 0, 0, "", "not drawn"))
                continue
            if picture.sha256 not in embedded:
                embedded[picture.sha256] = _embed(read_picture(picture.sha256))
            cells.append(
                _captioned(embedded[picture.sha256], line, picture, pictures[lines[0].number].get(place))
            )
        _, prompt, seed = place
        rows.append(GridRow(prompt, seed, tuple(cells)))
    sides = [max(c.width, c.height) for c in embedded.values()]
    return Grid(
        columns=columns,
        rows=tuple(rows),
        without=tuple(line for line in lines if not pictures[line.number]),
        is_small=max(sides, default=0) <= _SMALL_SIDE,
        has_thumbnails=any(c.title == "thumbnail" for c in embedded.values()),
    )


def _pictures(row: Row) -> dict[tuple[int, str, int], Picture]:
    """By index, prompt and seed: only pictures of the same words and noise stand side by side.

    A retried trial may have drawn its pictures in a later round than the first.
    """
    found = next((r.pictures for r in row.record.rounds if r.pictures), ())
    return {(p.index, p.prompt, p.seed): p for p in found}


def _captioned(cell: Cell, line: Line, picture: Picture, reference: Picture | None) -> Cell:
    title = f"{line.row.recipe}: {picture.prompt} (seed {picture.seed})"
    note = cell.note
    if note is None and not line.row.is_baseline and reference and reference.sha256 == picture.sha256:
        note = "identical to the baseline's"
    return Cell(cell.uri, cell.width, cell.height, title, note)


def _embed(png: bytes | None) -> Cell:
    """The picture as a data URI: byte for byte, or a thumbnail of a large one."""
    if png is None:
        return Cell(None, 0, 0, "", "the picture's file is missing")
    try:
        with Image.open(io.BytesIO(png), formats=("PNG",)) as image:
            width, height = image.size
            if max(width, height) <= MAX_EMBEDDED_SIDE:
                image.verify()
                return Cell(_data_uri("png", png), width, height, "", None)
            small = image.convert("RGB")
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
        out = io.BytesIO()
        small.save(out, "WEBP", quality=85, method=4)
        return Cell(_data_uri("webp", out.getvalue()), small.width, small.height, "thumbnail", None)
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ):  # what Pillow raises for a broken PNG
        return Cell(None, 0, 0, "", "the picture's file is damaged")


def _data_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _date(text: str) -> str:
    """ "2026-11-20 11:04 UTC"; a text that is no date stays as it is."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        return text
    return f"{found.astimezone(UTC) if found.tzinfo else found:%Y-%m-%d %H:%M} UTC"
