"""Runs of AIPerf, in the form that its version 0.13 writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from vivace.cli import app
from vivace.errors import StoreError

START = 1_795_815_007_618_629_912
POISSON = {"name": "profiling", "kind": "profiling", "type": "poisson", "requests": 40, "rate": 4.0}
WARM_UP = {"name": "warmup", "kind": "warmup", "type": "poisson", "rate": 4.0, "exclude_from_results": True}


def record(due_s: float, late_s: float, seconds: float, phase: str = "profiling", **more: Any) -> str:
    due = START + round(1e9 * due_s)
    about = {
        "session_num": 0,
        "credit_issued_ns": due,
        "request_start_ns": due + round(1e9 * late_s),
        "request_end_ns": due + round(1e9 * seconds),
        "benchmark_phase": phase,
        "was_cancelled": False,
    }
    metrics = {"request_latency": {"value": 1000 * (seconds - late_s), "unit": "ms"}}
    return json.dumps({"metadata": about, "metrics": metrics, **more})


def run_of(folder: Path, phases: list[dict[str, Any]], records: list[str]) -> Path:
    config = {"models": {"items": [{"name": "tiny-sd"}]}, "phases": phases, "datasets": [{"name": "main"}]}
    (folder / "profile_export_aiperf.json").write_text(json.dumps({"input_config": config}))
    (folder / "profile_export.jsonl").write_text("\n".join(records) + "\n")
    return folder


def bench(*arguments: str) -> Result:
    options = ("bench", "--endpoint", "http://x/v1", "--format", "json", *arguments)
    return CliRunner().invoke(app, list(options), standalone_mode=False)


def test_a_run_of_users_has_goodput(tmp_path: Path) -> None:
    error = {"code": 429, "type": "Too Many Requests", "message": "full"}
    records = [record(-1.0, 0.0, 9.0, "warmup")]
    records += [record(0.25 * k, 0.1, 0.7 if k % 5 == 0 else 0.3) for k in range(40)]
    records += [record(10.0, 0.0, 0.01, error=error)]
    rows = tmp_path / "rows.json"
    result = bench(
        "--aiperf", str(run_of(tmp_path, [WARM_UP, POISSON], records)), "--slo", "0.5", "-o", str(rows)
    )
    assert result.return_value == 4, "a request had no image"
    (row,) = json.loads(result.stdout)
    assert (row["load"], row["rate"], row["requests"], row["errors"]) == ("users", 4.0, 41, {"HTTP 429": 1})
    assert row["latency_s"]["p50"] == pytest.approx(0.3), "from when they were due, not from when they left"
    good = 29 / 37
    assert row["within_slo"] == pytest.approx(good), "without the first tenth of the time"
    assert row["goodput"] == pytest.approx(4 * good)
    again = bench("--aiperf", str(tmp_path), "--slo", "0.5", "--against", str(rows))
    assert "users, over http://x/v1 (AIPerf): images/s 1.00x" in again.stderr


@pytest.mark.parametrize(
    ("phases", "records"),
    [
        ([{**POISSON, "type": "gamma"}], [record(0, 0, 1)]),
        ([WARM_UP], [record(0, 0, 1)]),
        ([POISSON], ["{}"]),
        ([POISSON], ["not json"]),
        ([POISSON], [record(0, 0, 1, "warmup")]),
    ],
)
def test_what_is_no_such_run_is_refused(tmp_path: Path, phases: list[Any], records: list[str]) -> None:
    result = bench("--aiperf", str(run_of(tmp_path, phases, records)))
    assert isinstance(result.exception, StoreError)
    assert "holds no run of AIPerf 0.13" in str(result.exception)
