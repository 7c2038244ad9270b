"""The page of any answer escapes all text, needs nothing beside it, and keeps to its size."""

import base64
import hashlib
import io
import re
import subprocess
import sys

import pytest
from PIL import Image

from tests.pages import Page
from vivace.answers import page as pages
from vivace.answers.answer import (
    Answer,
    Bar,
    BarPart,
    Bars,
    Cell,
    Fact,
    Facts,
    File,
    ImageCell,
    ImageGrid,
    ImageRow,
    Plot,
    PlotPoint,
    Section,
    Table,
    TableColumn,
    TableRow,
)
from vivace.answers.images import AMPLIFIED, THUMBNAIL_SIDE, decode
from vivace.foundation.stats import Interval

HOSTILE = """<script>alert(1)</script> "double" 'single' & <img src=x onerror=alert(2)>"""
PICTURES = {
    "red": Image.new("RGB", (64, 64), (200, 100, 50)),
    "near": Image.new("RGB", (64, 64), (210, 100, 50)),
    "large": Image.new("RGB", (1024, 600), (1, 2, 3)),
}


def read(key: str) -> Image.Image | str:
    return PICTURES.get(key, "the image file is missing")


def grid(*keys: str | None, rows: int = 1, **fields: bool) -> ImageGrid:
    cells = tuple(ImageCell(key, HOSTILE) for key in keys)
    row = ImageRow(HOSTILE, "seed 0", cells, (("source", "red"),), HOSTILE, request=HOSTILE)
    return ImageGrid(tuple(HOSTILE for _ in keys), (row,) * rows, read, HOSTILE, **fields)


def everything(text: str = "text") -> Answer:
    """An answer with a block of each kind, all of whose texts are one text."""
    fact = Fact(text, text, text, "good", text)
    cells = (Cell(text, text, text, 2.0, "bad"), Cell("2", value=2.0))
    table = Table(
        (TableColumn(text, is_text=True), TableColumn("n")),
        (TableRow(cells, (text,), "bad"),) * 2,
        text,
        text,
        is_sorted=True,
    )
    bars = Bars(text, (Bar(text, text, 1, text, text, (BarPart(0, 50, "saving"),), badge=text),) * 30, text)
    calls = Bars(text, (Bar(text, text, 1, samples=((1.0, 1.0, 9.0),)),))
    at = Interval(1.0, 0.9, 1.1)
    points = (
        PlotPoint(at, at, "same", text, 1, text),
        PlotPoint(Interval(2.0, None, None), at, "changed", text, 2, text),
    )
    plot = Plot(text, text, text, points, text, limits=((1.0, text),), better="less", is_ratio=True)
    blocks = (
        text,
        table,
        Facts((fact,), text),
        bars,
        calls,
        plot,
        grid("red", "near", "gone", has_reference=True),
    )
    section = Section(text, blocks)
    return Answer(
        text, text, about=(text,), paragraphs=(text,), facts=Facts((fact, fact), are_tiles=True),
        sections=(section, section, Section(text, blocks, is_folded=True), Section("no page", (text,), where="text")),
        notes=(text,), commands=(Fact(text, text, is_command=True),), reproduce=text,
        files=(File("a.csv", text),), explains=True,
    )  # fmt: skip


def test_hostile_text_is_shown_as_text() -> None:
    whole = everything(HOSTILE)
    page = Page.of(Answer("x", HOSTILE, parts=(whole, whole)))
    assert page.html.lower().count("<script") == 1, "the page's own, which the policy names"
    assert {image.attributes["src"][:11] for image in page.all("img")} == {"data:image/"}
    assert not [e for e in page.root if any(name.startswith("on") for name in e.attributes)]
    assert page.text.count(HOSTILE) > 100
    assert "no page" not in page.text


def test_the_policy_allows_the_one_style_sheet_the_one_script_and_embedded_pictures_only() -> None:
    page = Page.of(everything())
    digests = []
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        digests.append(base64.b64encode(hashlib.sha256(content.encode()).digest()).decode())
    (policy,) = [m.attributes["content"] for m in page.all("meta") if "http-equiv" in m.attributes]
    assert policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digests[0]}'",
        f"script-src 'sha256-{digests[1]}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # The policy must come before anything that it governs.
    assert page.html.index("Content-Security-Policy") < page.html.index("<style>")


def test_nothing_is_fetched_and_nothing_is_styled_inline() -> None:
    page = Page.of(everything())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'href="data:[^"]*"', "", page.html))
    for element in page.root:
        assert element.tag not in {"link", "iframe", "object", "embed", "form", "base"}
        assert "style" not in element.attributes
        href = element.attributes.get("href", "#")
        assert href.startswith("#") or (href.startswith("data:") and "download" in element.attributes)


