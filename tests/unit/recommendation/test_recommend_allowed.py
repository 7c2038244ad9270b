"""What is allowed: what the GPU runs, what fits, and what is proven to keep the images."""

import pytest

from tests.unit.recommendation.tables import ask, evidence, table
from vivace.evidence.committed import committed_tables
from vivace.evidence.tables import JudgedQuality
from vivace.foundation.spec.limits import Limits
from vivace.foundation.stats import Gate, Interval


def test_a_recipe_that_the_asked_gpu_cannot_run_is_left_out() -> None:
    rows = evidence("fp8_static+compile", 1.9), evidence("compile", 1.3)
    answer = ask(table(*rows, kind="committed", gpu="NVIDIA H200"), gpu="A100")
    assert answer.recipe == "compile"
    (out,) = answer.left_out
    assert out.kind == "hardware"
    assert "8.9" in out.why
    assert "better, but quantize(fp8_static)+compile" in answer.explain()
    assert (
        ask(table(*rows, kind="committed", gpu="NVIDIA H200"), gpu="RTX 4090").recipe
        == "quantize(fp8_static)+compile"
    )
    several = table(evidence("parallel(ulysses)", 1.9), evidence("compile", 1.3), kind="committed")
    assert ask(several).recipe == "compile"


def test_a_time_of_kernels_made_for_another_generation_is_no_time_here() -> None:
    """Convolutions in e4m3 are vivace's own, made and measured on Hopper; elsewhere they were only compiled."""
    recipe = "fused(fp8, convolutions=fp8)"
    tables = table(evidence(recipe, 3.0), evidence("fused(fp8)", 2.0), kind="committed", model="sdxl")
    assert ask(tables, model="sdxl").recipe == recipe
    assert ask(tables, model="sdxl", gpu="H200").recipe == recipe
    for gpu in ("RTX 4090", "RTX 5090", "B200"):
        answer = ask(tables, model="sdxl", gpu=gpu)
        assert answer.recipe == "fused(fp8)"
        (out,) = (out for out in answer.left_out if out.recipe == recipe)
        assert f"are made for another generation, and were never measured on {gpu}" in out.why
        assert f"fused(fp8) was compiled for {gpu}, and never measured on it" in answer.doubts
        assert answer.sure == "low"
    measured = table(evidence(recipe, 3.0), kind="community", model="sdxl", gpu="RTX 4090")
    answer = ask(tables, measured, model="sdxl", gpu="RTX 4090")
    assert answer.recipe == recipe
    assert not any("compiled" in doubt for doubt in answer.doubts)


@pytest.mark.parametrize("gpu", ["RTX 3090", "A100", "A40"])
def test_fp8_is_never_recommended_where_the_tensor_cores_lack_it(gpu: str) -> None:
    recipes = (
        "fused(fp8)",
        "fused(fp8, attention=fp8)",
        "quantize(fp8)",
        "quantize(nvfp4)",
        "attention(flash3_fp8)",
    )
    rows = [evidence(recipe, 2.0 + number) for number, recipe in enumerate(recipes)]
    answer = ask(table(*rows, evidence("cuda_graph", 1.2), kind="committed"), gpu=gpu)
    assert answer.recipe == "cuda_graph"
    assert {out.recipe for out in answer.left_out if out.kind == "hardware"} == set(recipes)


def test_the_limit_on_memory_is_hard_and_unknown_does_not_fit() -> None:
    rows = (
        evidence("compile", 2.0, peak_bytes=24_100_000_000),
        evidence("int8+compile", 1.5, peak_bytes=12_000_000_000),
        evidence("cuda_graph", 3.0, peak_bytes=None),
    )
    answer = ask(table(*rows), max_bytes=24e9)
    assert answer.recipe == "quantize(int8)+compile"
    kinds = {row.recipe: row.kind for row in answer.left_out}
    assert kinds == {"compile": "memory", "cuda_graph": "memory unknown"}
    assert "not known to fit: cuda_graph" in answer.explain()
    nothing = ask(table(*rows), max_bytes=1e9)
    assert nothing.recipe is None
    assert nothing.next[0] == "vivace plan flux-dev --card 1 --gpu H100"


