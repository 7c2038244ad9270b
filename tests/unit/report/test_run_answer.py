"""What a comparison answers: its table, what it says of quality, its charts, its images, and how to repeat it."""

import csv
import io
import itertools
import json

from tests.make import make_record, make_round
from vivace.answers.answer import Answer, Bar, Bars, ImageGrid, Plot, Table
from vivace.answers.plots import DrawnBar, draw, draw_bars
from vivace.foundation.spec.figures import ImageFigures, NoiseFloor, QualityPass
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.record import ImageRecord, Outcome, Record
from vivace.report import Row, rows_of
from vivace.report.run_answer import answer_of
from vivace.report.run_charts import memory_plot, plots, waterfall
from vivace.report.run_images import image_grid
from vivace.report.summary import summary

SCORER = "clip@1"
NUM = 8  # images of a judged record


def failed(recipe: str, outcome: Outcome = Outcome.CRASHED, reason: str = "signal 9") -> Record:
    return make_record(recipe, make_round(0, outcome=outcome, reason=reason))


def timed(recipe: str, seconds: float, spread: float = 0.01) -> Record:
    """A measured record whose samples lie within `spread` of `seconds`."""
    return make_record(
        recipe, make_round(0, times=tuple(seconds * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1)))
    )


def drawn(recipe: str, identical: int = 0, black: int = 0, num: int = NUM) -> Record:
    """A record with images, of which the first are the baseline's, and the last black."""
    pictures = tuple(
        ImageRecord(
            index=i,
            prompt=f"prompt {i}",
            seed=0,
            sha256=f"{'baseline' if i < identical else recipe} {i}",
            faults=("black",) if i >= num - black else (),
        )
        for i in range(num)
    )
    times = (1.0, 1.01, 0.99) if recipe == "baseline" else (0.5, 0.51, 0.49)
    return make_record(recipe, make_round(0, times=times).model_copy(update={"pictures": pictures}))


def figures(record: Record, ssim: float = 0.9, kept: float | None = None) -> list[ImageFigures]:
    """Every image's SSIM and match, and its CLIP score as a share of the baseline's margin; both vary a little."""
    rated = []
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
        rated.append(
            ImageFigures(
                sha256=picture.sha256, reference=reference, prompt=picture.prompt, scorer=SCORER, alone=alone,
                against=against,
            )
        )  # fmt: skip
    return rated


def judged(
    *drawings: tuple[Record, list[ImageFigures]],
    limits: Limits | None = None,
    floor: NoiseFloor | None = None,
) -> list[Row]:
    by_key = {f.key: f for _, rated in drawings for f in rated}
    return rows_of([r for r, _ in drawings], QualityPass(by_key, SCORER, floor), limits or Limits())


def with_quality() -> list[Row]:
    """One recipe for each thing that can be said of quality."""
    base, greedy, few = drawn("baseline"), drawn("steps(1)"), drawn("steps(12)")
    return judged(
        (base, figures(base, kept=1.0)),
        (drawn("bf16"), figures(drawn("bf16"), ssim=0.98, kept=1.0)),
        (drawn("int4"), figures(drawn("int4"), ssim=0.4, kept=1.0)),
        (greedy, figures(greedy, kept=0.3)),
        (few, figures(few, kept=0.952)),
        (drawn("channels_last", identical=NUM), []),
        (drawn("steps(20)", black=2), []),
    )


def results(answer: Answer) -> Table:
    return next(block for block in answer.blocks() if isinstance(block, Table))


def column(table: Table, name: str) -> list[tuple[str, str]]:
    """The cells of a column as a page shows them: both lines."""
    number = [each.name for each in table.columns].index(name)
    cells = [row.cells[number] for row in table.rows]
    return [
        ((cell.main or cell.text).replace("\u00a0", " "), cell.below.replace("\u00a0", " ")) for cell in cells
    ]


