"""The charts' geometry says what the rows say."""

import itertools

import pytest

from tests.make import make_record, make_round
from vivace.foundation.spec.record import ImageRecord, Outcome, Record
from vivace.report import Row, rows_of
from vivace.report.plots import breakdowns, waterfall
from vivace.report.samples import strips
from vivace.report.scatter import plots


def timed(recipe: str, seconds: float, peak_bytes: int = 450_000_000, spread: float = 0.01) -> Record:
    """A measured record whose samples lie within `spread` of `seconds`."""
    times = tuple(seconds * (1 + spread * k) for k in (-1, -0.5, 0, 0.5, 1))
    round_ = make_round(0, times=times)
    assert round_.memory is not None
    memory = round_.memory.model_copy(update={"peak_bytes": peak_bytes})
    return make_record(recipe, round_.model_copy(update={"memory": memory}))


def failed(recipe: str) -> Record:
    return make_record(recipe, make_round(0, outcome=Outcome.UNSUPPORTED, reason="not here"))


def black(record: Record) -> Record:
    """The record, having drawn nothing but black."""
    picture = ImageRecord(index=0, prompt="a fox", seed=0, sha256="0" * 64, faults=("black",))
    rounds = tuple(r.model_copy(update={"pictures": (picture,)}) for r in record.rounds)
    return record.model_copy(update={"rounds": rounds})


def rows(*records: Record) -> list[Row]:
    return rows_of(records)


def test_the_waterfall_falls_from_the_baseline_to_the_last_measured_row() -> None:
    falls = waterfall(
        rows(
            timed("baseline", 2.0),
            timed("tiny_vae", 1.5),
            failed("steps(9)"),
            timed("tiny_vae+steps(10)", 1.0),
        )
    )
    assert [f.number for f in falls] == [1, 2, 4, 4]
    assert [f.bar.kind for f in falls] == ["total", "saving", "saving", "total"]
    assert [(f.bar.start, f.bar.end) for f in falls] == [(0, 100), (75, 100), (50, 75), (0, 50)]
    assert [f.change for f in falls] == ["", "−0.50 s (−25 %)", "−0.50 s (−33 %)", ""]
    assert falls[-1].time == "1.00 s"


def test_each_bar_of_the_waterfall_hangs_where_the_one_before_ended() -> None:
    texts = ["baseline", "bf16", "bf16+tiny_vae", "bf16+tiny_vae+steps(9)", "bf16+tiny_vae+steps(9)+fuse_qkv"]
    times = (2.0, 1.1, 1.7, 1.69, 2.6)
    falls = waterfall(rows(*[timed(text, s) for text, s in zip(texts, times, strict=True)]))
    for before, after in itertools.pairwise(falls):
        assert before.end == after.previous_end
        assert after.previous_end in (after.bar.start, after.bar.end)
        assert 0 <= after.bar.start <= after.bar.end <= 100


def test_alternatives_are_compared_with_the_recipe_that_they_extend() -> None:
    falls = waterfall(
        rows(
            timed("baseline", 2.0),
            timed("bf16", 1.5),
            timed("steps(10)", 1.0),
            timed("bf16+tiny_vae", 1.2),
            timed("bf16+tiny_vae+steps(10)", 0.5),
        )
    )
    assert [f.against for f in falls] == [None, None, 1, 2, None]
    assert [f.change for f in falls][2:] == ["−1.00 s (−50 %)", "−0.30 s (−20 %)", "−0.70 s (−58 %)"]
    assert [f.previous_end is None for f in falls] == [True, False, True, True, False]
    assert [f.end is None for f in falls] == [False, True, True, False, True]


def test_a_loss_rises_and_overlapping_intervals_are_not_called_a_change() -> None:
    falls = waterfall(
        rows(timed("baseline", 1.0), timed("tiny_vae", 1.2), timed("tiny_vae+steps(10)", 1.21, spread=0.1))
    )
    assert [f.bar.kind for f in falls] == ["total", "loss", "unclear", "total"]
    assert falls[1].change == "+0.20 s (+20 %)"


def test_without_intervals_no_change_is_called_one() -> None:
    few = [make_record(r, make_round(0, times=(t,))) for r, t in (("baseline", 2.0), ("steps(10)", 1.0))]
    assert waterfall(rows(*few))[1].bar.kind == "unclear"


def test_a_lone_measurement_has_no_waterfall_and_no_scatter() -> None:
    lone = rows(timed("baseline", 1.0), failed("steps(10)"))
    assert waterfall(lone) == ()
    assert plots(lone) == ()
    assert waterfall([]) == ()
    assert breakdowns([]) == ()


def test_stages_fill_their_share_on_one_scale() -> None:
    slow, fast = breakdowns(rows(timed("baseline", 2.0), failed("tiny_vae"), timed("steps(10)", 1.0)))
    assert (slow.number, fast.number) == (1, 3)
    assert [b.kind for b in slow.bars] == ["text", "steps", "vae", "other"]
    assert [b.width for b in slow.bars] == pytest.approx([1, 80, 10, 9])
    assert slow.bars[-1].end == pytest.approx(100)
    assert fast.bars[-1].end == pytest.approx(50)
    assert dict(fast.figures)["steps"] == "0.800 s"


def test_rows_that_fail_on_quality_are_marked_in_every_chart() -> None:
    greedy = black(timed("steps(1)", 0.1))
    all_rows = rows(timed("baseline", 2.0), greedy, timed("tiny_vae", 1.0), black(timed("bf16", 0.5)))
    (memory,) = plots(all_rows)
    assert [(p.kind, p.failed) for p in memory.wide.points] == [
        ("baseline", False),
        ("changed", True),
        ("changed", False),
        ("same", True),
    ]
    assert [f.failed for f in waterfall(all_rows)] == [False, True, False, True]
    assert [b.failed for b in breakdowns(all_rows)] == [False, True, False, True]
    calls = strips(all_rows)
    assert calls is not None
    assert [s.failed for s in calls.strips] == [False, True, False, True]
