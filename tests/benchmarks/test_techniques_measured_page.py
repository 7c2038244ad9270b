"""The page of all techniques, made of records: scaled, compared with the right baseline, sorted, losers included."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.record_files import write_records
from benchmarks.technique_cases import configurations, first_calls_file, record_file
from benchmarks.technique_records import read_records
from docgen import techniques_measured
from docgen.generate import NOTE
from docgen.technique_lines import measured_lines
from tests.make import make_record, make_round
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.stats import Verdict
from vivace.models.find import find_model


def case(recipe: str, steps: int, *rounds: Round) -> Record:
    record = make_record(recipe, *rounds)
    located = find_model("synthetic:flux-dev")
    workload = record.trial.workload.model_copy(update={"num_inference_steps": steps})
    trial = record.trial.model_copy(update={"model": located.model, "workload": workload, "device": "cuda"})
    environment = record.environment.model_copy(update={"device": "cuda", "device_name": "Test GPU"})
    return record.model_copy(update={"trial": trial, "environment": environment})


def round_of(seconds: float, **changes: Any) -> Round:
    return make_round(0, (seconds,) * 4).model_copy(update=changes)


def rows_of(page: str, first: str = "recipe") -> list[list[str]]:
    lines = page.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


@pytest.fixture
def results(tmp_path: Path) -> Path:
    records = [
        case("baseline", 8, round_of(1.0)),
        case("fuse_qkv", 8, round_of(0.5)),
        case("attention(math)", 8, round_of(4.0)),
        case(
            "attention(sage)", 8, make_round(0, outcome=Outcome.UNSUPPORTED, reason="sage is not installed")
        ),
        case("baseline", 8, round_of(2.0, conditions={"python_ms": 3.0, "python_after_ms": 3.0})),
        case("channels_last", 8, round_of(2.0, conditions={"python_ms": 6.0, "python_after_ms": 6.0})),
        case("compile", 8, round_of(1.0)),
        case("baseline", 28, round_of(3.5)),
        case("compile", 28, round_of(1.4)),
    ]
    write_records(tmp_path / record_file("flux-dev").name, records)
    write_records(
        tmp_path / first_calls_file(record_file("flux-dev")).name,
        [case("compile", 8, round_of(1.0, first_call_s=80.0))],
    )
    return tmp_path


def test_rows_are_scaled_and_sorted_and_the_losers_are_shown(results: Path) -> None:
    page = techniques_measured.page(NOTE, results)
    rows = rows_of(page)
    # eight tenths of a call are its steps: 0.2 + 0.8 * 28 / 8 = 3 times
    assert [row[:4] for row in rows] == [
        ["`compile`", "1.40 s ±0.0 %", "28", "2.50x [2.50, 2.50]"],
        ["`fuse_qkv`", "1.50 s ±0.0 %", "8", "2.00x [2.00, 2.00]"],
        ["`baseline`", "3.50 s ±0.0 %", "28", "1"],
        ["`channels_last`", "6.00 s ±0.0 %", "8", "1.00x [1.00, 1.00]"],
        ["`attention(math)`", "12.0 s ±0.0 %", "8", "0.25x [0.25, 0.25]"],
    ]
    assert [row[4] for row in rows] == ["faster", "faster", "baseline", "unclear", "slower"]
    assert rows[0][8:] == ["1.50 s", "80.0 s"]
    assert rows[1][9] == "-"
    assert "- `attention(sage)`: unsupported: sage is not installed" in page
    assert "- `channels_last`: the CPU ran Python 2.0 times as slowly" in page
    assert "## sd15" not in page, "there is no record of it"
    assert "Ten configurations" not in page, "they are not measured yet"


def test_a_row_without_an_interval_gives_way_to_one_with_it(results: Path) -> None:
    def seldom(recipe: str, seconds: float, calls: int = 2) -> Record:
        return case(recipe, 28, make_round(0, (seconds,) * calls))

    path = results / record_file("flux-dev").name
    records = [
        case("baseline", 8, round_of(2.0)),
        case("compile", 8, round_of(1.0)),
        seldom("baseline", 3.5),
        seldom("compile", 1.4),
        seldom("compile@denoiser,vae", 1.2),
        seldom("quantize(int8)", 5.0, calls=1),
    ]
    write_records(path, records)
    page = techniques_measured.page(NOTE, results)
    rows = {row[0]: row[2:5] for row in rows_of(page)}
    assert rows == {
        "`compile@denoiser,vae`": ["28", "2.92x", "unclear: 2 timed calls"],
        "`compile`": ["8", "2.00x [2.00, 2.00]", "faster"],
        "`baseline`": ["8", "1", "baseline"],
        "`quantize(int8)`": ["28", "0.70x", "unclear: 1 timed call"],
    }
    again = next(line for line in page.splitlines() if line.startswith("To be measured again: "))
    assert {word.strip("`.,") for word in again.split()[4:]} == {
        "compile", "compile@denoiser,vae", "quantize(int8)",
    }  # fmt: skip


def test_the_studys_configurations_stand_in_its_order_beside_what_it_published(results: Path) -> None:
    path = results / record_file("flux-dev").name
    recipes = ["baseline", *configurations("flux-dev")]
    write_records(path, [case(recipe, 28, round_of(10.0 / (1 + k))) for k, recipe in enumerate(recipes)])
    page = techniques_measured.page(NOTE, results)
    rows = rows_of(page, "configuration")
    assert [row[0] for row in rows] == [f"`{recipe}`" for recipe in recipes]
    assert rows[0][-2:] == ["10.32 s", "1.00x"]
    assert rows[1][-2:] == ["6.93 s", "1.49x"]
    assert rows[9][-2:] == ["5.30 s", "1.95x"]
    assert rows[9][2].startswith("10.00x")


def test_what_studies_claim_is_held_against_the_rows(tmp_path: Path) -> None:
    path = tmp_path / record_file("flux-dev").name

    def verdicts(**seconds: float) -> dict[str, str]:
        """The page's verdicts, by a word of each claim; a baseline takes 10 s."""
        named = {"int8": "quantize(int8)", "both": "quantize(int8)+compile", "compiled": "compile"}
        rows = [case("baseline", 28, round_of(10.0))]
        rows += [case(named.get(name, f"quantize({name})"), 28, round_of(s)) for name, s in seconds.items()]
        write_records(path, rows)
        by_claim = {}
        for line in techniques_measured.page(NOTE, tmp_path).splitlines():
            if line.startswith("- *"):
                claim, rest = line[3:].split("*: **", 1)
                by_claim[claim.split()[0] + (" and" if "and compiling" in claim else "")] = rest.split("**")[
                    0
                ]
        return by_claim

    assert verdicts() == {}
    assert verdicts(int8=12.0) == {"8-bit": "confirmed"}
    assert verdicts(int8=9.0) == {"8-bit": "not confirmed"}
    assert verdicts(compiled=6.0, both=5.0) == {"8-bit and": "confirmed"}
    assert verdicts(compiled=5.0, both=6.0) == {"8-bit and": "not confirmed"}
    assert verdicts(fp8_static=5.0) == {"fp8": "confirmed"}
    assert verdicts(fp8=9.0, fp8_weight=12.0) == {"torchao's": "confirmed in part"}


