"""The report as one self-contained HTML file: no network, no other files.

Prompts, recipes, reasons and command lines are untrusted. All text is autoescaped by the template, and a
content-security policy allows only the page's style sheet and script (by their hashes) and embedded images. Even with
a mistake in the escaping, the page could not run or fetch anything else. The script only sorts tables: without it
everything is there.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.workload import Workload
from vivace.foundation.untrusted.streams import lines_of
from vivace.report.downloads import MAX_LINK_BYTES, OfferedFile, table_files, text_file
from vivace.report.grid import Grid, ImageReader, grid
from vivace.report.lines import RowFigures, TextLine, figures_of, line_of, shared_quality_reasons
from vivace.report.plots import Breakdown, WaterfallBar, breakdowns, waterfall
from vivace.report.rows import Row, shared_warnings
from vivace.report.samples import Strips, strips
from vivace.report.scatter import Plot, plots
from vivace.report.summary import (
    fastest,
    gpu_in_words,
    headline,
    limit_in_words,
    noise_floor,
    paid_back,
    particulars,
    seconds,
    size,
    standing,
)
from vivace.report.value_text import between_s, breakable, count, date, sentence, shortened

MAX_IMAGE_BYTES = 12_000_000  # of all embedded images together, so that the file can be mailed
MAX_TABLE_BYTES = 6_000_000  # of all tables that can be saved from the page
PROMPTS_FILE = "prompts"
_MAX_SHOWN = 20_000  # characters of prompts in the page
_MAX_FILE_BYTES = 300_000


@dataclass(frozen=True)
class Reproduction:
    """A comparison's command line, and its prompts.

    Attributes:
        command: of this comparison alone, with each option of the workload; "" if no command line can express it.
        prompts: those that are shown; `num_hidden` more are not.
        file: the prompts, one per line, as --prompts reads them; None if they cannot be written so.
    """

    command: str
    prompts: tuple[str, ...]
    num_hidden: int
    file: OfferedFile | None


@dataclass(frozen=True)
class Section:
    """One run of the report: the command line that reproduces it, and its rows with the baseline first."""

    command: str
    started_at: str
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class _View:
    """The template's variables for one section."""

    id: str
    title: str
    device: str
    started_at: str
    started: str
    headline: str
    particulars: str
    best: Row | None
    standing: str
    downloads: tuple[OfferedFile, ...]
    workload: str
    batch: int
    command: str
    again: Reproduction
    is_tiny: bool
    is_synthetic: bool
    lines: tuple[TextLine, ...]
    figures: RowFigures | None
    shared_warnings: tuple[str, ...]
    memory_note: str | None
    quality_notes: tuple[str, ...]
    waterfall: tuple[WaterfallBar, ...]
    breakdowns: tuple[Breakdown, ...]
    plots: tuple[Plot, ...]
    strips: Strips | None
    unplotted: tuple[TextLine, ...]
    grid: Grid
    facts: tuple[tuple[str, str], ...]

    @property
    def any_changes_image(self) -> bool:
        return any(not line.row.record.trial.recipe.same_picture for line in self.lines)

    @property
    def has_effects(self) -> bool:
        return any(line.row.effects or line.row.record.rounds[0].evidence for line in self.lines)


def render_page(
    sections: Sequence[Section],
    read_image: ImageReader,
    title: str | None = None,
) -> str:
    """Return the whole report as one HTML document.

    Args:
        sections: the runs, in the order in which they are shown.
        read_image: returns the PNG of an image by its sha256, or None if its file is missing.
        title: of the page; None for one that names the model and the device.
    """
    style, script = style_sheet(), sorting_script()
    filled = [s for s in sections if s.rows]
    max_bytes = MAX_IMAGE_BYTES // max(1, len(filled))
    max_table_bytes = min(MAX_LINK_BYTES, MAX_TABLE_BYTES // (len(filled) + 1))
    views = [
        section_view(f"run-{i}", s, read_image, max_bytes, max_table_bytes) for i, s in enumerate(filled, 1)
    ]
    # Only trusted texts are exempt from escaping: style sheet and script, whose bytes are hashed, and the policy.
    return (
        environment()
        .get_template("page.html")
        .render(
            sections=views,
            title=title,
            downloads=_all_tables(filled, max_table_bytes),
            style=Markup(style),
            script=Markup(script),
            policy=Markup(policy_for(style, script)),
        )
    )


def in_notebook(page: str) -> str:
    """Return a page, or a text, for the output of a notebook's cell. A page keeps its own styles in a frame."""
    if not page.lstrip().lower().startswith("<!doctype"):
        return f"<pre>{escape(page)}</pre>"
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts allow-downloads" '
        'style="width: 100%; height: 40em; border: 0"></iframe>'
    )