def test_quality_stands_beside_speed_with_its_evidence() -> None:
    table = results(answer_of(with_quality()))
    assert column(table, "quality") == [
        ("-", ""),
        ("passed", "8 of 8 show what was asked"),
        ("failed", "8 of 8 show what was asked, but 8 are not the baseline's but another"),
        ("failed", "0 of 8 show what was asked"),
        ("unclear", "8 of 8 show what was asked, and that is not sure"),
        ("passed", "all 8 are the baseline's, to the last pixel"),
        ("failed", "2 of 8 images are broken (black)"),
    ]
    verdicts = [text for text, _ in column(table, "verdict")]
    assert verdicts == [
        "baseline",
        "faster",
        "failed quality",
        "failed quality",
        "faster",
        "faster",
        "failed quality",
    ]
    assert [text for text, _ in column(table, "speed-up")][2] == "2.00×", "what failed keeps its times"
    ranks = {row.cells[3].main or row.cells[3].text: row.cells[3].value for row in table.rows}
    assert ranks["faster"] < ranks["baseline"] < ranks["failed quality"]


def test_what_is_not_measured_or_does_not_pass_has_its_reason() -> None:
    rows = with_quality()
    for row, line in zip(rows, results(answer_of(rows)).rows, strict=True):
        is_open = row.judgement is not None and row.judgement.gate != "passed"
        assert (
            any(row.judgement.reason in note for note in line.notes) == is_open
            if row.judgement
            else not line.notes
        )
    answer = answer_of(
        rows_of([make_record("baseline"), failed("tiny_vae", Outcome.UNSUPPORTED, "no tiny VAE")])
    )
    assert results(answer).rows[1].notes == ("no tiny VAE",)
    assert column(results(answer), "verdict")[1][0] == "unsupported"


def test_a_failed_baseline_is_no_reference_and_nothing_measured_has_no_charts() -> None:
    rows = rows_of([failed("baseline", Outcome.TIMED_OUT, "no call ended within 600 s"), timed("bf16", 1.0)])
    answer = answer_of(rows)
    assert "not measured" in answer.headline
    assert column(results(answer), "speed-up")[1] == ("-", "")
    nothing = answer_of(rows_of([failed("baseline"), failed("bf16")]))
    assert not [block for block in nothing.blocks() if isinstance(block, Bars | Plot | ImageGrid)]


def test_what_several_rows_share_is_said_once() -> None:
    def warned(recipe: str, *warnings: str) -> Record:
        return make_record(recipe, make_round(0).model_copy(update={"warnings": warnings}))

    answer = answer_of(
        rows_of([warned("baseline", "hot"), warned("tiny_vae", "hot", "loud"), warned("bf16", "hot")])
    )
    assert "all rows: hot" in answer.notes
    assert [row.notes for row in results(answer).rows] == [(), ("loud",), ()]
    blind = judged(*((r, figures(r, ssim=0.98)) for r in map(drawn, ("baseline", "steps(8)", "bf16"))))
    assert sum("no CLIP model scored the images" in note for note in answer_of(blind).notes) == 1
    assert not any(row.notes for row in results(answer_of(blind)).rows)


def test_the_answer_is_the_summary_and_its_data_are_the_rows() -> None:
    rows = with_quality()
    answer = answer_of(rows, reproduce="vivace bench")
    assert " ".join([answer.headline, *answer.paragraphs]) == summary(rows)
    assert answer.verdict == "dtype(bf16)", "as fast as steps(1), which fails"
    assert answer.data == [row.to_json() for row in rows]
    table, rows_json = answer.files
    assert len(list(csv.DictReader(io.StringIO(table.text)))) == len(rows)
    assert json.loads(rows_json.text) == json.loads(json.dumps(answer.data))


def drawn_bars(chart: Bars | None) -> list[DrawnBar]:
    assert chart is not None
    return draw_bars(chart)


def bars_of(chart: Bars | None) -> tuple[Bar, ...]:
    assert chart is not None
    return chart.bars