def test_every_link_has_its_place_and_every_line_of_a_table_is_as_wide_as_its_heading() -> None:
    page = Page.of(Answer("x", "two", parts=(everything(), everything())))
    ids = [e.attributes["id"] for e in page.root if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    targets = [a.attributes["href"][1:] for a in page.all("a") if "download" not in a.attributes]
    assert set(targets) <= set(ids)
    for table in page.all("table"):
        assert len({len(line.children) for line in table.all("tr")}) == 1
        assert all(cell.attributes.get("scope") for cell in table.all("th"))
        for line in table.all("tbody")[0].all("tr"):
            assert all("data-label" in cell.attributes for cell in line.all("td")[1:]), "phones need labels"
            assert line.children[2].attributes["data-value"] == "2.0", "what it sorts by"


def test_small_pictures_keep_their_pixels_and_large_ones_become_thumbnails() -> None:
    page = Page.of(Answer("x", "images", sections=(Section("", (grid("red", "large"),)),)))
    source, small, large = (
        Image.open(io.BytesIO(base64.b64decode(image.attributes["src"].partition(",")[2]))).convert("RGB")
        for image in page.all("img")
    )
    assert source.tobytes() == small.tobytes() == PICTURES["red"].tobytes()
    assert max(large.size) == THUMBNAIL_SIDE
    assert abs(large.width / large.height - 1024 / 600) < 0.1
    assert "thumbnails" in page.text


def test_differences_to_the_reference_are_amplified_and_switched_on_by_a_checkbox() -> None:
    columns = grid("red", "near", "red", "large", "gone", None, has_reference=True)
    page = Page.of(Answer("x", "images", sections=(Section("", (columns,)),)))
    (difference,) = page.all("img", "difference")
    pixels = Image.open(io.BytesIO(base64.b64decode(difference.attributes["src"].partition(",")[2])))
    assert abs(pixels.convert("RGB").getpixel((5, 5))[0] - 10 * AMPLIFIED) < 4
    notes = [e.text for e in page.all("span", "difference")]
    assert any("at most 10 of 255" in note for note in notes)
    assert any("identical" in note for note in notes)
    assert any("1024 × 600 px, the reference 64 × 64" in note for note in notes)
    assert "the image file is missing" in page.text
    assert page.all("input")[0].attributes["type"] == "checkbox"
    both = grid("red", "near", has_reference=True, shows_difference=True)
    shown = Page.of(Answer("x", "images", sections=(Section("", (both,)),)))
    assert not shown.all("input")
    assert [rect.attributes["class"] for rect in shown.all("rect")] == ["below", "above"], (
        "where they differ most"
    )
    alone = Page.of(Answer("x", "images", sections=(Section("", (grid("red", "red", has_reference=True),)),)))
    assert not alone.all("input"), "nothing differs"


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + b"0" * 20])
def test_a_damaged_picture_has_a_reason(content: bytes) -> None:
    assert decode(content) == "the image file is damaged"
    assert decode(None) == "the image file is missing"


def test_pictures_and_files_keep_to_the_size_of_a_mail(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = Answer(
        "x", "many", sections=(Section("", (grid("red", rows=9),)),), files=(File("a.json", "1" * 3000),)
    )
    spent = sum(len(image.attributes["src"]) for image in Page.of(answer).all("img"))
    monkeypatch.setattr(pages, "MAX_IMAGE_BYTES", spent // 2)
    monkeypatch.setattr(pages, "MAX_FILES_BYTES", 3000)
    page = Page.of(answer)
    assert sum(len(image.attributes["src"]) for image in page.all("img")) <= spent // 2
    assert "Shown are 4" in page.text
    assert "a.json is too large for a page" in page.text
    assert not page.all("a")


def test_a_file_is_saved_as_it_is() -> None:
    (link,) = Page.of(Answer("x", "y", files=(File("prompts.txt", "a\nü\n"),))).all("a")
    assert base64.b64decode(link.attributes["href"].partition(";base64,")[2]).decode() == "a\nü\n"


def test_a_page_needs_no_torch() -> None:
    code = (
        "import sys; from vivace.answers.page import page_of; from vivace.answers.answer import Answer;"
        "import vivace.report.run_answer; page_of(Answer('x', 'y'));"
        "found = {m.split('.')[0] for m in sys.modules} & {'torch', 'diffusers', 'matplotlib'};"
        "layers = {m for m in sys.modules if m.startswith(('vivace.benchmark', 'vivace.models', 'vivace.runtime'))};"
        "print(sorted(found | layers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
