"""Fidelity and the gate, derived from figures of single images."""

import pytest

from tests.make import make_record, make_round
from vivace.answers.data import written
from vivace.foundation.spec.figures import FiguresKey, ImageFigures, NoiseFloor, QualityPass, packed
from vivace.foundation.spec.limits import ONE_VIEW, Limits
from vivace.foundation.spec.record import HIDDEN, ImageRecord, Outcome, Record
from vivace.foundation.stats import Gate
from vivace.report.quality_gate import Judgement, broken_images
from vivace.report.rows import Row, rows_of
from vivace.report.run_answer import answer_of
from vivace.report.summary import summary

SCORER = "clip@1"
OWN, OTHERS = 30.0, 10.0  # CLIP scores of the baseline's images: a margin of 20
NUM = 12


def sha(recipe: str, index: int) -> str:
    return f"{recipe}-{index}"


def drawn(recipe: str, identical: int = 0, seconds: float = 1.0) -> Record:
    """A record of NUM images, the first of them the baseline's own."""
    pictures = tuple(
        ImageRecord(
            index=i, prompt=f"prompt {i}", seed=0, sha256=sha("baseline" if i < identical else recipe, i)
        )
        for i in range(NUM)
    )
    times = (seconds, 1.01 * seconds, 0.99 * seconds)
    rounds = [make_round(i, times).model_copy(update={"pictures": pictures}) for i in range(2)]
    return make_record(recipe, *rounds)


def figures_of(
    record: Record,
    ssim: list[float] | None = None,
    kept: list[float] | None = None,
    match: list[float] | None = None,
) -> list[ImageFigures]:
    """A row for each image: its SSIM and match, and its CLIP score as a share of the baseline's margin."""
    rows = []
    for i, picture in enumerate(record.rounds[0].pictures):
        reference = sha("baseline", i)
        key = FiguresKey(sha256=picture.sha256, reference=reference, prompt=picture.prompt, scorer=SCORER)
        alone = {"sharpness": 5.0 + i, "clip_score": OWN}
        against = {}
        if key.is_reference:
            alone["clip_score_of_others"] = OTHERS
        else:
            against = {
                "psnr_db": 20.0 + i,
                "ssim": (ssim or [0.9] * NUM)[i],
                "match": (match or [0.99] * NUM)[i],
            }
            alone = {"sharpness": 4.0 + i, "clip_score": OTHERS + (OWN - OTHERS) * (kept or [1.0] * NUM)[i]}
        rows.append(ImageFigures(**key.model_dump(), alone=alone, against=against))
    return rows


def row_of(
    other: Record,
    figures: list[ImageFigures],
    limits: Limits | None = None,
    floor: NoiseFloor | None = None,
) -> Row:
    base = drawn("baseline", seconds=2.0)
    by_key = {f.key: f for f in [*figures_of(base), *figures]}
    return rows_of([base, other], QualityPass(by_key, SCORER, floor), limits or Limits(ssim=0.8, clip=0.9))[1]


def judgement_of(row: Row) -> Judgement:
    assert row.judgement is not None
    return row.judgement


def test_a_recipe_of_the_same_picture_is_held_to_fidelity_too() -> None:
    other = drawn("bf16")
    good = row_of(other, figures_of(other, match=[0.95, 0.99] * 6), Limits(clip=0.9))
    assert judgement_of(good).gate is Gate.PASSED
    assert "CLIP margin kept 100.0 %" in judgement_of(good).reason
    assert "match 97.0 %" in judgement_of(good).reason
    bad = row_of(other, figures_of(other, match=[0.85, 0.86] * 6), Limits(clip=0.9))
    assert judgement_of(bad).gate is Gate.FAILED
    assert bad.outcome is Outcome.FAILED_QUALITY
    assert judgement_of(bad).reason.startswith("match 85.5 %, below 8")
    assert "the limit is 90 %" in judgement_of(bad).reason
    steps = drawn("steps(8)")
    assert judgement_of(row_of(steps, figures_of(steps, match=[-1.0] * NUM))).gate is Gate.PASSED, (
        "another image"
    )


def thrice(record: Record) -> Record:
    """The record, each of its prompts at three seeds."""
    pictures = tuple(
        p.model_copy(update={"seed": seed, "sha256": f"{p.sha256}/{seed}", "index": NUM * seed + p.index})
        for seed in range(3)
        for p in record.rounds[0].pictures
    )
    rounds = tuple(r.model_copy(update={"pictures": pictures}) for r in record.rounds)
    return record.model_copy(update={"rounds": rounds})


