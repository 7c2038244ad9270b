"""Given one study's numbers alone, the advice is the study's, or its own table contradicts it."""

import pytest

from vivace.evidence.recommendation import Criteria, Recommendation
from vivace.evidence.recommendation.advise import recommend_from
from vivace.evidence.studies.published_tables import published_tables
from vivace.recipes.resolve import resolve

INT8_TWO = "quantize(int8)@denoiser,text_encoder_2"
FULL = "quantize(int8)@denoiser,text_encoder_2,vae+compile@denoiser,text_encoder_2,vae"


@pytest.fixture(scope="module")
def studies() -> dict[str, list]:
    return {name: published_tables([name]) for name in ("000", "001", "002", "003", "004")}


@pytest.fixture(scope="module")
def ask(studies):
    def recommendation(study: str, model: str, gpu: str, **fields: object) -> Recommendation:
        criteria = Criteria(model=model, gpu=gpu, **fields)
        return recommend_from(criteria, studies[study], with_predictions=False)

    return recommendation


def label(answer: Recommendation) -> str:
    assert answer.chosen is not None
    return answer.chosen.label


def times_as_long(answer: Recommendation, text: str) -> float:
    """Return how many times as long as the chosen recipe another one takes."""
    other = answer.figures(resolve(text).text)
    assert other is not None
    assert answer.chosen is not None
    return answer.chosen.score.point / other.score.point


@pytest.mark.parametrize("model", ["flux-dev", "pony"])
def test_000_an_h100_wants_the_full_optimisation(ask, model: str) -> None:
    answer = ask("000", model, "H100")
    assert (answer.recipe, label(answer)) == (FULL, "Full Opt")
    assert answer.basis.is_direct


def test_000_on_an_h100_its_own_tables_contradict_that_for_two_models(ask) -> None:
    schnell = ask("000", "flux-schnell", "H100")
    assert label(schnell) == "Config 9"
    assert times_as_long(schnell, FULL) == pytest.approx(1.24 / 1.17)
    playground = ask("000", "playground", "H100")
    assert label(playground) == "Config 2"  # 1.89 s; quantised as well, 1.87 s: a tie, and less simple
    assert f"{FULL} (Full Opt)" in playground.ties


@pytest.mark.parametrize("model", ["flux-dev", "flux-schnell", "pony", "playground"])
def test_000_an_a100_wants_compilation_alone(ask, model: str) -> None:
    answer = ask("000", model, "A100")
    assert [t.name for t in resolve(answer.recipe)] == ["compile"]
    assert times_as_long(answer, FULL) > 1.07


def test_000_the_a100_with_flux(ask) -> None:
    answer = ask("000", "flux-dev", "A100")
    assert label(answer) == "Config 2"
    assert times_as_long(answer, FULL) == pytest.approx(12.09 / 11.20)


def test_000_what_fits_24_gb_on_a_4090(ask) -> None:
    answer = ask("000", "flux-dev", "RTX 4090", max_bytes=24e9)
    assert label(answer) == "Full Opt"
    assert answer.chosen.peak_bytes == pytest.approx(16.18 * 2**30, rel=1e-6)
    # 22.48 GiB are 24.1 GB.
    assert {row.title for row in answer.left_out if row.kind == "memory"} == {"quantize(int8) (Config 5)"}
    assert "null in the source" in next(row.why for row in answer.left_out if row.label == "Base")
    assert "did not time its baseline" in " ".join(answer.doubts)
    assert label(ask("000", "flux-dev", "RTX 4090", max_bytes=24 * 2**30)) == "Full Opt"


def test_000_memory_is_least_with_everything_quantised(ask) -> None:
    for gpu in ("A100", "H100", "RTX 4090"):
        assert label(ask("000", "flux-dev", gpu, goal="memory")) == "Full Opt"


def test_001_the_final_configuration_is_the_fastest(ask) -> None:
    answer = ask("001", "sd15", "A100")
    assert label(answer) == "Final"
    assert answer.chosen.gain.point == pytest.approx(1.30 / 0.297)
    assert answer.sure == "medium"
    assert "judged on tiny-sd" in answer.quality
    assert answer.chosen.latency is None, "it is of 30 steps, and the model's own are 50"
    kept = ask("001", "sd15", "A100", same_picture=True)
    assert label(kept) == "Euler, 30 steps", (
        "the waterfall's compiled model, measured again: 0.547 s, not 0.552"
    )


def test_001_a_small_decoder_alone_is_not_proven(ask) -> None:
    """The final configuration is said to need slightly more memory; a part of it is published with half as much."""
    answer = ask("001", "sd15", "A100", goal="memory")
    assert label(answer) == "Baseline"
    (out,) = [row for row in answer.left_out if row.label == "Compiled + tiny VAE"]
    assert (out.kind, out.score > 1) == ("unproven", True)


