"""A hook of MkDocs that lets the same Markdown be read on a git host and on the site.

The README is the home page. A file outside docs/ that a page links to, such as a record under results/, is published
where the link leads. Lists and <details> are read as CommonMark has them.
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}
"""Pages outside docs/, and what the site calls them."""
_SOURCES = {published: source for source, published in PAGES.items()}
_LINK = re.compile(r"(?<=\]\()([^)#\s:]+)|(?<=src=\")([^\"#\s:]+)")
_ITEM = re.compile(r"[-*] |\d\. ")
_CELL = re.compile(r"<td[ >].*?</td>")
_CODE = re.compile(r"<code>[^<]*</code>")
_BREAK = re.compile(r"(?<=[+,])(?! )|(?=@)")
_UNIT = re.compile(r"(?<=\d) (?=(?:m?s|[kMG]B|dB|px|%)[^\w])|(?<=\d,) (?=[-\d.]+\])")


def on_files(files: Files, config: Any) -> Files:
    for source, published in PAGES.items():
        files.append(File.generated(config, published, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    here = page.file.src_uri
    source = _SOURCES.get(here, f"docs/{here}")

    def to_published(match: re.Match[str]) -> str:
        target = normpath(join(dirname(source), match[0]))
        if target.startswith("../") or not (ROOT / target).is_file():
            return match[0]  # MkDocs says that it leads nowhere
        published = PAGES.get(target, target.removeprefix("docs/"))
        if files.get_file_from_path(published) is None:
            files.append(File.generated(config, published, abs_src_path=str(ROOT / target)))
        return relpath(published, dirname(here) or ".")

    markdown = markdown.replace("<details>", '<details markdown="1">')
    return _lists_as_commonmark(_LINK.sub(to_published, markdown))


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """In tables, lines of a recipe break between its parts; numbers keep their units, intervals their ends."""

    def narrow(cell: re.Match[str]) -> str:
        text = _CODE.sub(lambda code: _BREAK.sub("<wbr>", code[0]), cell[0])
        return _UNIT.sub("&nbsp;", text)

    return _CELL.sub(narrow, html)


def _lists_as_commonmark(markdown: str) -> str:
    """What Python-Markdown wants of lists: a blank line before the first item, contents four spaces in."""
    lines: list[str] = []
    in_code = False
    in_items = False  # the lines since the last blank one begin with an item
    missing = 0  # spaces, of the lines in the current item
    for line in markdown.split("\n"):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        item = None if in_code else _ITEM.match(line)
        if item:
            missing = 4 - len(item[0])
            if lines and lines[-1] and not in_items:
                lines.append("")
        elif line.startswith("  "):
            line = " " * missing + line
        elif line:
            missing = 0
        if not lines or not lines[-1]:
            in_items = bool(item)
        lines.append(line)
    return "\n".join(lines)