def _all_tables(sections: Sequence[Section], max_bytes: int) -> tuple[OfferedFile, ...]:
    """Return the rows of all sections as files; none for a single section, which has its own."""
    if len(sections) < 2:
        return ()
    return table_files([row for s in sections for row in s.rows], "vivace-report", max_bytes)


def style_sheet() -> str:
    return _template("style.css")


def sorting_script() -> str:
    """Return the page's script, which sorts the tables of results."""
    return _template("sorting.js")


def _template(name: str) -> str:
    return resources.files("vivace.report").joinpath("templates", name).read_text("utf-8")


def policy_for(style: str, script: str) -> str:
    """Return the content-security policy of a page with this style sheet, this script and embedded images."""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def environment(*packages: str) -> Environment:
    """Return the templates of these packages and of the report, with the report's filters."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package) for package in (*packages, "vivace.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": seconds,
        "size": size,
        "between_s": between_s,
        "ratio": lambda interval: f"{interval.point:.2f}×",
        "between": lambda i: None if i.low is None else f"{i.low:.2f} to {i.high:.2f}",
        "paid_back": lambda row: sentence(paid_back(row)),
        "gpu": lambda row: sentence(gpu_in_words(row)),
        "limit": lambda row: sentence(limit_in_words(row)),
        "count": count,
        "spaced": lambda value: value.replace("_", " "),
        "breakable": breakable,
        "shortened": lambda text: breakable(shortened(short_form(text))),
    }
    return environment


def section_view(
    id_: str,
    section: Section,
    read_image: ImageReader,
    max_bytes: int,
    max_table_bytes: int = MAX_LINK_BYTES,
) -> _View:
    """Return the variables of the template section.html for a run.

    Args:
        max_bytes: limit on all embedded images together.
        max_table_bytes: limit on each table that can be saved.
    """
    rows = section.rows
    record = rows[0].record
    shared = tuple(shared_warnings(rows))
    reasons = shared_quality_reasons(rows)
    lines = tuple(line_of(i, row, rows[0], shared, reasons) for i, row in enumerate(rows, 1))
    best = fastest(rows)
    return _View(
        id=id_,
        title=rows[0].model,
        device=record.environment.device_name + _at_place(record),
        started_at=section.started_at,
        started=date(section.started_at),
        headline=headline(rows),
        particulars=" ".join(particulars(rows)),
        best=best,
        standing="" if best is None else standing(best),
        downloads=table_files(rows, _file_stem(section), max_table_bytes),
        workload=_workload(rows),
        batch=record.trial.workload.batch,
        command=section.command,
        again=reproduction(rows),
        is_tiny=rows[0].model.startswith("tiny-"),
        is_synthetic=record.trial.model.is_synthetic,
        lines=lines,
        figures=figures_of(lines),
        shared_warnings=shared,
        memory_note=_memory_note(rows),
        quality_notes=_quality_notes(rows),
        waterfall=waterfall(rows),
        breakdowns=breakdowns(rows),
        plots=plots(rows),
        strips=strips(rows),
        unplotted=tuple(line for line in lines if line.row.latency is None),
        grid=grid(rows, read_image, max_bytes),
        facts=_facts(rows[0]),
    )


def _file_stem(section: Section) -> str:
    """Return the name of the section's files, e.g. "vivace-tiny-sd-batch-2-2026-01-31"."""
    batch = section.rows[0].record.trial.workload.batch
    parts = ["vivace", section.rows[0].model, *([f"batch {batch}"] if batch > 1 else [])]
    return " ".join([*parts, section.started_at[:10]])