def thrice_as_good(record: Record, kept: list[float], match: float = 0.99) -> list[ImageFigures]:
    """The figures of `thrice`, from the share of the margin that each prompt keeps."""
    rows = []
    for k, picture in enumerate(record.rounds[0].pictures):
        reference = f"{sha('baseline', k % NUM)}/{picture.seed}"
        key = {"sha256": picture.sha256, "reference": reference, "prompt": picture.prompt, "scorer": SCORER}
        alone, against = {"clip_score": OWN, "clip_score_of_others": OTHERS}, {}
        if picture.sha256 != reference:
            alone = {"clip_score": OTHERS + (OWN - OTHERS) * kept[k % NUM]}
            against = {"psnr_db": 30.0, "ssim": 0.9, "match": match}
        rows.append(ImageFigures(**key, alone=alone, against=against))
    return rows


def test_a_prompt_of_which_nothing_is_left_fails_whatever_the_others() -> None:
    base, other = thrice(drawn("baseline")), thrice(drawn("steps(8)"))
    for lost, verdict in ((0.1, Gate.FAILED), (1.0, Gate.PASSED)):
        figures = [
            *thrice_as_good(base, [1.0] * NUM),
            *thrice_as_good(other, [*[1.0] * (NUM - 1), lost]),
        ]
        row = rows_of([base, other], QualityPass({f.key: f for f in figures}, SCORER), Limits(clip=0.95))[1]
        assert judgement_of(row).gate is verdict
    figures = [*thrice_as_good(base, [1.0] * NUM), *thrice_as_good(other, [*[1.0] * (NUM - 1), 0.1])]
    row = rows_of([base, other], QualityPass({f.key: f for f in figures}, SCORER), Limits(clip=0.95))[1]
    assert judgement_of(row).reason.startswith(
        'CLIP margin kept at most 10.0 % in all 3 images of "prompt 11"; CLIP margin kept 92.5 % over all prompts'
    )


@pytest.mark.parametrize("number", [1, 3, 17])
def test_an_image_of_another_picture_is_never_averaged_away(number: int) -> None:
    """Whatever number of the 36 they are: their share of the capped mean may be within the limit."""
    base, other = thrice(drawn("baseline")), thrice(drawn("bf16"))
    rows = thrice_as_good(other, [1.0] * NUM, match=0.9995)
    for k in range(number):
        rows[2 * k] = rows[2 * k].model_copy(update={"against": rows[2 * k].against | {"match": 0.74}})
    figures = [*thrice_as_good(base, [1.0] * NUM), *rows]
    row = rows_of([base, other], QualityPass({f.key: f for f in figures}, SCORER))[1]
    assert judgement_of(row).gate is Gate.FAILED
    assert judgement_of(row).figure == "match"
    assert f"{number} of 36 images" in judgement_of(row).reason
    assert '"prompt 0" seed 0 (match 0.74)' in judgement_of(row).reason
    steps = thrice(drawn("steps(8)"))
    figures = [*thrice_as_good(base, [1.0] * NUM), *thrice_as_good(steps, [1.0] * NUM, match=-0.9)]
    free = rows_of([base, steps], QualityPass({f.key: f for f in figures}, SCORER))[1]
    assert judgement_of(free).gate is Gate.PASSED, "other pictures are allowed there"


def test_the_baselines_image_of_another_seed_is_told_however_much_it_looks_like_its_own() -> None:
    base, other = drawn("baseline"), drawn("bf16")

    def with_thumbnails(rows: list[ImageFigures], *, swapped: bool = False) -> list[ImageFigures]:
        levels = [100.0 + 5 * k for k in range(NUM)]
        if swapped:
            levels[3], levels[4] = levels[4], levels[3]
        return [
            row.model_copy(update={"thumbnail": packed([level] * 768)})
            for row, level in zip(rows, levels, strict=True)
        ]

    for swapped, verdict in ((False, Gate.PASSED), (True, Gate.FAILED)):
        figures = [
            *with_thumbnails(figures_of(base)),
            *with_thumbnails(figures_of(other, match=[0.97] * NUM), swapped=swapped),
        ]
        row = rows_of([base, other], QualityPass({f.key: f for f in figures}, SCORER), Limits(clip=0.9))[1]
        assert judgement_of(row).gate is verdict, judgement_of(row).reason
    assert judgement_of(row).reason.startswith("2 of 12 images are not the baseline's")