def test_002_bf16_is_fastest_and_flash_attention_adds_nothing(ask) -> None:
    """The source ends with flash attention in bf16; plain attention took 91.8 s, and that 94.0 s."""
    answer = ask("002", "sd15", "RTX 4060")
    assert label(answer) == "bf16"
    assert [tie.split(" (")[-1] for tie in answer.ties] == ["FlashAttention, bf16)"]
    assert times_as_long(answer, "fp32+attention(math)") == pytest.approx(465.392 / 91.789)


@pytest.mark.parametrize("model", ["flux-dev", "flux-schnell"])
def test_003_transformers_want_fp8_with_static_scales(ask, model: str) -> None:
    answer = ask("003", model, "RTX PRO 6000")
    assert label(answer) == "fp8_static"
    assert answer.runner_up.label == "fp16"


@pytest.mark.parametrize("model", ["sdxl", "lcm-sdxl"])
def test_003_unets_want_no_quantisation_for_speed(ask, model: str) -> None:
    answer = ask("003", model, "RTX PRO 6000")
    assert answer.recipe == "baseline"
    assert not any(row.gain.point > 1 for row in answer.ranking)


def test_003_the_fewest_steps_gain_most(ask) -> None:
    other = ask("003", "sdxl", "RTX PRO 6000").other_model
    assert (other.model, other.steps) == ("sdxl-turbo", 4)
    assert other.ratio == pytest.approx(3.70 / 0.22)
    assert ask("003", "flux-dev", "RTX PRO 6000").other_model.model == "flux-schnell"
    assert ask("003", "flux-schnell", "RTX PRO 6000").other_model is None


def test_003_a_ruined_row_is_left_out(ask) -> None:
    """int8 on LCM-SDXL: a CLIP score of 0.1348, where fp16 has 0.2850."""
    out = ask("003", "lcm-sdxl", "RTX PRO 6000", goal="memory").left_out
    (ruined,) = [row for row in out if row.label == "int8"]
    assert (ruined.kind, "0.1348" in ruined.why) == ("quality", True)


def test_003_memory_is_least_in_four_bits_where_it_is_not_needed_for_speed(ask) -> None:
    answer = ask("003", "flux-dev", "RTX PRO 6000", goal="memory")
    assert label(answer) == "nf4"  # 21.2 GB, and faster than int4's 20.7 GB: a tie
    assert "(int4)" in answer.ties[0]


def unproven(answer: Recommendation, name: str) -> float:
    """Return the score of a row of this label that was left out for want of proof."""
    (out,) = [row for row in answer.left_out if row.label == name]
    assert out.kind == "unproven"
    assert out.score is not None
    return out.score


def test_004_an_h100_gains_most_with_a_cache_that_nothing_proves(ask) -> None:
    answer = ask("004", "flux-dev", "H100")
    assert label(answer) == "BF16"
    fastest, next_best = unproven(answer, "FBCache (0.35)"), unproven(answer, "FBCache (0.3)")
    assert fastest / next_best == pytest.approx(2.10 / 1.84)
    assert "unproven" in answer.explain()
    assert "FBCache (0.35)" in " ".join(answer.explain().split())


def test_004_an_a100_is_advised_03_and_measured_faster_at_04(ask) -> None:
    answer = ask("004", "flux-dev", "A100")
    assert label(answer) == "FlashAttention2"
    assert unproven(answer, "FBCache (0.4)") / unproven(answer, "FBCache (0.3)") == pytest.approx(4.07 / 3.13)


def test_004_its_most_stable_configuration_is_not(ask, studies) -> None:
    """bf16 with flash attention and a first-block cache is said to be the most stable, with a p99 of 2.13 s."""
    answer = ask("004", "flux-dev", "H100", goal="stability")
    (rows,) = (table.rows for table in studies["004"] if table.gpu == "H100")
    (claimed,) = [row for row in rows if row.label == "BF16+FA2+FBCache (0.3)"]
    assert (claimed.spread.p99_s, claimed.spread.p50_s) == (2.13, 2.06)
    assert unproven(answer, claimed.label) < answer.chosen.score.point
    assert label(answer) == "BF16"
    assert answer.chosen.spread.p99_s / answer.chosen.spread.p50_s < 2.13 / 2.06


def test_004_publishes_no_quality_and_no_memory(ask) -> None:
    from vivace.foundation.spec.limits import Limits

    proven = ask("004", "flux-dev", "H100", limits=Limits(clip=0.9))
    assert proven.recipe == resolve("fp16").text, "the baseline alone needs no proof"
    assert {row.kind for row in proven.left_out} == {"unproven"}
    fits = ask("004", "flux-dev", "H100", max_bytes=80e9)
    assert fits.recipe is None
    assert {row.kind for row in fits.left_out} == {"memory unknown"}
    assert "not known to fit" in fits.explain()
