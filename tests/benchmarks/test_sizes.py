"""What a new size costs: graphs are counted per size, ways are compared with an uncompiled session, cases resume."""

from pathlib import Path
from unittest import mock

import pytest

from benchmarks import sizes
from benchmarks.command import run
from benchmarks.sizes import line, ratios, read_cases, recompiled
from benchmarks.sizes import sizes as command

WAY = "compile(backend=eager, blocks=repeated, sizes={announced})"


@pytest.mark.long
def test_sizes_of_a_case_are_a_line_and_are_measured_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = tmp_path / "sizes.jsonl"
    words = ["--record", str(record), "--device", "cpu", "--turns", "2", "--steps", "1"]
    words += ["--model", "tiny-sd", "--way", WAY]
    monkeypatch.setitem(sizes.SIZES, "tiny-sd", ("64x64 96x64", "64x96"))
    with mock.patch.object(sizes, "_in_a_process", sizes.measure):
        assert run(command, words) == 0
    lines = capfd.readouterr().out.splitlines()
    (case,) = read_cases(record).values()
    assert lines == [line(case)]
    assert case["recipe"] == "compile(backend=eager, blocks=repeated, sizes=[64x64, 96x64])"
    assert [entry["graphs"] for entry in case["warmed"]] == [3, 3]
    assert recompiled(case, unannounced=False) == 0
    assert [entry["size"] for entry in case["new"]] == ["64x64", "96x64", "64x96"]
    assert {size: len(ratios(case, size)) for size in case["step_s"]} == {"64x64": 2, "96x64": 2}
    monkeypatch.setattr(sizes, "_in_a_process", lambda *_: pytest.fail("it is in the record"))
    assert run(command, words) == 0
    assert capfd.readouterr().out.splitlines() == [f"{line(case)} (in the record already)"]


def test_the_committed_record_has_no_recompiles_where_it_promises_none() -> None:
    cases = read_cases(sizes.RECORD)
    assert {model for model, _ in cases} == {"tiny-sd", "tiny-flux"}
    for (_, way), case in cases.items():
        if "sizes=" in way:
            assert recompiled(case, unannounced=False) == 0
        if "sizes=any" in way:
            assert recompiled(case, unannounced=True) == 0
