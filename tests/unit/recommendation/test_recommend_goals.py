"""What is best for each goal, and what is a tie."""

import pytest

from tests.unit.recommendation.tables import ask, evidence, table
from vivace.evidence.tables import CallSpread, JudgedQuality
from vivace.foundation.stats import Gate, Interval


def test_overlapping_intervals_are_a_tie_and_the_simpler_recipe_is_named() -> None:
    answer = ask(
        table(
            evidence("fuse_qkv+compile", 1.52, 0.02),
            evidence("compile", 1.5, 0.02),
            evidence("tiny_vae", 1.1),
        )
    )
    assert (answer.recipe, answer.is_tie) == ("compile", True)
    assert answer.runner_up is not None
    assert answer.runner_up.recipe == "fuse_qkv+compile"
    assert "simpler (1 technique instead of 2)" in answer.why
    clear = ask(table(evidence("fuse_qkv+compile", 1.7, 0.02), evidence("compile", 1.5, 0.02)))
    assert (clear.recipe, clear.is_tie, clear.ties) == ("fuse_qkv+compile", False, ())
    assert "takes 1.13 times as long" in clear.why
    nothing = ask(table(evidence("compile", 1.01, 0.02)))
    assert nothing.recipe == "baseline"
    assert "nothing that is allowed is better" in " ".join(nothing.explain().split())


def test_of_equally_simple_recipes_the_one_that_keeps_the_picture_is_named() -> None:
    passed = JudgedQuality(gate=Gate.PASSED, reason="as good")
    answer = ask(table(evidence("steps(14)", 1.52, 0.02, judged=passed), evidence("compile", 1.5, 0.02)))
    assert answer.recipe == "compile"
    assert "keeps the image" in answer.why


def test_one_process_cannot_tell_ten_percent() -> None:
    rows = [
        evidence("fuse_qkv+compile", 1.6, 0.001, num_rounds=1),
        evidence("compile", 1.5, 0.001, num_rounds=1),
    ]
    assert ask(table(*rows)).recipe == "compile"
    assert (
        ask(table(*(row.model_copy(update={"num_rounds": 2}) for row in rows))).recipe == "fuse_qkv+compile"
    )


def test_memory_prefers_the_faster_of_equal_peaks() -> None:
    rows = (
        evidence("offload(group)", 0.3, peak_bytes=2_767_000_000),
        evidence("offload(group, stream=True)", 0.4, peak_bytes=2_768_000_000),
        evidence("offload(model)", 0.8, peak_bytes=24_000_000_000),
    )
    answer = ask(table(*rows), goal="memory")
    assert answer.recipe == "offload(group, stream=True)"
    assert "the chosen one is faster" in answer.why
    assert "2.77 GB at 0.40x the speed" not in answer.explain()
    assert "peak 2.77 GB instead of 20.0 GB" in " ".join(answer.explain().split())


def test_throughput_and_cost_look_at_every_batch() -> None:
    single = table(evidence("compile", 1.5))
    four = table(
        evidence("baseline", latency=Interval(8, 7.9, 8.1), batch=4),
        evidence("compile", 2.0, latency=Interval(4, 3.9, 4.1), batch=4),
        batch=4,
    )
    assert ask(single, four).chosen.latency.point == pytest.approx(10 / 1.5)
    answer = ask(single, four, goal="throughput")
    assert answer.chosen is not None
    assert (answer.chosen.title, answer.chosen.gain) == (
        "compile, batch 4",
        Interval(2.5, 10 / 4.1, 10 / 3.9),
    )
    assert "0.25 images/s" in answer.explain()
    cost = ask(single, four, goal="cost", price_per_hour=3.6)
    assert cost.chosen is not None
    assert cost.chosen.cost_per_1000 == pytest.approx(4.0)
    elsewhere = ask(table(evidence("compile", 1.5), gpu="NVIDIA A100"), goal="cost", price_per_hour=3.6)
    assert elsewhere.chosen is not None
    assert elsewhere.chosen.cost_per_1000 is None, "another GPU's seconds are no price of this one"


def test_stability_needs_calls_enough() -> None:
    def spread(longest: float, number: int) -> CallSpread:
        return CallSpread(p50_s=1.0, min_s=1.0, max_s=longest, num_calls=number)

    rows = (
        evidence("baseline", spread=spread(1.5, 20)),
        evidence("compile", 1.5, spread=spread(1.05, 20)),
        evidence("fp8", 2.0, spread=spread(1.0, 3)),
    )
    answer = ask(table(*rows), goal="stability")
    assert answer.recipe == "compile"
    assert [row.recipe for row in answer.left_out] == ["quantize(fp8)"]
    assert "p99 needs 200 timed calls" in answer.doubts
    assert "longest 1.050 of the shortest of 20 calls" in answer.explain()
