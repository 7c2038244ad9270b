"""Which evidence comes first, and what another GPU's is worth."""

import pytest

import vivace
from tests.unit.recommendation.tables import ask, evidence, table
from vivace.answers.formatting import between_s
from vivace.answers.terminal import text_of
from vivace.evidence.recommendation import Criteria
from vivace.evidence.recommendation.advise import recommend_from
from vivace.evidence.recommendation.answer import answer_of
from vivace.evidence.recorded import all_recorded
from vivace.evidence.tables import EvidenceRow, JudgedQuality
from vivace.foundation.hardware import Near, near
from vivace.foundation.stats import Gate, Interval


def test_evidence_is_ordered() -> None:
    ordered = [
        table(evidence("compile", 1.1), place="own, this GPU"),
        table(evidence("compile", 1.2), gpu="NVIDIA A100-SXM4-80GB", place="own, another GPU"),
        table(evidence("compile", 1.5), kind="committed", place="committed, this GPU"),
        table(evidence("compile", 1.5), kind="community", place="reported by others, this GPU"),
        table(evidence("compile", 1.5), kind="published", gpu="H100", place="published, this GPU"),
        table(
            evidence("compile", 1.5), kind="committed", gpu="NVIDIA H200", place="committed, its generation"
        ),
        table(evidence("compile", 1.6), kind="published", gpu="H200", place="published, its generation"),
        table(evidence("compile", 1.7), kind="committed", gpu="A100", place="committed, another GPU"),
        table(evidence("compile", 1.8), kind="own", model="flux-schnell", place="own, of the family"),
        table(
            evidence("compile", 1.9),
            kind="published",
            gpu="A100",
            model="flux-schnell",
            place="family, another GPU",
        ),
    ]
    left = list(reversed(ordered))
    for expected in ordered:
        answer = ask(*left)
        assert answer.basis is not None
        assert answer.basis.place == expected.place
        left.remove(expected)
    assert ask().recipe is None


def test_what_is_transferred_is_marked_and_never_sure() -> None:
    direct = ask(table(evidence("compile", 1.5, judged=JudgedQuality(gate=Gate.PASSED))))
    assert (direct.sure, direct.doubts) == ("high", ())
    unseen = ask(table(evidence("compile", 1.5)))
    assert (unseen.sure, unseen.doubts) == ("medium", ("its images were not judged",))
    other = ask(table(evidence("compile", 1.5), gpu="NVIDIA A100-SXM4-80GB"))
    assert other.sure == "low"
    assert "another GPU, NVIDIA A100" in other.doubts[0]
    assert "no record of flux-dev on H100, nor on its generation" in other.missing
    near_by = ask(table(evidence("compile", 1.5), gpu="NVIDIA H200"))
    assert near_by.sure == "medium"
    assert "no record of flux-dev on H100; of its generation: NVIDIA H200" in near_by.missing
    family = ask(table(evidence("compile", 1.5), model="flux-schnell"))
    assert family.sure == "low"
    assert "no record compares recipes on flux-dev; of its family: flux-schnell" in family.missing
    assert ask(table(evidence("compile", 1.5), model="sd15")).recipe is None, "a UNet tells nothing of FLUX"
    assert ask(table(evidence("compile", 1.5), model="tiny-flux"), model="flux-dev").recipe is None


def test_without_a_gpu_the_answer_says_which_it_is_for() -> None:
    tables = [
        table(evidence("compile", 1.5), kind="published", gpu="A100", place="there"),
        table(evidence("fp8+compile", 1.9), kind="published", gpu="H100", place="there"),
    ]
    answer = recommend_from(Criteria(model="flux-dev", gpu=None), tables)
    if answer.gpu is not None:
        pytest.skip("this machine has a GPU")
    assert "measured by others on H100" in str(answer)
    assert answer.doubts[0] == "on A100 another recipe is best: give --gpu"
    assert answer.sure == "low"


def test_a_better_table_that_allows_nothing_gives_way_to_the_next() -> None:
    mine = table(evidence("baseline", peak_bytes=30e9), evidence("compile", 2.0, peak_bytes=30e9))
    answer = ask(mine, table(evidence("int8", 0.9, peak_bytes=10e9), kind="published"), max_bytes=12e9)
    assert answer.basis is not None
    assert (answer.recipe, answer.basis.kind) == ("quantize(int8)", "published")
    assert any("own is nearer, but compares nothing that is allowed" in line for line in answer.missing)


@pytest.mark.parametrize(
    ("gpu", "other", "expected"),
    [
        ("A100", "NVIDIA A100-SXM4-80GB", Near.SAME),
        ("4090", "NVIDIA GeForce RTX 4090", Near.SAME),
        ("RTX 4090", "NVIDIA GeForce RTX 4090 Laptop GPU", Near.GENERATION),
        ("H100", "NVIDIA H200", Near.GENERATION),
        ("A100", "NVIDIA GeForce RTX 3090", Near.GENERATION),
        ("H100", "NVIDIA A100-SXM4-80GB", Near.OTHER),
        ("RTX 6000 Ada", "RTX PRO 6000", Near.OTHER),
        ("Some GPU", "NVIDIA some-gpu", Near.SAME),
        ("Some GPU", "NVIDIA H200", Near.OTHER),
    ],
)
def test_gpus_by_name(gpu: str, other: str, expected: Near) -> None:
    assert near(gpu, other) is expected
    assert near(other, gpu) is expected


