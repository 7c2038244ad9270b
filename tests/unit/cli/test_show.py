"""Results of several comparisons on standard output."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.make import make_record
from vivace.benchmark.run import Compared, Run
from vivace.cli.measuring.bench import show_run
from vivace.errors import Unsupported
from vivace.evidence.studies import StudyRun
from vivace.evidence.studies.study_file import read_study
from vivace.foundation.spec.figures import QualityPass
from vivace.foundation.spec.study import Study


def test_markdown_of_two_models_has_a_titled_table_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    comparisons = []
    for name in ("tiny-sd", "tiny-flux"):
        record = make_record("baseline")
        trial = record.trial.model_copy(
            update={"model": record.trial.model.model_copy(update={"name": name})}
        )
        comparisons.append(Compared((record.model_copy(update={"trial": trial}),), QualityPass()))
    run = Run(Study.of("tiny-sd", ["baseline"]), Path("store"), tuple(comparisons))
    assert show_run(run, "md", "vivace bench") == 0
    first, second = capsys.readouterr().out.split("tiny-flux on Test CPU\n\n")
    assert "tiny-sd on Test CPU" in first
    assert second.count("`baseline`") == first.count("`baseline`") == 1


def test_a_run_is_data_and_a_table() -> None:
    records = (make_record("baseline"), make_record("tiny_vae"))
    run = Run(
        Study.of("tiny-sd", ["baseline", "tiny_vae"]), Path("store"), (Compared(records, QualityPass()),)
    )
    first, second = run.to_dicts()
    assert (first["recipe"], second["recipe"]) == ("baseline", "tiny_vae")
    assert first["median_s"] == 1.0
    assert second["verdict"] == "unclear"
    assert first.keys() == second.keys()
    assert "| `tiny_vae` |" in str(run)
    assert run.rows()[1].speedup is not None


def test_a_dataframe_needs_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    run = Run(Study.of("tiny-sd", ["baseline"]), Path("store"), ())
    for data in (run, StudyRun(read_study("001"), None, ())):
        with pytest.raises(Unsupported, match="pip install pandas"):
            data.to_dataframe()


def test_a_dataframe_has_the_rows_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    compared = Compared((make_record("baseline"), make_record("tiny_vae")), QualityPass())
    run = Run(Study.of("tiny-sd", ["baseline", "tiny_vae"]), Path("store"), (compared,))
    assert run.to_dataframe() == run.to_dicts()
    assert list(run.charts()) == ["times.svg", "speed-and-memory.svg"]
