"""The limit of a witness lies between harmless changes and the damage that it sees."""

import pytest

from vivace.errors import UsageError
from vivace.measure.calibrating import ImageScores, choose_limit, label
from vivace.measure.damage import DAMAGE, HARMLESS

KINDS = {kind.name: kind for kind in DAMAGE}

MARGIN = 10.0
BLUR, BANDING = KINDS["blur"], KINDS["banding"]
KEPT = {
    "blur": (1.0, 0.99, 0.95, 0.8, 0.5),
    "banding": (1.0, 1.0, 1.0, 1.0, 0.999),
}


def scores(
    num_prompts: int = 13, harmless: float = 0.99, kept: dict[str, tuple[float, ...]] = KEPT
) -> list[ImageScores]:
    """Return scores that keep these shares of a margin of 10 points, a little more or less from prompt to prompt."""
    rows = []
    for k in range(num_prompts):
        spread = 0.001 * (k - (num_prompts - 1) / 2)
        shares = {change.name: harmless for change in HARMLESS}
        shares |= {
            label(kind, grade): kept[kind.name][grade] for kind in (BLUR, BANDING) for grade in range(5)
        }
        changed = {name: 30 - MARGIN * (1 - share + spread) for name, share in shares.items()}
        rows.append(ImageScores(prompt=f"prompt {k}", own=30.0, others=20.0, changed=changed))
    return rows


def test_harmless_changes_pass_and_damage_of_the_grade_fails() -> None:
    chosen = choose_limit(scores(), [BLUR, BANDING], 4, "clip")
    assert chosen.limit is not None
    assert 0.8 < chosen.limit < min(chosen.harmless.values())
    assert chosen.limit == pytest.approx(0.895, abs=0.01)
    assert chosen.faint == ("banding",)
    assert chosen.margin == pytest.approx(MARGIN)
    blur, banding = chosen.damage
    assert blur.kept == pytest.approx(KEPT["blur"], abs=1e-3)
    assert blur.seen_from is not None
    assert BLUR.strengths[2] < blur.seen_from <= BLUR.strengths[3]
    assert banding.seen_from is None


def test_the_grade_says_how_strict_the_limit_is() -> None:
    mild, plain = (choose_limit(scores(), [BLUR, BANDING], grade, "clip").limit for grade in (3, 5))
    assert mild is not None
    assert plain is not None
    assert plain < mild


def test_a_witness_that_sees_no_damage_has_no_limit() -> None:
    chosen = choose_limit(scores(), [BANDING], 4, "clip")
    assert chosen.limit is None
    assert chosen.faint == ("banding",)
    assert chosen.damage[0].seen_from is None


def test_a_witness_that_does_not_know_the_prompts_is_refused() -> None:
    blind = [ImageScores(prompt=row.prompt, own=20.0, others=20.5, changed=row.changed) for row in scores()]
    with pytest.raises(UsageError, match=r"-0\.50 points\).*another --witness"):
        choose_limit(blind, [BLUR], 4, "clip")