def test_few_images_far_away_are_rounding_where_all_are_far_away() -> None:
    """As of fp8: no image is the same, and the furthest are no outliers."""
    other = drawn("quantize(fp8)")
    row = row_of(other, figures_of(other, match=[0.7, *[0.96] * (NUM - 1)]), Limits(clip=0.9))
    assert judgement_of(row).gate is not Gate.FAILED


def test_a_hole_fails_both_claims() -> None:
    for recipe in ("bf16", "steps(8)"):
        other = drawn(recipe)
        rows = figures_of(other)
        rows[5] = rows[5].model_copy(update={"against": rows[5].against | {"hole": 0.03}})
        judgement = judgement_of(row_of(other, rows, Limits(clip=0.9)))
        assert judgement.gate is Gate.FAILED
        assert judgement.figure == "broken"
        assert "1 of 12 images has a hole" in judgement.reason
        assert '"prompt 5" seed 0' in judgement.reason


def test_a_second_witness_has_a_say() -> None:
    base, other = drawn("baseline"), drawn("steps(8)")
    figures = [*figures_of(base), *figures_of(other)]

    def with_witness(share: float) -> Row:
        rows = [
            f.model_copy(
                update={
                    "alone": f.alone | {"witness_score": 80.0, "witness_score_of_others": 0.0}
                    if f.is_reference
                    else f.alone | {"witness_score": 80.0 * share}
                }
            )
            for f in figures
        ]
        return rows_of([base, other], QualityPass({f.key: f for f in rows}, SCORER), Limits(clip=0.9))[1]

    assert judgement_of(with_witness(0.97)).gate is Gate.PASSED
    assert "second witness's margin kept 97.0 %" in judgement_of(with_witness(0.97)).reason
    assert judgement_of(with_witness(0.7)).gate is Gate.FAILED
    assert judgement_of(with_witness(0.7)).figure == "witness"
    assert with_witness(0.7).to_json()["fidelity"]["witness_kept"]["mean"] == pytest.approx(0.7)


def test_another_is_held_to_the_clip_margin() -> None:
    other = drawn("steps(8)")
    good = row_of(other, figures_of(other, ssim=[0.1] * NUM, kept=[1.02, 0.97] * 6))
    assert judgement_of(good).gate is Gate.PASSED, "another image, as good"
    bad = row_of(other, figures_of(other, kept=[0.4, 0.9] * 6))
    assert judgement_of(bad).gate is Gate.FAILED
    assert bad.to_json()["outcome"] == "failed_quality"
    assert bad.to_json()["quality"]["reason"].startswith("CLIP margin kept 65.0 %, below 8")
    assert bad.to_json()["fidelity"]["clip_kept"]["mean"] == pytest.approx(0.65)
    assert bad.to_json()["fidelity"]["clip_bounds"]["mean"] == pytest.approx((0.8 + 0.9) / 2), "capped"


def test_one_lost_picture_neither_fails_a_recipe_nor_hides() -> None:
    other = drawn("steps(8)")
    one_lost = row_of(other, figures_of(other, kept=[0.0, *[1.0] * (NUM - 1)]), Limits(clip=0.99))
    assert judgement_of(one_lost).gate is Gate.UNCLEAR
    assert judgement_of(one_lost).reason.startswith(
        "CLIP margin kept 98.3 %, single images capped [95.3, 100.6]: too few"
    )
    half_lost = row_of(other, figures_of(other, kept=[0.5, 1.0] * 6), Limits(clip=0.99))
    assert judgement_of(half_lost).gate is Gate.FAILED


def test_the_limit_is_the_scorers_own() -> None:
    base, other = drawn("baseline"), drawn("steps(8)")
    rows = [*figures_of(base), *figures_of(other, kept=[0.97] * NUM)]
    for scorer, verdict, limit in (
        ("tiny-clip@1", Gate.FAILED, 0.985),
        (ONE_VIEW, Gate.FAILED, 0.99),
        ("openai/clip-vit-large-patch14@1", Gate.PASSED, 0.95),
    ):
        measured = [f.model_copy(update={"scorer": scorer}) for f in rows]
        row = rows_of([base, other], QualityPass({f.key: f for f in measured}, scorer))[1]
        assert judgement_of(row).gate is verdict
        assert row.to_json()["quality"]["limits"]["clip"] == limit