@pytest.mark.parametrize("goal", ["latency", "memory"])
def test_answers_for_another_gpu_are_never_sure(goal: str) -> None:
    for name in ("sd15", "sdxl", "pony", "flux-schnell"):
        answer = vivace.recommend(name, gpu="Tesla V100", goal=goal, store=[])
        assert answer.sure == "low"
        assert answer.basis is not None
        assert answer.basis.near == "other" or answer.basis.kind == "predicted"
        assert "V100" in " ".join(answer.missing)


@pytest.mark.parametrize("model", ["flux-dev", "flux-schnell"])
def test_the_fused_recipe_is_what_an_h200_wants(model: str) -> None:
    """Its record is not beside the published model's, and the answer says so."""
    answer = vivace.recommend(model, gpu="H200", store=())
    assert answer.recipe is not None
    assert answer.recipe.startswith("fused(fp8, attention=fp8)")
    assert answer.basis is not None
    assert "flux-fused" in answer.basis.place
    assert answer.chosen is not None
    assert answer.chosen.gain is not None
    assert answer.chosen.gain.low is not None
    assert answer.chosen.gain.low > 2.2
    assert any("of another run or card" in doubt for doubt in answer.doubts)
    assert answer.sure == "medium"


def test_times_under_a_profiler_are_followed_last() -> None:
    profiled = table(evidence("bf16", 5.0), kind="published", gpu="H100", place="profiled", profiled=True)
    timed = table(evidence("compile", 1.3), kind="published", gpu="A100", place="timed")
    assert ask(profiled, timed).basis.place == "timed"
    assert ask(profiled).basis.place == "profiled"
    family = table(evidence("compile", 1.2), kind="committed", model="flux-schnell", place="family")
    assert ask(profiled, family).basis.place == "profiled"


def test_memory_is_looked_up_on_all_gpus_and_the_nearest_of_equals_counts() -> None:
    def peak(text: str, gigabytes: float) -> EvidenceRow:
        return evidence(text, 1.1, peak_bytes=int(gigabytes * 1e9))

    here = table(peak("compile", 18), kind="published", gpu="H100", place="here")
    less = table(peak("int8", 10), kind="committed", gpu="A100", place="less")
    equal = table(peak("int8", 10.1), kind="published", gpu="NVIDIA H100", place="equal")
    assert ask(here, less, goal="memory").basis.place == "less"
    assert ask(here, less, equal, goal="memory").basis.place == "equal"
    assert ask(here, less).basis.place == "here", "times are this GPU's"


def test_a_table_with_another_baseline_is_compared_at_its_own_number_of_steps() -> None:
    """The published model was timed with 30 steps only; 50 of them take 16.4 s by what a step takes."""
    usual = table(
        evidence("baseline", steps_s=9.6),
        evidence("compile", 1.5, steps_s=6.3),
        kind="own",
        place="usual",
        steps=30,
    )
    captured = table(
        evidence("cuda_graph", latency=Interval(12.0, 11.9, 12.1)),
        evidence("compile+cuda_graph", 1.33, latency=Interval(9.0, 8.9, 9.1)),
        kind="own",
        place="captured",
        baseline="cuda_graph",
        steps=50,
    )
    captured = captured.model_copy(update={"rows": captured.rows[1:]})  # without the published model
    assert captured.rows[0].recipe == "cuda_graph"
    answer = ask(usual, captured)
    assert answer.recipe == "compile+cuda_graph", "1.8 times as fast, not 1.1"
    assert answer.over_published == pytest.approx(16.4 / 9.0)
    assert "1.82x the speed of the model as published, by another record" in " ".join(
        answer.explain().split()
    )
    assert ask(usual).over_published is None, "its own table says it"
    slower = captured.rows[1].model_copy(update={"latency": Interval(11.5, 11.4, 11.6)})
    assert ask(usual, captured.model_copy(update={"rows": (captured.rows[0], slower)})).recipe == "compile"
    unknown = usual.rows[0].model_copy(update={"steps_s": None})
    assert ask(usual.model_copy(update={"rows": (unknown, usual.rows[1])}), captured).recipe == "compile"


@pytest.mark.parametrize(("model", "size", "least"), [("sd15", 512, 2.5), ("sdxl", 1024, 1.5)])
def test_a_study_does_not_hide_a_faster_recipe(model: str, size: int, least: float) -> None:
    """With the evidence that ships: study 003 has the published model, technique tables have faster recipes."""
    answer = vivace.recommend(model, gpu="H100", store=[])
    assert answer.basis is not None
    assert answer.chosen is not None
    assert answer.chosen.latency is not None
    assert answer.basis.steps is not None
    (base,) = (
        recorded for recorded in all_recorded()[model, "baseline", size, size] if "H100" in recorded.device
    )
    assert base.seconds(answer.basis.steps) / answer.chosen.latency.point > least


def test_a_card_without_a_record_is_told_in_a_wide_interval() -> None:
    """Of its sibling's record it had the width of that measurement alone, and others' times lay outside."""
    theirs, mine = (vivace.recommend("flux-dev", gpu=gpu, store=()).chosen for gpu in ("H100 NVL", "H100"))
    assert theirs is not None
    assert mine is not None
    assert theirs.predicted_from == "NVIDIA H100 80GB HBM3"
    assert (mine.predicted_from, mine.recipe) == (None, theirs.recipe)
    assert theirs.latency is not None
    assert mine.latency is not None
    assert (theirs.latency.half_width or 0) > 0.25 > 10 * (mine.latency.half_width or 1)
    said = text_of(answer_of(vivace.recommend("flux-dev", gpu="H100 NVL", store=())), details=False)
    assert (between_s(theirs.latency) or "?") in said
