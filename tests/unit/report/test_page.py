"""The page shows what was measured and why the rest was not, escapes all text, and needs nothing beside it."""

import base64
import hashlib
import io
import re
import subprocess
import sys
from collections.abc import Sequence
from html.parser import HTMLParser

import pytest
from PIL import Image

from tests.make import make_record, make_round
from vivace.report import rows_of, summary
from vivace.report.page import THUMBNAIL_SIDE, Section, render_page
from vivace.spec.record import Outcome, Picture, Record

HOSTILE = """<script>alert(1)</script> "double" 'single' & <img src=x onerror=alert(2)>"""
COMMAND = "vivace bench --model tiny-sd --recipe 'steps(10)'"


class Page(HTMLParser):
    """A rendered page: its elements with their attributes, and the text of each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.html = html
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes in self.elements if name == tag]

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
    """The record, having drawn one picture of another prompt."""
    workload = record.trial.workload.model_copy(update={"prompts": (prompt,)})
    picture = Picture(index=0, prompt=prompt, seed=0, sha256=sha256)
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
    shown = odd.rounds[0].model_copy(
        update={
            "warnings": (HOSTILE,),
            "effects": {HOSTILE: {HOSTILE: HOSTILE}},
            "evidence": {HOSTILE: [HOSTILE]},
        }
    )
    odd = odd.model_copy(update={"rounds": (shown,)})
    page = render(
        baseline,
        odd,
        failed("tiny_vae", Outcome.CRASHED, HOSTILE),
        picture=png(),
        command=HOSTILE,
    )
    assert "<script" not in page.html.lower()
    assert not page.all("script")
    assert {i["src"][:22] for i in page.all("img")} == {"data:image/png;base64,"}
    assert all(set(i) == {"src", "width", "height", "alt", "title"} for i in page.all("img"))
    # device, prompt, recipe, warning, reason and command are all there to read
    assert page.text.count(HOSTILE) >= 6


def test_the_policy_allows_the_one_style_sheet_and_embedded_pictures_only() -> None:
    page = render(make_record("baseline"), faster(), picture=png())
    style = re.search(r"<style>(.*?)</style>", page.html, re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style.group(1).encode()).digest()).decode()
    assert page.policy.split("; ") == [
        "default-src 'none'",
        f"style-src 'sha256-{digest}'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    # The policy must come before anything that it governs.
    assert page.html.index("Content-Security-Policy") < page.html.index("<style>")


def test_nothing_is_fetched_and_nothing_is_styled_inline() -> None:
    page = render(make_record("baseline"), faster(), picture=png())
    assert not re.search(r"https?:|//[a-z]|@import|url\(", page.html)
    for tag, attributes in page.elements:
        assert tag not in {"script", "link", "iframe", "object", "embed", "form", "base"}
        assert "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert attributes.get("href", "#").startswith("#")


def test_the_verdict_and_the_command_are_shown() -> None:
    records = [make_record("baseline"), faster()]
    page = render(*records)
    assert summary(rows_of(records)) in page.text
    assert "steps(10) is the fastest" in page.text
    assert COMMAND in page.text


def test_the_first_column_of_the_pictures_is_the_baseline() -> None:
    shas = {"baseline": "a" * 64, "steps(10)": "b" * 64}
    pictures = {"a" * 64: png(colour="red"), "b" * 64: png(colour="blue")}
    records = [
        with_prompt(make_record("baseline"), "a fox", shas["baseline"]),
        with_prompt(faster(), "a fox", shas["steps(10)"]),
    ]
    page = Page(render_page([section(*records)], pictures.get))
    first, second = page.all("img")
    assert first["alt"] == first["title"] == "baseline: a fox (seed 0)"
    assert second["alt"] == "steps(10): a fox (seed 0)"
    # small pictures are embedded byte for byte
    for image, sha in ((first, shas["baseline"]), (second, shas["steps(10)"])):
        assert base64.b64decode(image["src"].partition(",")[2]) == pictures[sha]


def test_a_picture_of_the_same_bytes_is_called_identical() -> None:
    same = [with_prompt(make_record("baseline"), "a fox"), with_prompt(faster("channels_last"), "a fox")]
    assert render(*same, picture=png()).text.count("identical to the baseline's") == 1
    other = [same[0], with_prompt(faster("channels_last"), "a fox", "b" * 64)]
    assert "identical to" not in render(*other, picture=png()).text


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
    assert "the picture's file is missing" in render(record).text
    for damaged in (b"", b"no picture", png()[:40], png(600, 600)[:200]):
        page = render(record, picture=damaged)
        assert "the picture's file is damaged" in page.text
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
    assert "350 MB were there before the model was loaded" in page.text
    assert "changes the picture" in page.text
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
    targets = [a["href"].removeprefix("#") for a in page.all("a")]
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


def test_the_pictures_distance_from_the_baseline_is_said() -> None:
    from vivace.spec.figures import PictureFigures

    base, other = make_record("baseline", make_round(0)), make_record("tiny_vae", make_round(0))
    found = {}
    for picture in base.rounds[0].pictures:
        row = PictureFigures(
            sha256=picture.sha256,
            reference=picture.sha256,
            alone={"sharpness": 1.0},
            against={"psnr_db": 33.25},
        )
        found[picture.sha256, picture.sha256] = row
    html = render_page([Section(COMMAND, "2026-01-01", tuple(rows_of([base, other], found)))], lambda _: None)
    assert Page(html).text.count("PSNR 33.2 dB, worst 33.2") == 1, "the baseline has no distance from itself"
    plain = render_page([Section(COMMAND, "2026-01-01", tuple(rows_of([base, other])))], lambda _: None)
    assert "PSNR" not in plain