def test_the_waterfall_falls_from_the_baseline_to_the_last_measured_row() -> None:
    records = [
        timed("baseline", 2.0),
        timed("tiny_vae", 1.5),
        failed("steps(9)"),
        timed("tiny_vae+steps(10)", 1.0),
    ]
    falls = drawn_bars(waterfall(rows_of(records)))
    assert [(f.bar.number, f.parts[0].look, f.bar.value) for f in falls] == [
        (1, "total", "2.00 s"),
        (2, "saving", "−0.50 s (−25 %)"),
        (4, "saving", "−0.50 s (−33 %)"),
    ]
    assert [(f.parts[0].start, f.parts[0].start + f.parts[0].width) for f in falls] == [
        (0, 100),
        (75, 100),
        (50, 75),
    ]
    for before, after in itertools.pairwise(falls):
        assert after.marks[0] in (before.parts[0].start, before.parts[0].start + before.parts[0].width)


def test_alternatives_are_compared_with_the_recipe_that_they_extend() -> None:
    texts = {
        "baseline": 2.0,
        "bf16": 1.5,
        "steps(10)": 1.0,
        "bf16+tiny_vae": 1.2,
        "bf16+tiny_vae+steps(10)": 0.5,
    }
    falls = bars_of(waterfall(rows_of([timed(text, s) for text, s in texts.items()])))
    assert [f.below.partition(", from ")[2] for f in falls] == ["", "", "row 1", "row 2", ""]
    assert [f.value for f in falls][2:] == ["−1.00 s (−50 %)", "−0.30 s (−20 %)", "−0.70 s (−58 %)"]


def test_a_loss_rises_and_overlapping_intervals_are_not_called_a_change() -> None:
    records = [timed("baseline", 1.0), timed("tiny_vae", 1.2), timed("tiny_vae+steps(10)", 1.21, spread=0.1)]
    assert [f.parts[0].look for f in bars_of(waterfall(rows_of(records)))] == ["total", "loss", "unclear"]
    few = [make_record(r, make_round(0, times=(t,))) for r, t in (("baseline", 2.0), ("steps(10)", 1.0))]
    assert bars_of(waterfall(rows_of(few)))[1].parts[0].look == "unclear", "without intervals"
    assert waterfall(rows_of([timed("baseline", 1.0), failed("bf16")])) is None


def test_speed_stands_against_quality_and_memory() -> None:
    quality, memory = plots(with_quality())
    assert quality.y_name == "CLIP margin kept, %"
    assert quality.limits == ((95.0, "limit 95 %"),)
    assert [p.is_out for p in quality.points] == [r.failed_quality for r in with_quality() if r.fidelity]
    assert sum(p.is_below for p in draw(quality).points) == 1, "steps(1) keeps 30 %: below the axis"
    assert memory.y_name == "peak memory, MB"
    base, other = drawn("baseline"), drawn("bf16")
    same, _ = plots(judged((base, figures(base, kept=1.0)), (other, figures(other, ssim=0.98, kept=1.0))))
    assert [p.label for p in same.points] == [
        "1 baseline: 1.00×, SSIM 1.000",
        "2 dtype(bf16): 2.00×, SSIM 0.980",
    ]
    assert not plots(rows_of([failed("baseline"), timed("bf16", 1.0), timed("steps(10)", 0.5)]))
    assert memory_plot(memory.points[:1]) is None


def grid_of(rows: list[Row]) -> ImageGrid:
    grid = image_grid(rows, lambda key: "none")
    assert grid is not None
    return grid


def order(grid: ImageGrid) -> list[int]:
    return [int(row.prompt.removeprefix("prompt ")) for row in grid.rows]


def test_every_recipe_has_its_worst_picture_before_any_has_its_second_worst() -> None:
    base, hopeless, good = drawn("baseline"), drawn("steps(1)"), drawn("tiny_vae")
    rated = [
        f.model_copy(update={"against": f.against | {"ssim": 0.1 * k}})
        for k, f in enumerate(figures(hopeless))
    ]
    fine = [
        f.model_copy(update={"against": f.against | {"ssim": 0.99 - 0.01 * k}})
        for k, f in enumerate(figures(good))
    ]
    grid = grid_of(judged((base, figures(base)), (hopeless, rated), (good, fine)))
    assert order(grid) == [0, 7, 1, 6, 2, 5, 3, 4]
    assert [cell.note for cell in grid.rows[0].cells][1] == "SSIM 0.000, this recipe’s worst"
