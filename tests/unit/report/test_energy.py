"""Energy and cost of images in rows, tables and pages."""

import csv
import io
from typing import Any

import pytest

from tests.make import make_record, make_round
from vivace.answers.data import written
from vivace.foundation.spec.record import GpuWindow
from vivace.report.rows import Row, priced, rows_of
from vivace.report.run_answer import answer_of
from vivace.report.usage import usage_table


def window(energy_j: float | None, **fields: Any) -> GpuWindow:
    source = None if energy_j is None else "counter"
    values: dict[str, Any] = {"calls": 4, "seconds": 2.0, "energy_from": source, "power_w": 500.0}
    values |= {"sm_clock_mhz": 1700.0, "min_sm_clock_mhz": 1600.0, "max_temperature_c": 60.0}
    return GpuWindow(energy_j=energy_j, **values | fields)


def row_of(*windows: GpuWindow | None) -> Row:
    rounds = [make_round(i).model_copy(update={"gpu": w}) for i, w in enumerate(windows)]
    return rows_of([make_record("baseline", *rounds)])[0]


def cells(row: Row) -> dict[str, str]:
    (fields,) = csv.DictReader(io.StringIO(written(answer_of([row]), "csv")))
    return fields


def test_energy_is_told_for_an_image() -> None:
    row = row_of(window(2000.0), window(2400.0, max_temperature_c=66.0, throttled=("power cap",)))
    assert row.gpu is not None
    assert row.gpu.energy_j == pytest.approx(550), "joules of four calls, the median of two rounds"
    fields = cells(row)
    assert (fields["energy_from"], fields["power_w"], fields["gpu_temperature_c"]) == (
        "counter",
        "500.0",
        "66.0",
    )
    assert fields["throttled"] == "power cap"
    assert not any("held down" in warning for warning in row.warnings), "large models run at the power cap"
    (line,) = usage_table([("row", row)]).rows
    assert {"550 J", "500 W", "1700 MHz", "power cap"} <= {cell.text for cell in line.cells}


def test_hard_throttling_is_a_warning_and_mixed_sources_are_said() -> None:
    hot = window(2000.0, throttled=("temperature (hardware)",), energy_from="sampled power")
    row = row_of(window(2000.0), hot)
    assert "the GPU's clocks were held down: temperature (hardware)" in row.warnings
    assert row.gpu is not None
    assert row.gpu.energy_from == "counter and sampled power"


def test_what_cannot_be_read_is_empty_with_a_reason() -> None:
    unread = GpuWindow(calls=4, reason="nvidia-ml-py is not installed")
    row = row_of(unread)
    assert cells(row)["energy_j"] == ""
    assert row.to_json()["gpu"]["reason"] == "nvidia-ml-py is not installed"
    assert row_of(None).gpu is None
    assert row_of(None).to_json()["gpu"] is None


def test_the_cost_is_a_column_only_if_it_is_asked() -> None:
    rows = rows_of([make_record("baseline", make_round(0, (0.9,) * 5))])
    for format_ in ("table", "md"):
        assert "cost" not in written(answer_of(rows), format_)
        assert "cost of 1,000" in written(answer_of(priced(rows, 4.0)), format_)
    assert cells(rows[0])["cost_per_1000"] == ""
    (row,) = priced(rows, 4.0)
    assert float(cells(row)["cost_per_1000"]) == pytest.approx(1.0), "900 s at 4 an hour"
    assert "1.00" in {cell.text for cell in usage_table([("row", row)]).rows[0].cells}
