"""Masks: the steps that are computed, listed."""

import json
from pathlib import Path

import pytest

from tests.families import draw, session
from vivace.errors import UsageError
from vivace.recipes.resolve import resolve


@pytest.mark.parametrize("recipe", ["teacache", "first_block_cache", "taylorseer", "dual_block_cache"])
def test_any_cache_follows_a_mask(recipe: str) -> None:
    made = session("flux", f"{recipe}(mask=110101)")
    draw(made, num_inference_steps=6)
    assert made.evidence()["cache_hit_rate"] == pytest.approx(2 / 6)


def test_a_mask_with_a_digit_for_each_step_is_for_that_many_steps() -> None:
    made = session("sd", "taylorseer(mask=1100)")
    draw(made, num_inference_steps=3)
    assert made.evidence()["cache_hit_rate"] == pytest.approx(1 / 3), "a shorter call follows its beginning"
    assert "mask is for 4 steps, and the call had 3" in (made.refuted({}) or "")
    draw(made, num_inference_steps=4)
    assert made.refuted({}) is None
    with pytest.raises(UsageError, match="mask is for 4 steps, and the call had 6"):
        draw(made, num_inference_steps=6)
    draw(session("sd", "taylorseer(mask=2c2h)"), num_inference_steps=6)


def test_a_mask_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schedule.json"
    file.write_text(json.dumps({"mask": "110100"}))
    assert resolve(f"taylorseer(mask='{file}')").text == "taylorseer(mask='110100')"
    file.write_text("{}")
    with pytest.raises(UsageError, match="has no mask"):
        resolve(f"taylorseer(mask='{file}')")


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ("mask=0110", "first step has nothing to reuse"),
        ("mask=1201", "is not a mask"),
        ("mask=3c2d", "no decided steps"),
        ("mask=1100, hits=0.5", "hits or mask, one of them"),
        ("interval=4, mask=1100", "an interval and warmup, hits or mask"),
    ],
)
def test_what_is_no_mask_is_refused(knobs: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        resolve(f"taylorseer({knobs})")
