"""What compiling cost, and from how many images on it is paid back."""

import csv
import io
import json
from typing import Any

import pytest

from tests.make import make_record, make_round
from vivace.answers.data import written
from vivace.foundation.spec.record import Round
from vivace.report.rows import Row, rows_of
from vivace.report.run_answer import answer_of, results_table
from vivace.report.summary import paid_back

BASE = (1.0, 1.02, 0.98, 1.0)
FAST = (0.5, 0.51, 0.49, 0.5)


def compiled(index: int, times: tuple[float, ...], first_call_s: float, hits: int, misses: int) -> Round:
    evidence: dict[str, Any] = {
        "compiled_graphs": 1,
        "graphs_from_cache": hits,
        "graphs_not_in_cache": misses,
    }
    made = make_round(index, times)
    return made.model_copy(update={"first_call_s": first_call_s, "evidence": evidence})


def rows(*rounds: Round, baseline: tuple[float, ...] = BASE) -> list[Row]:
    base = make_record("baseline", *(make_round(r.index, baseline) for r in rounds))
    return rows_of([base, make_record("compile", *rounds)])


def test_it_is_paid_back_when_the_gains_make_up_for_it() -> None:
    baseline, row = rows(compiled(0, FAST, 40.5, 0, 1), compiled(1, FAST, 5.5, 1, 0))
    assert baseline.compilation is None
    assert paid_back(baseline) == ""
    assert row.compilation is not None
    assert row.compilation.fresh_s == pytest.approx(40)
    assert row.compilation.cached_s == pytest.approx(5)
    assert row.compilation.break_even_images == 80
    message = "compiling took 40.0 s, 5.00 s from the disk cache; paid back from image 80 on"
    assert paid_back(row) == message
    assert results_table([baseline, row]).rows[1].notes == (message,)
    (_, cells) = csv.DictReader(io.StringIO(written(answer_of([baseline, row]), "csv")))
    assert (float(cells["compile_fresh_s"]), cells["break_even_images"]) == (pytest.approx(40), "80")
    (plain, compiled_row) = json.loads(written(answer_of([baseline, row]), "json"))
    assert plain["compilation"] is None
    assert compiled_row["compilation"]["break_even_images"] == 80


def test_without_a_gain_it_never_is() -> None:
    for times in (BASE, (2.0, 2.02, 1.98, 2.0)):
        _, row = rows(compiled(0, times, 40, 0, 1), compiled(1, times, 40, 0, 1))
        assert row.compilation is not None
        assert row.compilation.break_even_images is None
        assert "never paid back: no gain over the baseline was shown" in paid_back(row)
