"""A run of AIPerf as a row: its folder of artifacts holds when each request was due, left and ended.

AIPerf (`aiperf profile --endpoint-type image_generation`, 0.13) writes profile_export.jsonl, a request a line, and
profile_export_aiperf.json, with its settings. AIPerf itself checks that an answer has an image.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vivace.benchmark.load_testing.load_rows import DONE, LoadRow, LoadStage, RequestSettings, Samples
from vivace.errors import StoreError
from vivace.foundation.untrusted.files import parse_json, read_bytes, read_text
from vivace.foundation.untrusted.streams import lines_of

_RECORDS, _SUMMARY = "profile_export.jsonl", "profile_export_aiperf.json"
_MAX_FILE = 500_000_000


def read_aiperf(folder: Path, label: str, slo_s: float | None) -> LoadRow:
    """Return the measured phase of a run of AIPerf.

    Args:
        folder: its --artifact-dir.
    """
    try:
        config = parse_json(read_bytes(folder / _SUMMARY, _MAX_FILE))["input_config"]
        (phase,) = [each for each in config["phases"] if each["kind"] == "profiling"]
        lines = lines_of(read_text(folder / _RECORDS, _MAX_FILE))
        records = [parse_json(line) for line in lines if line.strip()]
        stage, rate = _stage(phase)
        samples = _samples([each for each in records if each["metadata"]["benchmark_phase"] == "profiling"])
        began = min(each["metadata"]["request_start_ns"] for each in records)
        (model, *_) = [each["name"] for each in config["models"]["items"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise StoreError(
            f"{folder} holds no run of AIPerf 0.13 with clients or Poisson arrivals ({why}); give its --artifact-dir"
        ) from None
    prompts = json.dumps(config.get("datasets"), sort_keys=True)
    return LoadRow(
        label=label,
        request=RequestSettings(
            model=str(model),
            fields={},
            variants=((None, None),),
            prompts_sha256=hashlib.sha256(prompts.encode()).hexdigest(),
        ),
        server={},
        client={"engine": "aiperf"},
        began=_date(began),
        stage=stage,
        rate=rate,
        slo_s=() if slo_s is None else (slo_s,),
        samples=samples,
    )


def _stage(phase: dict[str, Any]) -> tuple[LoadStage, float | None]:
    if phase["type"] == "concurrency":
        return LoadStage(kind="closed", clients=int(phase["concurrency"])), None
    if phase["type"] == "poisson":
        return LoadStage(kind="poisson"), float(phase["rate"])
    raise ValueError(f"its load is {phase['type']}")


def _samples(records: list[dict[str, Any]]) -> Samples:
    """Return the requests in the order in which they were due."""
    rows = []
    for record in records:
        about = record["metadata"]
        sent = int(about["request_start_ns"])
        due = int(about.get("credit_issued_ns") or sent)
        rows.append((due, sent, int(about["request_end_ns"]), _outcome(record)))
    if not rows:
        raise ValueError("it has no requests")
    rows.sort()
    began = rows[0][0]
    return Samples(
        due_s=tuple((row[0] - began) / 1e9 for row in rows),
        sent_s=tuple((row[1] - began) / 1e9 for row in rows),
        ended_s=tuple((row[2] - began) / 1e9 for row in rows),
        outcome=tuple(row[3] for row in rows),
        variant=(0,) * len(rows),
    )


def _outcome(record: dict[str, Any]) -> str:
    error = record.get("error")
    if error is None:
        return "cancelled" if record["metadata"].get("was_cancelled") else DONE
    code = error.get("code")
    return (
        f"HTTP {code}" if isinstance(code, int) and code >= 100 else str(error.get("type") or "error")[:100]
    )


def _date(nanoseconds: int) -> str:
    return datetime.fromtimestamp(nanoseconds / 1e9, UTC).isoformat(timespec="seconds")
