"""What the baseline's canaries say of the machine, and what becomes of it."""

from datetime import UTC, datetime, timedelta

import pytest

from tests.make import make_record, make_round
from vivace.foundation.spec.record import Canary, Record, Round
from vivace.foundation.stats import Verdict
from vivace.report.rows import rows_of

START = datetime(2026, 1, 1, tzinfo=UTC)


def round_at(index: int, minute: float, seconds: float, canaries: tuple[Canary, ...] = ()) -> Round:
    times = tuple(seconds * x for x in (1.0, 1.001, 0.999, 1.0, 1.002, 0.998))
    started = (START + timedelta(minutes=minute)).isoformat()
    return make_round(index, times).model_copy(update={"started_at": started, "canaries": canaries})


def canary(minute: float, seconds: float) -> Canary:
    return Canary(started_at=(START + timedelta(minutes=minute)).isoformat(), samples_s=(seconds,) * 3)


def compared(
    slowing: float, *, with_canaries: bool, recipe_s: float = 1.0, rounds: int = 4
) -> tuple[Record, Record]:
    """A round lasts three minutes, in which the machine slows down by a share: baseline, recipe, canary."""
    baseline, recipe = [], []
    for k in range(rounds):
        at = 3 * k
        canaries = (canary(at + 2, 1 + slowing),) if with_canaries else ()
        baseline.append(round_at(k, at, 1.0, canaries))
        recipe.append(round_at(k, at + 1, recipe_s * (1 + slowing / 2)))
    return make_record("baseline", *baseline), make_record("tiny_vae", *recipe)


def test_a_machine_that_slows_down_in_every_round_makes_no_recipe_slower() -> None:
    fooled = rows_of(compared(0.2, with_canaries=False))[1]
    assert fooled.verdict is Verdict.SLOWER, "nothing tells the machine from the recipe"
    row = rows_of(compared(0.2, with_canaries=True))[1]
    assert row.speedup is not None
    assert row.speedup.point == pytest.approx(1, abs=0.01), "the baseline's time is that of the recipe's time"
    assert row.verdict is Verdict.UNCLEAR


def test_canaries_that_agree_make_nothing_wider() -> None:
    with_canaries, without = (
        rows_of(compared(0.0, with_canaries=has_canaries, recipe_s=0.8))[1] for has_canaries in (True, False)
    )
    assert with_canaries.verdict is Verdict.FASTER is without.verdict
    assert with_canaries.speedup is not None
    assert without.speedup is not None
    assert (with_canaries.speedup.half_width or 1) <= (without.speedup.half_width or 0)


def test_a_machine_that_moves_widens_every_interval() -> None:
    still, moving = (rows_of(compared(by, with_canaries=True, recipe_s=0.8))[1].speedup for by in (0.0, 0.2))
    assert still is not None
    assert moving is not None
    assert (moving.half_width or 0) > 2 * (still.half_width or 1)


def test_rounds_without_canaries_are_stored_as_before() -> None:
    plain = round_at(0, 0, 1.0)
    assert "canaries" not in plain.model_dump(mode="json")
    undated = plain.model_copy(update={"started_at": ""})
    rows = rows_of([make_record("baseline", undated), make_record("tiny_vae", undated)])
    assert rows[1].speedup is not None, "the time of day is read only where there is a canary"
    with_canary = round_at(0, 0, 1.0, (canary(2, 1.1),))
    assert Round.model_validate_json(with_canary.model_dump_json()) == with_canary