def test_recipes_that_change_the_picture_need_proof() -> None:
    caches = {
        "first_block_cache(0.1)": JudgedQuality(gate=Gate.PASSED, reason="passes"),
        "first_block_cache(0.2)": JudgedQuality(gate=Gate.UNCLEAR, reason="too few images"),
        "first_block_cache(0.3)": JudgedQuality(gate=Gate.FAILED, reason="shows something else"),
        "first_block_cache(0.4)": None,
    }
    gains = (1.5, 2.0, 2.5, 3.0)
    rows = [
        evidence(text, gain, judged=verdict)
        for (text, verdict), gain in zip(caches.items(), gains, strict=True)
    ]
    answer = ask(table(*rows, evidence("compile", 1.3)))
    assert answer.recipe == "first_block_cache(0.1)"
    assert answer.quality == "passes the quality gate: passes"
    assert sorted(row.kind for row in answer.left_out) == ["quality", "unproven", "unproven"]
    assert ask(table(*rows, evidence("compile", 1.3)), same_picture=True).recipe == "compile"
    assert ask(table(*rows, evidence("compile", 1.3)), limits=Limits()).recipe == "first_block_cache(0.1)"
    published = ask(table(*rows, evidence("compile", 1.3), kind="published"))
    assert published.recipe == "first_block_cache(0.1)", "published rows need proof as well"
    assert {row.kind for row in published.left_out} == {"quality", "unproven"}


def test_random_weights_borrow_quality_from_an_embedded_model_of_the_kind() -> None:
    by_gate = {
        gate: next(
            row
            for tiny in committed_tables()
            if tiny.model == "tiny-flux"
            for row in tiny.rows
            if row.judged is not None and row.judged.gate is gate and "hits" in row.recipe
        )
        for gate in (Gate.PASSED, Gate.FAILED)
    }
    full = [evidence(f"{row.recipe}+cuda_graph", 2.0) for row in by_gate.values()]
    rows = (full[0], full[1].model_copy(update={"gain": Interval(3.0, 2.9, 3.1)}), evidence("compile", 1.3))
    answer = ask(table(*rows, random_weights=True))
    assert answer.chosen is not None
    assert answer.chosen.judged is not None
    assert (answer.recipe, answer.chosen.judged.of) == (rows[0].recipe, "tiny-flux")
    assert "judged on tiny-flux, a small model of the same kind, not on flux-dev" in answer.quality
    assert answer.sure == "medium"
    # A UNet is of another kind, with an embedded model of its own.
    unet = ask(table(*rows, random_weights=True, model="sdxl"), model="sdxl")
    assert unet.chosen is not None
    assert unet.chosen.judged is not None
    assert (unet.recipe, unet.chosen.judged.of) == (rows[0].recipe, "tiny-sd")
    few = ask(table(*rows, random_weights=True, model="flux-schnell"), model="flux-schnell")
    assert few.recipe == "compile", "four steps are not many"
    assert all("random weights" in row.why for row in few.left_out)


def test_fewer_steps_of_another_number_of_steps_are_another_share() -> None:
    """24 of tiny-flux's 28 steps pass; 24 of 50 are not known."""
    row = evidence("steps(24)", 2.0)
    assert ask(table(row, random_weights=True, steps=28)).recipe == "steps(24)"
    assert [left_out.kind for left_out in ask(table(row, random_weights=True, steps=50)).left_out] == [
        "unproven"
    ]


def test_committed_images_are_held_to_the_limits_that_are_asked() -> None:
    kept = JudgedQuality(gate=Gate.FAILED, reason="below 99 %", clip=Interval(0.96, 0.94, 0.98))
    rows = (
        evidence("steps(14)", 2.0, judged=kept),
        evidence("steps(20)", 1.4, judged=JudgedQuality(gate=Gate.PASSED)),
    )
    loose = ask(table(*rows, kind="committed"), limits=Limits(clip=0.9))
    assert loose.recipe == "steps(14)"
    assert "CLIP margin kept [94, 98] %, 90 % asked" in loose.quality
    strict = ask(table(*rows, kind="committed"), limits=Limits(clip=0.95))
    assert strict.recipe == "baseline"
    lost = rows[0].model_copy(update={"judged": kept.model_copy(update={"is_lost": True})})
    assert ask(table(lost, kind="committed"), limits=Limits(clip=0.9)).recipe == "baseline"