def test_few_pictures_never_pass() -> None:
    other = drawn("steps(8)")
    wide = row_of(other, figures_of(other, kept=[1.1, 0.7] * 6))
    assert judgement_of(wide).gate is Gate.UNCLEAR
    assert "too few images to decide" in judgement_of(wide).reason
    assert wide.outcome is Outcome.MEASURED
    round_ = other.rounds[0].model_copy(update={"pictures": other.rounds[0].pictures[:5]})
    five = other.model_copy(update={"rounds": (round_,)})
    assert judgement_of(row_of(five, figures_of(five))).gate is Gate.UNCLEAR
    assert judgement_of(row_of(five, figures_of(five))).reason == (
        "CLIP margin kept 100.0 %: a verdict needs 6 prompts or more, here are 5"
    )


def test_no_recipe_is_held_to_more_than_the_baseline_reaches_itself() -> None:
    other = drawn("bf16")
    figures = figures_of(other, ssim=[0.6, 0.62] * 6)
    assert judgement_of(row_of(other, figures)).gate is Gate.FAILED
    again = drawn("attention(math)")
    floor = NoiseFloor(recipe="attention(math)", pictures=again.rounds[0].pictures)
    row = row_of(other, figures + figures_of(again, ssim=[0.55, 0.65] * 6), floor=floor)
    assert judgement_of(row).gate is Gate.PASSED
    figures = figures_of(other, match=[0.85, 0.86] * 6)
    assert judgement_of(row_of(other, figures)).gate is Gate.FAILED
    row = row_of(other, figures + figures_of(again, match=[0.84, 0.86] * 6), floor=floor)
    assert judgement_of(row).gate is Gate.PASSED
    assert "what the baseline reaches against itself" in judgement_of(row).reason


def test_a_broken_picture_fails_whatever_the_figures() -> None:
    other = drawn("steps(8)")
    pictures = list(other.rounds[0].pictures)
    pictures[3] = pictures[3].model_copy(update={"faults": ("black",)})
    broken = make_record(
        "steps(8)", other.rounds[0].model_copy(update={"pictures": tuple(pictures)}), other.rounds[1]
    )
    row = row_of(broken, figures_of(broken))
    assert judgement_of(row).reason == "1 of 12 images are broken (black)"
    assert row.failed_quality


def with_faults(record: Record, *faults: tuple[str, ...]) -> Record:
    """The record, its first images marked."""
    pictures = list(record.rounds[0].pictures)
    for k, names in enumerate(faults):
        pictures[k] = pictures[k].model_copy(update={"faults": names})
    return record.model_copy(
        update={"rounds": (record.rounds[0].model_copy(update={"pictures": tuple(pictures)}),)}
    )


def test_a_flat_picture_among_many_is_left_to_clip() -> None:
    base = drawn("baseline")
    assert broken_images(with_faults(drawn("steps(8)"), ("flat",)), base) == (
        "1 of 12 images are broken (flat)"
    )
    many = drawn("steps(8)")
    round_ = many.rounds[0].model_copy(update={"pictures": many.rounds[0].pictures * 4})
    many = many.model_copy(update={"rounds": (round_,)})
    assert broken_images(with_faults(many, ("flat",), ("flat",)), base) is None, "2 of 48"
    assert broken_images(with_faults(many, ("black",)), base) is not None, "a model never means that"
    assert broken_images(with_faults(many, ("flat",), ("flat",), ("flat",)), base) is not None


def test_what_the_baseline_draws_black_is_not_held_against_others() -> None:
    base = drawn("baseline")
    black = [p.model_copy(update={"faults": ("black",)}) for p in base.rounds[0].pictures[:1]]
    pictures = (*black, *base.rounds[0].pictures[1:])
    base = base.model_copy(update={"rounds": (base.rounds[0].model_copy(update={"pictures": pictures}),)})
    same = base.model_copy()
    assert broken_images(same, base) is None
    assert broken_images(base, base) == "1 of 12 images are broken (black)"


def test_without_a_scorer_another_picture_is_never_passed() -> None:
    base, other = drawn("baseline"), drawn("steps(8)")
    bare = [
        f.model_copy(update={"scorer": None, "alone": {"sharpness": 1.0}})
        for f in [*figures_of(base), *figures_of(other, ssim=[0.99] * NUM)]
    ]
    row = rows_of([base, other], QualityPass({f.key: f for f in bare}))[1]
    assert judgement_of(row) == Judgement(Gate.UNCLEAR, "no CLIP model scored the images", "clip")


