"""The page shows what was measured and why the rest was not, escapes all text, and needs nothing beside it."""

import base64
import hashlib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest
from PIL import Image

from tests.make import make_record, make_round
from vivace.cli import app
from vivace.cli.measuring.bench import bench
from vivace.foundation.spec.figures import ImageFigures, NoiseFloor, QualityPass
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import ImageRecord, Outcome, Record
from vivace.report import render as bench_table
from vivace.report import rows_of, summary
from vivace.report.downloads import link_bytes, table_files
from vivace.report.grid import THUMBNAIL_SIDE
from vivace.report.page import Section, render_page
from vivace.report.summary import noise_floor

HOSTILE = """<script>alert(1)</script> "double" 'single' & <img src=x onerror=alert(2)>"""
COMMAND = "vivace bench --model tiny-sd --recipe 'steps(10)'"


VOID = {"meta", "img", "wbr", "input", "br"}


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    children: list["Element"] = field(default_factory=list)

    def __iter__(self) -> Iterator["Element"]:
        for child in self.children:
            yield child
            yield from child

    def all(self, tag: str, class_: str = "") -> list["Element"]:
        return [e for e in self if e.tag == tag and (not class_ or class_ in e.classes)]

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()


class Page(HTMLParser):
    """A rendered page: its elements with their attributes, and the text of each of them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.root = Element("", {})
        self.elements: list[tuple[str, dict[str, str]]] = []
        self._open = [self.root]
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        element = Element(tag, {k: v or "" for k, v in attrs})
        self.elements.append((tag, element.attributes))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop().tag == tag, f"</{tag}> closes nothing"

    def handle_data(self, data: str) -> None:
        if self._open[-1].tag not in {"style", "script"}:
            for element in self._open:
                element.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self) -> str:
        return self.root.text

    @property
    def results(self) -> list[dict[str, Element]]:
        """The lines of the results' table: cells by what a phone labels them with, and `recipe`."""
        (table,) = self.root.all("table", "results")
        lines = table.all("tbody")[0].all("tr")
        return [
            {c.attributes.get("data-label", "recipe" if c.tag == "th" else "#"): c for c in line.children}
            for line in lines
        ]

    @property
    def policy(self) -> str:
        return next(
            m["content"] for m in self.all("meta") if m.get("http-equiv") == "Content-Security-Policy"
        )


def png(width: int = 8, height: int = 8, colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (width, height), colour).save(out, "PNG")
    return out.getvalue()


def with_prompt(record: Record, prompt: str, sha256: str = "0" * 64) -> Record:
    """The record, having drawn one image of another prompt."""
    workload = record.trial.workload.model_copy(update={"prompts": (prompt,)})
    picture = ImageRecord(index=0, prompt=prompt, seed=0, sha256=sha256)
    return record.model_copy(
        update={
            "trial": record.trial.model_copy(update={"workload": workload}),
            "rounds": tuple(r.model_copy(update={"pictures": (picture,)}) for r in record.rounds),
        }
    )


def failed(recipe: str, outcome: Outcome, reason: str) -> Record:
    return make_record(recipe, make_round(0, outcome=outcome, reason=reason))


def section(*records: Record, command: str = COMMAND) -> Section:
    return Section(command, "2026-01-01T00:00:00+00:00", tuple(rows_of(records)))


def render(*records: Record, picture: bytes | None = None, command: str = COMMAND) -> Page:
    return Page(render_page([section(*records, command=command)], lambda _: picture))


def faster(recipe: str = "steps(10)") -> Record:
    return make_record(recipe, make_round(0, times=(0.5, 0.51, 0.49)))


def test_hostile_text_is_shown_as_text() -> None:
    environment = make_record("baseline").environment.model_copy(update={"device_name": HOSTILE})
    baseline = with_prompt(make_record("baseline"), HOSTILE).model_copy(update={"environment": environment})
    hostile = faster().trial.recipe.model_copy(update={"text": HOSTILE})
    odd = with_prompt(faster(), HOSTILE)
    odd = odd.model_copy(update={"trial": odd.trial.model_copy(update={"recipe": hostile})})
    hostile_round = odd.rounds[0].model_copy(
        update={
            "warnings": (HOSTILE,),
            "effects": {HOSTILE: {HOSTILE: HOSTILE}},
            "evidence": {HOSTILE: [HOSTILE]},
        }
    )
    odd = odd.model_copy(update={"rounds": (hostile_round,)})
    page = render(
        baseline,
        odd,
        failed("tiny_vae", Outcome.CRASHED, HOSTILE),
        picture=png(),
        command=HOSTILE,
    )
    assert page.html.lower().count("<script") == 1, "the page's own, which the policy names"
    assert page.all("script") == [{}]
    assert {i["src"][:22] for i in page.all("img")} == {"data:image/png;base64,"}
    assert all(set(i) == {"class", "src", "width", "height", "alt", "title"} for i in page.all("img"))
    # device, prompt, recipe, warning, reason and command are all there to read
    assert page.text.count(HOSTILE) >= 6


