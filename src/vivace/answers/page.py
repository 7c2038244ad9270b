"""An answer as one HTML file: no network, no other files; and its plots as SVG files.

Prompts, recipes, reasons and command lines are untrusted. All text is autoescaped by the template, and a
content-security policy allows only the page's style sheet and script (by their hashes) and embedded images. Even with
a mistake in the escaping, the page could not run or fetch anything else. The script only sorts tables: without it
everything is there.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from vivace import __version__
from vivace.answers.answer import Answer, Bars, Block, Facts, File, ImageGrid, Plot, Section, Table
from vivace.answers.formatting import count, size
from vivace.answers.images import embed
from vivace.answers.plots import draw, draw_bars
from vivace.foundation.spec.recipe_syntax import short_form
from vivace.foundation.untrusted.streams import plain

MAX_IMAGE_BYTES = 12_000_000  # of all embedded images together, so that the file can be mailed
MAX_LINK_BYTES = 1_500_000
"""Largest file to save: Chromium saves links of up to 2 MB."""
MAX_FILES_BYTES = 6_000_000
_MOST_BARS = 24
"""Number of bars that are listed at first; the others can be unfolded."""
_KINDS = {Table: "table", Facts: "facts", Bars: "bars", Plot: "plot", ImageGrid: "images"}
_TYPES = {"csv": "text/csv;charset=utf-8", "json": "application/json", "txt": "text/plain;charset=utf-8"}
_BREAK_POINT = re.compile(r"(?<=\+)(?=[A-Za-z])|(?<=[^\s])(?=@)")


@dataclass(frozen=True)
class OfferedFile:
    """A file to save. `uri` is None if it is too large to be embedded."""

    kind: str
    name: str
    uri: str | None
    num_bytes: int


class _Page:
    """The template's functions, which share out the room for images and files."""

    def __init__(self, answer: Answer) -> None:
        grids = sum(isinstance(block, ImageGrid) for block in answer.blocks())
        self._max_image_bytes = MAX_IMAGE_BYTES // max(1, grids)
        self._max_link_bytes = min(MAX_LINK_BYTES, MAX_FILES_BYTES // max(1, len(list(_files(answer)))))

    def kind(self, block: Block) -> str:
        return _KINDS.get(type(block), "text")

    def embedded(self, grid: ImageGrid) -> object:
        return embed(grid, self._max_image_bytes)

    def offered(self, file: File) -> OfferedFile:
        content = file.text.encode()
        kind = file.name.rpartition(".")[2]
        num_encoded = -(-len(content) // 3) * 4
        uri = f"data:{_TYPES[kind]};base64,{base64.b64encode(content).decode()}"
        return OfferedFile(
            kind, file.name, uri if num_encoded <= self._max_link_bytes else None, len(content)
        )

    def sections(self, answer: Answer) -> list[Section]:
        return [s for s in answer.sections if s.where != "text" and any(map(_is_filled, s.blocks))]


def page_of(answer: Answer) -> str:
    style, script = _template("style.css"), _template("sorting.js")
    # Only trusted texts are exempt from escaping: style sheet and script, whose bytes are hashed, and the policy.
    return _render(
        "page.html",
        answer=answer,
        page=_Page(answer),
        draw=draw,
        draw_bars=draw_bars,
        most_bars=_MOST_BARS,
        version=__version__,
        finished=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        style=Markup(style),
        script=Markup(script),
        policy=Markup(
            f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        ),
    )


def svg_of(title: str, block: Bars | Plot) -> str:
    """Return a chart as an SVG file, without scripts, links and fonts of its own."""
    drawn, bars = (draw(block), []) if isinstance(block, Plot) else (None, draw_bars(block))
    return _render("chart.svg", title=plain(title), block=block, c=drawn, bars=bars)


def in_notebook(page: str) -> str:
    """Return a page, or a text, for the output of a notebook's cell. A page keeps its own styles in a frame."""
    if not page.lstrip().lower().startswith("<!doctype"):
        return f"<pre>{escape(page)}</pre>"
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts allow-downloads" '
        'style="width: 100%; height: 40em; border: 0"></iframe>'
    )


def breakable(text: str) -> Markup:
    """Allow line breaks between the parts of a recipe, and none within the name of an option; escapes the parts."""
    unbroken = plain(text).replace("--", "-\N{WORD JOINER}-\N{WORD JOINER}")
    return Markup("<wbr>").join(_BREAK_POINT.split(unbroken))


def _files(answer: Answer) -> Iterator[File]:
    yield from answer.files
    for part in answer.parts:
        yield from _files(part)


def _is_filled(block: Block) -> bool:
    if isinstance(block, Table | ImageGrid):
        return bool(block.rows)
    if isinstance(block, Facts):
        return bool(block.facts)
    return bool(block.bars if isinstance(block, Bars) else block)


def _template(name: str) -> str:
    return resources.files("vivace.answers").joinpath("templates", name).read_text("utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _render(template: str, **variables: object) -> str:
    environment = Environment(
        loader=PackageLoader("vivace.answers"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "size": size,
        "count": count,
        "plain": plain,
        "breakable": breakable,
        "shortened": lambda text: breakable(short_form(text)),
    }
    return environment.get_template(template).render(**variables).lstrip()