def _on(gpu: str, record: Record) -> Record:
    return record.model_copy(
        update={"environment": record.environment.model_copy(update={"device_name": gpu})}
    )


def test_each_gpu_has_a_table_whose_rows_are_compared_on_it(results: Path) -> None:
    path = results / record_file("flux-dev").name
    more = [
        _on("Another GPU", case(name, 8, round_of(s))) for name, s in (("baseline", 4.0), ("fuse_qkv", 2.0))
    ]
    write_records(path, [*read_records(path), *more])
    page = techniques_measured.page(NOTE, results)
    assert "### flux-dev on Test GPU\n" in page
    table = page.split("### flux-dev on Another GPU\n")[1]
    assert [(row[0], row[3].split()[0]) for row in rows_of(table)] == [
        ("`fuse_qkv`", "2.00x"),
        ("`baseline`", "1"),
    ]
    assert "`fuse_qkv`" not in page.split("Still to be measured")[1].splitlines()[0]


def test_no_verdict_where_the_gpu_waits_for_a_cpu_whose_speed_changed() -> None:
    """The speed-up of a row that mostly waits is that of the CPU."""
    verdicts = []
    for busy_s in (0.95, 0.3):
        conditions = {"python_ms": 6.0, "python_after_ms": 6.0}
        slow = tuple(round_of(2.0, conditions={"python_ms": 3.0, "python_after_ms": 3.0}) for _ in range(2))
        fast = tuple(round_of(1.0, conditions=conditions, gpu_busy_s=busy_s) for _ in range(2))
        records = [case("baseline", 8, *_numbered(slow)), case("fuse_qkv", 8, *_numbered(fast))]
        verdicts.append(measured_lines("flux-dev", records)["fuse_qkv", 8].verdict)
    assert verdicts == [Verdict.FASTER, Verdict.UNCLEAR]


def _numbered(rounds: tuple[Round, ...]) -> list[Round]:
    return [round_.model_copy(update={"index": index}) for index, round_ in enumerate(rounds)]