def test_a_scorer_that_cannot_tell_the_baseline_decides_nothing() -> None:
    base, other = drawn("baseline"), drawn("steps(8)")
    blind = [
        f.model_copy(update={"alone": f.alone | {"clip_score_of_others": OWN + 1}}) for f in figures_of(base)
    ]
    row = rows_of([base, other], QualityPass({f.key: f for f in [*blind, *figures_of(other)]}, SCORER))[1]
    assert judgement_of(row).gate is Gate.UNCLEAR
    assert "no higher with their own prompts" in judgement_of(row).reason


def test_limits_can_be_changed_and_switched_off() -> None:
    other = drawn("bf16")
    figures = figures_of(other, ssim=[0.85, 0.86] * 6)
    assert judgement_of(row_of(other, figures)).gate is Gate.PASSED
    assert judgement_of(row_of(other, figures, Limits(ssim=0.99))).gate is Gate.FAILED
    assert judgement_of(row_of(other, figures, Limits(ssim=None, psnr_db=40.0))).gate is Gate.FAILED
    off = Limits(clip=None, match=None, ssim=None, psnr_db=None)
    assert judgement_of(row_of(other, figures, off)).gate is Gate.UNCLEAR, "nothing was asked"


def test_a_failed_recipe_is_never_called_fastest() -> None:
    base = drawn("baseline", seconds=2.0)
    greedy, good = drawn("steps(1)", seconds=0.1), drawn("tiny_vae", seconds=1.0)
    measured = [*figures_of(base), *figures_of(greedy, kept=[0.1, 0.2] * 6), *figures_of(good)]
    rows = rows_of([base, greedy, good], QualityPass({f.key: f for f in measured}, SCORER), Limits())
    headline = summary(rows)
    assert headline.startswith("tiny_vae is the fastest: 2.00x")
    assert "Images kept: 12 of 12 show what was asked (CLIP margin kept 100.0 %" in headline
    assert rows[1].judgement is not None
    assert rows[1].judgement.words == "images not kept: 0 of 12 show what was asked"
    assert "steps(1) fails on quality; the table says why." in headline
    assert "No recipe that passes on quality was faster" in summary(rows[:2])
    assert "failed_quality" in written(answer_of(rows), "table")
    assert "failed_quality" in written(answer_of(rows), "csv")


def test_an_unproven_recipe_is_not_headlined_before_a_proven_one() -> None:
    base = drawn("baseline", seconds=2.0)
    doubtful, good = drawn("steps(8)", seconds=0.5), drawn("tiny_vae", seconds=1.0)
    measured = [*figures_of(base), *figures_of(doubtful, kept=[1.2, 0.6] * 6), *figures_of(good)]
    rows = rows_of([base, doubtful, good], QualityPass({f.key: f for f in measured}, SCORER), Limits())
    headline = summary(rows)
    assert headline.startswith("tiny_vae is the fastest: 2.00x")
    assert "steps(8) was faster still, 4.00x [" in headline
    alone = summary(rows[:2])
    assert alone.startswith("steps(8) was the fastest, but its quality is not proven: 4.00x")
    assert "Compare the images before you trust it." in alone


def hidden(record: Record, number: int) -> Record:
    """The record with the first of its images replaced by a safety checker."""
    pictures = tuple(
        picture.model_copy(update={"faults": ("black", HIDDEN) if i < number else ()})
        for i, picture in enumerate(record.rounds[0].pictures)
    )
    return record.model_copy(
        update={"rounds": tuple(round_.model_copy(update={"pictures": pictures}) for round_ in record.rounds)}
    )


@pytest.mark.parametrize(("number", "gate"), [(1, Gate.PASSED), (NUM, Gate.UNCLEAR)])
def test_images_that_a_safety_checker_hid_are_named_and_prove_nothing(number: int, gate: Gate) -> None:
    base, other = hidden(drawn("baseline", seconds=2.0), number), hidden(drawn("steps(2)"), number)
    by_key = {f.key: f for f in [*figures_of(base), *figures_of(other)]}
    row = rows_of([base, other], QualityPass(by_key, SCORER, None), Limits(ssim=0.8, clip=0.9))[1]
    assert row.judgement is not None
    assert row.judgement.gate is gate
    assert any(
        f"safety checker replaced {number} of {NUM} images by black ones" in text for text in row.warnings
    )