def test_the_policy_allows_the_one_style_sheet_the_one_script_and_embedded_pictures_only() -> None:
    page = render(make_record("baseline"), faster(), picture=png())
    digests = []
    for tag in ("style", "script"):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page.html, re.DOTALL)
        digests.append(base64.b64encode(hashlib.sha256(content.encode()).digest()).decode())
    assert page.policy.split("; ") == [
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
    page = render(make_record("baseline"), faster(), picture=png())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", re.sub(r'href="data:[^"]*"', "", page.html))
    for tag, attributes in page.elements:
        assert tag not in {"link", "iframe", "object", "embed", "form", "base"}
        assert "src" not in attributes or tag == "img"
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        href = attributes.get("href", "#")
        assert href.startswith("#") or (href.startswith("data:") and "download" in attributes)


def test_the_verdict_and_the_command_are_shown() -> None:
    records = [make_record("baseline"), faster()]
    page = render(*records)
    (verdict,) = page.root.all("p", "verdict")
    (more,) = page.root.all("p", "particulars")
    assert verdict.text.startswith("steps(10) is the fastest: 2.00x [")
    assert verdict.text.count(".") < 10, "one sentence"
    assert f"{verdict.text} {more.text}" == summary(rows_of(records))
    assert COMMAND in page.text


def test_the_first_column_of_the_pictures_is_the_baseline() -> None:
    shas = {"baseline": "a" * 64, "steps(10)": "b" * 64}
    pictures = {"a" * 64: png(colour="red"), "b" * 64: png(colour="blue")}
    records = [
        with_prompt(make_record("baseline"), "a fox", shas["baseline"]),
        with_prompt(faster(), "a fox", shas["steps(10)"]),
    ]
    page = Page(render_page([section(*records)], pictures.get))
    first, second = (i for i in page.all("img") if i["class"] == "picture")
    assert first["alt"] == first["title"] == "baseline: a fox (seed 0)"
    assert second["alt"] == "steps(10): a fox (seed 0)"
    # small images are embedded byte for byte
    for image, sha in ((first, shas["baseline"]), (second, shas["steps(10)"])):
        assert base64.b64decode(image["src"].partition(",")[2]) == pictures[sha]


def test_a_picture_of_the_same_bytes_is_called_identical() -> None:
    same = [with_prompt(make_record("baseline"), "a fox"), with_prompt(faster("channels_last"), "a fox")]
    assert render(*same, picture=png()).text.count("identical to the baseline’s") == 1
    other = [same[0], with_prompt(faster("channels_last"), "a fox", "b" * 64)]
    assert "identical to" not in Page(render_page([section(*other)], coloured)).text


@pytest.mark.parametrize("size", [(1024, 1024), (513, 96)])
def test_large_pictures_become_thumbnails(size: tuple[int, int]) -> None:
    page = render(with_prompt(make_record("baseline"), "a fox"), picture=png(*size))
    (image,) = page.all("img")
    kind, _, content = image["src"].partition(";base64,")
    assert kind == "data:image/webp"
    with Image.open(io.BytesIO(base64.b64decode(content))) as thumbnail:
        assert max(thumbnail.size) == THUMBNAIL_SIDE
        assert abs(thumbnail.width / thumbnail.height - size[0] / size[1]) < 0.1
    assert "thumbnails" in page.text


def test_a_missing_and_a_damaged_picture_leave_a_note() -> None:
    record = with_prompt(make_record("baseline"), "a fox")
    assert "the image file is missing" in render(record).text
    for damaged in (b"", b"no image", png()[:40], png(600, 600)[:200]):
        page = render(record, picture=damaged)
        assert "the image file is damaged" in page.text
        assert not page.all("img")


def test_recipes_that_were_not_measured_keep_their_row_and_reason() -> None:
    page = render(
        make_record("baseline"),
        failed("tiny_vae", Outcome.UNSUPPORTED, "no tiny VAE for this model"),
        failed("dtype(bf16)", Outcome.OUT_OF_MEMORY, "12 GB were wanted, 8 GB are free"),
        faster(),
    )
    assert "unsupported no tiny VAE for this model" in page.text
    assert "out of memory 12 GB were wanted, 8 GB are free" in page.text
    assert "Not measured and left out: 2, 3." in page.text


def test_a_failed_baseline_is_no_reference() -> None:
    reason = "no call ended within 600 s"
    page = render(failed("baseline", Outcome.TIMED_OUT, reason), faster())
    assert f"timed out {reason}" in page.text
    assert "Nothing can be compared with it." in page.text
    assert "no baseline" in page.text
    assert "×" not in page.text.replace("128 × 128", "").replace("prompts × 1", "")  # no speed-up


def test_nothing_measured_at_all_has_no_charts_and_no_pictures() -> None:
    page = render(
        failed("baseline", Outcome.CRASHED, "signal 11"), failed("steps(10)", Outcome.CRASHED, "signal 9")
    )
    assert "signal 11" in page.text
    assert "signal 9" in page.text
    assert not page.all("figure")
    assert not page.all("img")
    assert "Nothing has been measured yet." in render_page([], lambda _: None)


def test_a_warning_that_all_share_is_said_once() -> None:
    def warned(recipe: str, *warnings: str) -> Record:
        return make_record(recipe, make_round(0).model_copy(update={"warnings": warnings}))

    page = render(warned("baseline", "hot"), warned("tiny_vae", "hot", "loud"), warned("steps(10)", "hot"))
    assert page.text.count("Warning for every measured row: hot.") == 1
    assert page.text.count("hot") == 1
    assert "Warning: loud" in page.text


def test_what_a_reader_must_know_before_quoting_a_number() -> None:
    page = render(make_record("baseline"), faster())
    assert "Timings of this small model say nothing about SDXL or FLUX." in page.text
    assert "resident set" in page.text
    assert "350 MB were in use before the model was loaded" in page.text
    assert "changes the image" in page.text
    large = make_record("baseline")
    model = large.trial.model.model_copy(update={"name": "sdxl"})
    large = large.model_copy(update={"trial": large.trial.model_copy(update={"model": model})})
    assert "say nothing about" not in render(large).text
    for word in ("unclear", "unsupported", "no effect"):
        assert f"<dt>{word}</dt>" in page.html


def test_few_samples_have_no_interval() -> None:
    page = render(make_record("baseline", make_round(0, times=(1.0,))))
    assert "no interval" in page.text


def test_several_runs_are_listed_and_linked() -> None:
    html = render_page(
        [section(make_record("baseline"), faster()), section(make_record("baseline"))], lambda _: None
    )
    page = Page(html)
    ids = {attributes["id"] for _, attributes in page.elements if "id" in attributes}
    targets = [a["href"].removeprefix("#") for a in page.all("a") if "download" not in a]
    assert len(targets) == 2
    assert set(targets) <= ids


def test_every_id_is_unique_and_every_heading_cell_has_a_scope() -> None:
    html = render_page([section(make_record("baseline"), faster())] * 2, lambda _: png())
    page = Page(html)
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(cell.get("scope") for cell in page.all("th"))
    named = [v for _, a in page.elements for k, v in a.items() if k == "aria-labelledby"]
    assert set(named) <= set(ids)


def test_the_same_records_give_the_same_bytes() -> None:
    records = [make_record("baseline"), faster(), failed("tiny_vae", Outcome.CRASHED, "signal 11")]
    assert render(*records, picture=png(600, 600)).html == render(*records, picture=png(600, 600)).html


def test_twenty_long_recipes() -> None:
    def long(number: int) -> Record:
        record = make_record(
            "steps(10)", make_round(0, times=tuple(t * 0.95**number for t in (1.0, 1.01, 0.99)))
        )
        text = "+".join(f"technique_{number}(value={i})@denoiser" for i in range(7))
        recipe = record.trial.recipe.model_copy(update={"text": text})
        return record.model_copy(update={"trial": record.trial.model_copy(update={"recipe": recipe})})

    records = [make_record("baseline"), *map(long, range(19))]
    page = render(*records)
    for record in records:
        assert record.trial.recipe.text in page.text  # whole in the table, whatever the charts abbreviate
    assert len(records[-1].trial.recipe.text) > 200


def test_a_report_needs_no_torch() -> None:
    code = (
        "import sys, vivace.report.page as page; page.render_page([], lambda _: None);"
        "found = {m.split('.')[0] for m in sys.modules} & {'torch', 'diffusers', 'matplotlib'};"
        "layers = {m for m in sys.modules if m.startswith(('vivace.benchmark', 'vivace.models', 'vivace.runtime'))};"
        "print(sorted(found | layers))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SCORER = "clip@1"
NUM = 8  # images of a judged record


def drawn(recipe: str, identical: int = 0, black: int = 0) -> Record:
    """A record of NUM images, of which the first are the baseline's, and the last black."""
    pictures = tuple(
        ImageRecord(
            index=i,
            prompt=f"prompt {i}",
            seed=0,
            sha256=f"{'baseline' if i < identical else recipe} {i}",
            faults=("black",) if i >= NUM - black else (),
        )
        for i in range(NUM)
    )
    times = (1.0, 1.01, 0.99) if recipe == "baseline" else (0.5, 0.51, 0.49)
    return make_record(recipe, make_round(0, times=times).model_copy(update={"pictures": pictures}))


def figures(record: Record, ssim: float = 0.9, kept: float | None = None) -> list[ImageFigures]:
    """Every image's SSIM and match, and its CLIP score as a share of the baseline's margin; both vary a little."""
    rows = []
    for i, picture in enumerate(record.rounds[0].pictures):
        reference, jitter = f"baseline {i}", 0.01 * (-1) ** i
        is_reference = picture.sha256 == reference
        alone = {"sharpness": 5.0}
        if kept is not None:
            alone["clip_score"] = 30.0 if is_reference else 10 + 20 * (kept + jitter)
            alone |= {"clip_score_of_others": 10.0} if is_reference else {}
        against = (
            {} if is_reference else {"psnr_db": 33.25 - i, "ssim": ssim + jitter, "match": ssim + jitter}
        )
        rows.append(
            ImageFigures(
                sha256=picture.sha256,
                reference=reference,
                prompt=picture.prompt,
                scorer=SCORER,
                alone=alone,
                against=against,
            )
        )
    return rows


def coloured(sha256: str) -> bytes:
    """Another image for each recipe."""
    return png(64, 64, f"#{sum(sha256.encode()) % 256:02x}4080")


def quality_section(
    *drawings: tuple[Record, list[ImageFigures]],
    limits: Limits | None = None,
    floor: NoiseFloor | None = None,
) -> Section:
    by_key = {f.key: f for _, drawn_figures in drawings for f in drawn_figures}
    quality = QualityPass(by_key, SCORER, floor)
    return Section(
        COMMAND, "2026-01-01", tuple(rows_of([r for r, _ in drawings], quality, limits or Limits()))
    )


def with_quality() -> Section:
    """One recipe for each thing that can be said of quality."""
    base, bf16, int4 = drawn("baseline"), drawn("bf16"), drawn("int4")
    greedy, few, good = drawn("steps(1)"), drawn("steps(12)"), drawn("tiny_vae")
    same, broken = drawn("channels_last", identical=NUM), drawn("steps(20)", black=2)
    return quality_section(
        (base, figures(base, kept=1.0)),
        (bf16, figures(bf16, ssim=0.98, kept=1.0)),
        (int4, figures(int4, ssim=0.4, kept=1.0)),
        (greedy, figures(greedy, kept=0.3)),
        (few, figures(few, kept=0.952)),
        (good, figures(good, kept=1.0)),
        (same, figures(same, kept=1.0)),
        (broken, figures(broken, kept=1.0)),
    )


def test_quality_stands_beside_speed_with_its_evidence() -> None:
    page = Page(render_page([with_quality()], coloured))
    cells = [line["quality"].text.replace("\u00a0", " ") for line in page.results]
    assert cells == [
        "–",
        "passedCLIP kept 100 % [99, 101], match 0.980",
        "failedCLIP kept 100 % [99, 101], match 0.400",
        "failedCLIP kept 30 % [29, 31]",
        "unclearCLIP kept 95 % [94, 96]",
        "passedCLIP kept 100 % [99, 101]",
        "passedidentical",
        "failedbroken images",
    ]


def test_a_row_that_fails_on_quality_is_never_called_faster_but_keeps_its_times() -> None:
    section = with_quality()
    page = Page(render_page([section], coloured))
    for row, line in zip(section.rows, page.results, strict=True):
        if row.failed_quality:
            assert line["verdict"].text == "failed quality"
            assert line["verdict"].all("span", "verdict-failed")
            assert line["speed-up"].text.startswith("2.00×")
            assert line["s/image"].text.startswith("0.500 s")
        else:
            assert line["verdict"].text == ("baseline" if row.is_baseline else "faster")
    assert sum(row.failed_quality for row in section.rows) == 3


def test_why_a_row_does_not_pass_stands_under_its_recipe() -> None:
    section = with_quality()
    for row, line in zip(section.rows, Page(render_page([section], coloured)).results, strict=True):
        notes = [n.text for n in line["recipe"].all("span", "note") if "uality" in n.text]
        judgement = row.judgement
        if judgement is None or judgement.gate == "passed":
            assert notes == []
        else:
            start = "Failed quality" if row.failed_quality else "Quality unclear"
            assert notes == [f"{start}: {judgement.reason}"]


def test_a_doubt_that_several_rows_share_is_said_once() -> None:
    pair = [drawn("baseline"), drawn("steps(8)"), drawn("bf16"), drawn("tiny_vae")]
    page = Page(render_page([quality_section(*((r, figures(r, ssim=0.98)) for r in pair))], coloured))
    assert page.text.count("no CLIP model scored the images") == 1
    assert "The quality of 2, 3 and 4 is unclear: no CLIP model scored the images." in page.text
    cells = [line["quality"].text for line in page.results]
    assert cells == ["–", "unclearno CLIP score", "unclearno CLIP score, match 0.980", "unclearno CLIP score"]


def test_the_limits_and_the_noise_floor_are_said_once_below_the_table() -> None:
    base, other, again = drawn("baseline"), drawn("bf16"), drawn("attention(math)")
    floor = NoiseFloor(recipe="attention(math)", pictures=again.rounds[0].pictures)
    section = quality_section(
        (base, figures(base, kept=1.0) + figures(again, ssim=0.95, kept=1.0)),
        (other, figures(other, kept=1.0)),
        floor=floor,
        limits=Limits(match=0.85, ssim=0.8, psnr_db=20, clip=0.9),
    )
    page = Page(render_page([section], coloured))
    notes = "".join(e.text for e in page.root.all("div", "footnotes"))
    assert (
        "Quality passes with 90 % of the baseline’s CLIP margin; recipes that should give the same image"
        in notes
    )
    assert (
        "a mean match of at least 0.85, a mean SSIM of at least 0.8 and a mean PSNR of at least 20.0 dB"
        in notes
    )
    assert noise_floor(section.rows[0])[1:] in notes
    assert page.text.count("the baseline against itself") == 1
    assert page.results[1]["quality"].text.startswith("passedCLIP kept 100\u00a0%")
    assert page.results[1]["quality"].text.endswith("match 0.900, SSIM 0.900, PSNR 29.8 dB")
    without = Page(render_page([quality_section((base, []), (other, []))], coloured))
    assert "Quality passes" not in without.text
    assert [line["quality"].text for line in without.results] == ["–", "–"]


def test_every_line_of_the_results_is_as_wide_as_its_heading() -> None:
    base = drawn("baseline")
    section = quality_section((base, figures(base)), (failed("steps(9)", Outcome.CRASHED, "signal 9"), []))
    page = Page(render_page([section, with_quality()], coloured))
    for table in page.root.all("table"):
        widths = {
            sum(int(c.attributes.get("colspan", "1")) for c in line.children) for line in table.all("tr")
        }
        assert len(widths) == 1
    for line in page.root.all("table", "results")[1].all("tbody")[0].all("tr"):
        assert all("data-label" in cell.attributes for cell in line.children[2:]), "phones need labels"


def test_all_figures_are_there_to_read() -> None:
    base, other = drawn("baseline"), drawn("tiny_vae")
    page = Page(render_page([quality_section((base, figures(base)), (other, figures(other)))], coloured))
    (table,) = page.root.all("table", "picture-figures")
    headings, *lines = [[c.text for c in line.children] for line in table.all("tr")]
    assert dict(zip(headings, lines[1], strict=True)) == {
        "#": "2",
        "recipe": "tiny_vae",
        "identical": "0 of 8",
        "match": "0.900",
        "SSIM": "0.900",
        "PSNR, worst": "29.8, 26.2 dB",
        "sharpness": "5 (+0)",
    }
    assert lines[0][2:] == ["–", "–", "–", "–", "5"], "the baseline has no distance from itself"
    without = Page(render_page([quality_section((base, []), (other, []))], coloured))
    assert not without.root.all("table", "picture-figures")


def test_a_hollow_mark_means_failed_quality_and_nothing_else() -> None:
    section = with_quality()
    page = Page(render_page([section], coloured))
    for chart in page.root.all("svg", "scatter"):
        marks = chart.all("path", "mark")
        assert ["hollow" in m.classes for m in marks] == [r.failed_quality for r in section.rows]
        same = [r.record.trial.recipe.same_picture for r in section.rows]
        shapes = [m.attributes["d"] for m in marks]
        assert len(set(shapes)) == 2
        assert [s == shapes[0] for s in shapes] == same, "a changed image has a shape of its own"
    (key,) = page.root.all("ol", "key")
    assert ["failed quality" in e.text for e in key.all("li")] == [r.failed_quality for r in section.rows]
    assert "hollow: failed quality" in page.text
    passed = render(make_record("baseline"), faster())
    assert "hollow" not in passed.text
    assert not passed.root.all("path", "hollow")


def test_differences_are_switched_on_by_a_checkbox_without_a_script() -> None:
    base, other, same = drawn("baseline"), drawn("tiny_vae"), drawn("channels_last", identical=NUM)
    section = quality_section((base, figures(base)), (other, figures(other)), (same, figures(same)))
    page = Page(render_page([section, section], coloured))
    sections = page.root.all("section", "pictures")
    assert len(sections) == 2, "a switch for each"
    for pictures in sections:
        (switch,) = pictures.all("input")
        assert switch.attributes["type"] == "checkbox"
        (label,) = pictures.all("label")
        assert switch in label.children
        assert "4 times as bright" in label.text
        assert len(pictures.all("img", "difference")) == NUM
        assert all(
            i.attributes["alt"].startswith("Difference of tiny_vae")
            for i in pictures.all("img", "difference")
        )
        assert [m.text for m in pictures.all("span", "difference")] == ["identical"] * NUM
    assert ".pictures:has(.differences:checked) .compared .picture { display: none; }" in page.html
    alone = Page(render_page([quality_section((base, figures(base)), (same, figures(same)))], coloured))
    assert not alone.root.all("input"), "nothing differs"


def test_the_order_of_the_pictures_is_said() -> None:
    base, other = drawn("baseline"), drawn("tiny_vae")
    page = Page(render_page([quality_section((base, figures(base)), (other, figures(other)))], coloured))
    (pictures,) = page.root.all("section", "pictures")
    assert "Worst first, by the recipe’s loss against the baseline." in pictures.text
    prompts = [e.all("bdi")[0].text for e in pictures.all("th") if e.attributes["scope"] == "rowgroup"]
    assert prompts == [f"prompt {i}" for i in (1, 3, 5, 7, 0, 2, 4, 6)], "SSIM 0.89 before 0.91"


def test_the_pictures_of_a_page_share_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    base, other = drawn("baseline"), drawn("tiny_vae")
    section = quality_section((base, figures(base)), (other, figures(other)))
    single = Page(render_page([section], coloured))
    spent = sum(len(i["src"]) for i in single.all("img"))
    monkeypatch.setattr("vivace.report.page.MAX_IMAGE_BYTES", spent)
    two = Page(render_page([section, section], coloured))
    assert sum(len(i["src"]) for i in two.all("img")) <= spent
    assert "The worst 4 of 8" in two.text


def test_the_list_of_comparisons_gives_the_fastest_recipe_of_each_that_passes() -> None:
    unjudged, nothing = section(make_record("baseline"), faster()), section(make_record("baseline"))
    page = Page(render_page([with_quality(), unjudged, nothing], coloured))
    (contents,) = page.root.all("ol", "contents")
    passed, other, none = contents.all("li")
    for number, item in enumerate((passed, other, none), 1):
        (link,) = item.all("a")
        assert link.attributes["href"] == f"#run-{number}"
        assert "tiny-sd" in link.text
    (best,) = passed.all("span", "best")
    assert best.text == "dtype(bf16)", "as fast as steps(1), which fails"
    assert "2.00×" in passed.text
    assert "quality not judged" in other.text
    assert "1.00 s an image with baseline" in none.text


def test_a_page_may_have_a_title_of_its_own() -> None:
    page = Page(render_page([section(make_record("baseline"))], lambda _: None, title=HOSTILE))
    (heading,) = page.root.all("h1")
    assert heading.text == HOSTILE
    assert page.root.all("title")[0].text == f"{HOSTILE} · vivace"
    plain = render(make_record("baseline"))
    assert plain.root.all("h1")[0].text == "vivace report"
    assert plain.root.all("title")[0].text == "tiny-sd on Test CPU · vivace"


def saved(page: Page) -> dict[str, str]:
    """The files that can be saved from a page, by name; the latest of a name."""
    links = [a for a in page.all("a") if "download" in a]
    return {a["download"]: base64.b64decode(a["href"].partition(";base64,")[2]).decode() for a in links}


def test_the_tables_that_are_saved_are_those_of_bench() -> None:
    compared = with_quality()
    files = saved(Page(render_page([compared], coloured)))
    assert set(files) == {"vivace-tiny-sd-2026-01-01.csv", "vivace-tiny-sd-2026-01-01.json", "prompts.txt"}
    for kind in ("csv", "json"):
        assert files[f"vivace-tiny-sd-2026-01-01.{kind}"] == bench_table(compared.rows, kind)
    both = [compared, section(make_record("baseline"), faster())]
    rows = [row for each in both for row in each.rows]
    files = saved(Page(render_page(both, coloured)))
    for kind in ("csv", "json"):
        assert files[f"vivace-report.{kind}"] == bench_table(rows, kind), "two models: all in one file"


def test_a_table_that_is_too_large_is_saved_without_line_breaks_or_not_at_all() -> None:
    rows = with_quality().rows
    whole = link_bytes(bench_table(rows, "json"))
    _, dense = table_files(rows, "x", whole - 1)
    assert dense.uri is not None
    assert len(dense.uri) < whole
    content = base64.b64decode(dense.uri.partition(",")[2])
    assert json.loads(content) == json.loads(bench_table(rows, "json"))
    table, none = table_files(rows, "x", 7500)
    assert none.uri is None
    assert table.uri is not None
    page = Page(render_page([with_quality()] * 3, coloured))
    assert all(len(a["href"]) < 2_000_000 for a in page.all("a")), "Chromium's limit"


def test_the_page_says_where_a_table_is_that_it_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vivace.report.page.MAX_TABLE_BYTES", 10_000)
    page = Page(render_page([with_quality()], coloured))
    assert "JSON is too large for a page" in page.text
    assert "--format json" in page.text
    assert [a["download"] for a in page.all("a") if "json" in a.get("download", "")] == []


def test_columns_can_be_sorted_and_each_row_has_their_values() -> None:
    base = drawn("baseline")
    missing = failed("steps(9)", Outcome.CRASHED, "signal 9")
    compared = quality_section(
        (base, figures(base)), (drawn("bf16"), figures(drawn("bf16"), ssim=0.98)), (missing, [])
    )
    page = Page(render_page([compared], coloured))
    (table,) = page.root.all("table", "results")
    headings, *lines = table.all("tr")
    assert [h.attributes["data-sort"] for h in headings.children] == [
        "ascending", "ascending", "ascending", "descending", "ascending", "ascending", "ascending", "ascending",
        "descending",
    ]  # fmt: skip
    assert [h.attributes.get("aria-sort") for h in headings.children] == ["ascending"] + [None] * 8
    assert not table.all("button"), "without a script nothing looks as if it could be clicked"
    _, fast, lost = lines
    values = [c.attributes["data-value"] for c in fast.children]
    row = compared.rows[1]
    assert row.latency is not None
    assert row.speedup is not None
    assert row.memory is not None
    assert values[:2] == ["2", "dtype(bf16)"]
    assert [float(v) for v in values[2:4]] == [row.latency.median.point, row.speedup.point]
    assert [float(v) for v in values[6:]] == [row.memory.peak_bytes, row.first_call_s, row.latency.n]
    assert "data-value" not in lost.children[2].attributes, "a row without times stays last"


def test_verdicts_sort_from_faster_to_failed() -> None:
    page = Page(render_page([with_quality()], coloured))
    ranks = {line["verdict"].text: int(line["verdict"].attributes["data-value"]) for line in page.results}
    assert ranks["faster"] < ranks["baseline"] < ranks["failed quality"]
    ranks = {
        line["quality"].text[:6]: int(line["quality"].attributes["data-value"])
        for line in page.results
        if line["quality"].text != "–"
    }
    assert ranks["passed"] < ranks["unclea"] < ranks["failed"]


def test_speed_stands_against_quality_with_the_front_and_its_names() -> None:
    compared = with_quality()
    page = Page(render_page([compared], coloured))
    quality, memory = page.root.all("div", "plot")
    assert "CLIP margin kept, %" in quality.all("text", "axis-name")[0].text
    assert "peak memory, MB" in memory.all("text", "axis-name")[0].text
    for chart in quality.all("svg", "scatter"):
        assert "limit 95 %" in chart.text
        assert len(chart.all("line", "limit")) == 1
        assert len(chart.all("path", "below")) == 1, "steps(1) keeps 30 %: below the axis"
    (note,) = quality.all("p", "told")
    assert "4 2.00×, CLIP kept 30.0 %" in note.text.replace("\u00a0", " ").partition("Below the axis:")[2]
    on_front = note.text.partition("front:")[2].partition("Below")[0]
    assert "steps(1)" not in on_front, "it failed"
    assert "tiny_vae" in on_front


def test_where_every_recipe_keeps_the_image_ssim_is_plotted() -> None:
    base, other = drawn("baseline"), drawn("bf16")
    same = quality_section((base, figures(base, kept=1.0)), (other, figures(other, ssim=0.98, kept=1.0)))
    blind = quality_section((base, figures(base)), (other, figures(other, ssim=0.98)))
    for compared in (same, blind):
        quality, _ = Page(render_page([compared], coloured)).root.all("div", "plot")
        assert "SSIM to the baseline’s images" in quality.text
        assert [m.all("title")[0].text for m in quality.all("svg")[0].all("path", "mark")] == [
            "1 baseline: 1.00×, SSIM 1.000",
            "2 dtype(bf16): 2.00×, SSIM 0.980",
        ]


def test_the_timed_calls_are_drawn_and_told() -> None:
    page = render(make_record("baseline", make_round(0), make_round(1)), faster())
    (calls,) = page.root.all("ol", "samples")
    first, second = calls.all("li")
    assert "rounds 1.00 s, 1.00 s" in first.text
    assert first.all("path", "call")[0].attributes["d"].count("M") == 6
    assert second.all("path", "call")[0].attributes["d"].count("M") == 3


def test_a_comparison_can_be_measured_again_from_its_page() -> None:
    records = [make_record("baseline"), faster(), make_record("dtype(bf16)")]
    page = render(*records)
    typed, whole = page.root.all("pre", "command")
    assert typed.text == COMMAND
    words = shlex.split(whole.text.replace("\\\n", ""))
    assert words[:4] == ["vivace", "bench", "--model", "tiny-sd"]
    parameters = bench.make_context("bench", words[2:], **app.context_settings).params
    assert parameters["recipes"] == tuple(r.trial.recipe.text for r in records)
    workload = records[0].trial.workload
    assert {
        name: parameters[name] for name in ("height", "width", "num_inference_steps", "guidance_scale")
    } == {
        "height": workload.height,
        "width": workload.width,
        "num_inference_steps": workload.num_inference_steps,
        "guidance_scale": workload.guidance_scale,
    }
    assert saved(page)[str(parameters["prompts_file"])].splitlines() == list(workload.prompts)
    (prompts,) = page.root.all("details", "prompts")
    assert [p.text for p in prompts.all("li")] == list(workload.prompts)


def test_prompts_that_no_file_can_hold_are_shown_all_the_same() -> None:
    page = render(with_prompt(make_record("baseline"), "two\nlines"), with_prompt(faster(), "two\nlines"))
    assert len(page.root.all("pre", "command")) == 1
    assert "prompts.txt" not in saved(page)
    (prompts,) = page.root.all("details", "prompts")
    assert [p.text for p in prompts.all("li")] == ["two\nlines"]


def test_batches_and_prompts_encoded_beforehand_are_said() -> None:
    plain = make_record("baseline")
    assert "a call ·" not in render(plain).text
    workload = plain.trial.workload.model_copy(update={"batch": 4, "text": "embeddings"})
    batched = plain.model_copy(update={"trial": plain.trial.model_copy(update={"workload": workload})})
    assert "4 images per call · prompts encoded beforehand · 3 timed calls" in render(batched).text