def _quality_notes(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the quality limits, shared reasons for unclear quality, and the noise floor.

    Empty without a quality pass.
    """
    notes = []
    for reason, numbers in shared_quality_reasons(rows).items():
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
    if workload.task != "text":
        parts.insert(0, workload.task_in_words)
    if workload.batch > 1:
        parts.append(f"{workload.batch} images per call")
    if workload.text == "embeddings":
        parts.append("prompts encoded beforehand")
    if workload.text == "repeated":
        parts.append("one prompt repeated")
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
    """Return the place of a comparison's records if there are several, e.g. ", GPU 1 (GPU-5f0c...)"."""
    place = record.environment.place
    return "" if place is None else f", {place.name}"


def _memory_note(rows: Sequence[Row]) -> str | None:
    """Describe the meaning of the memory figures, and the memory in use before the model was loaded."""
    memories = [r.memory for r in rows if r.memory is not None]
    if not memories:
        return None
    if rows[0].record.environment.device == "cpu":
        before = size(max(m.before_bytes for m in memories))
        return (
            "Memory is the process's resident set, including Python and its libraries: "
            f"{before} were in use before the model was loaded."
        )
    return "Memory is what PyTorch allocated on the device; the CUDA context takes some more."


def reproduction(rows: Sequence[Row]) -> Reproduction:
    """Return the command and prompts that measure these rows again, the baseline first."""
    workload = rows[0].record.trial.workload
    file = None
    if all(_is_line(prompt) for prompt in workload.prompts):
        file = text_file("".join(f"{p}\n" for p in workload.prompts), "txt", PROMPTS_FILE, _MAX_FILE_BYTES)
    num_listed, left = 0, _MAX_SHOWN
    for prompt in workload.prompts:
        left -= len(prompt)
        if left < 0:
            break
        num_listed += 1
    return Reproduction(
        command="" if file is None else _command(rows, f"{PROMPTS_FILE}.txt"),
        prompts=workload.prompts[:num_listed],
        num_hidden=len(workload.prompts) - num_listed,
        file=file if file is not None and file.uri is not None else None,
    )


def _is_line(prompt: str) -> bool:
    """Whether a file of prompts can hold the prompt: as one line that keeps its spaces."""
    return bool(prompt) and prompt == prompt.strip() and len(lines_of(prompt)) == 1


def _command(rows: Sequence[Row], prompts_file: str) -> str:
    """Return the command, an option a line; "" if its seeds do not follow one another."""
    trial, environment = rows[0].record.trial, rows[0].record.environment
    options = _workload_options(trial.workload, prompts_file)
    if options is None:
        return ""
    lines = [
        ["vivace", "bench", "--model", trial.model.name],
        *(["--recipe", row.record.trial.recipe.text] for row in rows),
        *options,
        ["--rounds", str(max(len(row.record.rounds) for row in rows)), "--no-rivals"],
        ["--device", trial.device, "--threads", str(environment.num_threads)],
    ]
    return " \\\n  ".join(shlex.join(line) for line in lines)


def _workload_options(workload: Workload, prompts_file: str) -> list[list[str]] | None:
    first, count = workload.seeds[0], len(workload.seeds)
    if workload.seeds != tuple(range(first, first + count)):
        return None
    options = [
        ["--prompts", prompts_file, "--seed", str(first), "--seeds", str(count)],
        ["--height", str(workload.height), "--width", str(workload.width)],
        [
            "--num-inference-steps",
            str(workload.num_inference_steps),
            "--guidance-scale",
            repr(workload.guidance_scale).removesuffix(".0"),
        ],
    ]
    extra = ["--batch", str(workload.batch)] if workload.batch > 1 else []
    extra += ["--text", workload.text] if workload.text != "prompts" else []
    extra += ["--task", workload.task] if workload.task != "text" else []
    extra += [] if workload.strength is None else ["--strength", f"{workload.strength:g}"]
    return [*options, extra] if extra else options
