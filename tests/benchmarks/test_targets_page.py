"""What was asked of fused models stands beside what the records have, or the page says that they have nothing."""

from pathlib import Path

import pytest

from docgen.targets import LINES, TARGETS, Target, Timed, fastest_of, page, verdict
from vivace.foundation.stats import Interval

RESULTS = Path(__file__).parents[2] / "results"


def timed(low: float, point: float, high: float) -> Timed:
    return Timed("H200", "fused(fp8)", Interval(point, low, high), None, "a.json")


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        (timed(1.8, 1.9, 1.99), "reached"),
        (timed(1.8, 1.9, 2.1), "reached within the interval"),
        (timed(1.9, 2.1, 2.2), "missed by 5 %, within the interval"),
        (timed(2.3, 2.5, 2.7), "missed by 25 %"),
    ],
)
def test_a_time_is_judged_by_its_interval(latency: Timed, expected: str) -> None:
    assert verdict(Target("a model", "flux-dev", 28, "-", "-", 2.0), latency) == expected


def test_each_target_is_in_the_table_with_a_record_or_in_the_list_of_those_without() -> None:
    text = page("", RESULTS)
    (without,) = [line for line in text.splitlines() if line.startswith("No record on an H200: ")]
    names = without.partition(": ")[2].rstrip(".").split("; ")
    for target in TARGETS:
        cards = {of_card.card for of_card in fastest_of(target, RESULTS)}
        rows = [line for line in text.splitlines() if line.startswith(f"| {target.name}, {target.steps} |")]
        assert len(rows) == len(cards)
        assert all("](../../results/" in row for row in rows)
        assert (target.name in names) == ("H200" not in cards)


def test_the_shortest_time_counts_whichever_file_it_lies_in() -> None:
    rows = {line[2:].split(",")[0]: line for line in page("", RESULTS).splitlines() if "| H200 |" in line}
    assert "2.61 s ±0.1 %" in rows["Qwen-Image 2.1"]
    assert "missed by 19 % | [record](../../results/new-prompts.jsonl)" in rows["Qwen-Image 2.1"]
    assert "| reached | [record](../../results/new-prompts.jsonl)" in rows["Qwen-Image 2512"]
    assert "new-prompts" not in rows["FLUX.2 [klein] 4B"], "its row there is of an edit"
    large = Target("-", "qwen-image-2.1", 40, "-", "-", 1.0, height=2048)
    assert fastest_of(large, RESULTS) == []


def test_what_is_not_reached_has_a_reason() -> None:
    text = page("", RESULTS)
    reasons = text.partition("## Why they are missed")[2]
    for target in TARGETS:
        verdicts = [
            verdict(target, of_card) for of_card in fastest_of(target, RESULTS) if of_card.card == "H200"
        ]
        is_reached = any(words.startswith("reached") for words in verdicts)
        assert (f"- **{target.name}**" in reasons) != is_reached


def test_step_caches_and_other_step_counts_are_no_answer() -> None:
    for target in TARGETS:
        for of_card in fastest_of(target, RESULTS):
            assert "cache" not in of_card.recipe
            assert ("steps(" in of_card.recipe) == bool(target.part)


def test_each_line_has_a_record_or_says_what_stands_in_the_way() -> None:
    rows = [line.strip("| ").split(" | ") for line in page("", RESULTS).splitlines() if line.startswith("| ")]
    for line in LINES:
        (row,) = [row for row in rows if row[:2] == [line.what, line.asked]]
        assert row[3].startswith("[record](") or (row[3] == "-" and row[2] == line.seconds and row[4] != "-")
    (edit,) = [row for row in rows if row[0].startswith("edit, FLUX.1 Kontext")]
    assert edit[2].startswith("4.39 for a new prompt, 4.42 for a known one")
    (krea,) = [row for row in rows if row[0] == "Krea 2 Turbo, 8"]
    assert krea[2].startswith("0.917 s")
    (sana,) = [row for row in rows if row[0] == "Sana, 20"]
    assert sana[2].startswith("0.446 s")
    assert sana[3].startswith("[record](")
