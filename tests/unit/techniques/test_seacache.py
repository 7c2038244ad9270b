"""SeaCache: noise filtered out of what steps are compared by, steps skipped by it or by a schedule."""

from typing import Any

import pytest
import torch
from diffusers.hooks.sea_cache import _apply_sea_filter

import vivace
from tests.families import build, draw, drawn, psnr, session
from vivace.architectures.family import grid_of_ids
from vivace.machinery.step_caching.block_residual import watching_residuals
from vivace.machinery.step_caching.engine import relative_change
from vivace.techniques.seacache import sea_filtered

pytestmark = pytest.mark.usefixtures("fresh_compiler")

CALL = {"num_inference_steps": 12}


def ids_of(rows: int, columns: int, picture: int = 0) -> torch.Tensor:
    return torch.cartesian_prod(torch.tensor([picture]), torch.arange(rows), torch.arange(columns)).float()


# The filter


@pytest.mark.parametrize("sigma", [0.05, 0.5, 0.95])
def test_along_one_direction_it_is_diffusers_own(sigma: float) -> None:
    """There, where power falls by the product of what each direction has, both say the same of a single row."""
    tokens = torch.randn(1, 16, 3, generator=torch.Generator().manual_seed(0))
    expected = _apply_sea_filter(tokens.reshape(1, 1, 16, 3), sigma, power_exp=3.0)
    assert torch.allclose(sea_filtered(tokens, (1, 16), sigma, 3.0), expected.reshape(1, 1, 16, 3), atol=1e-5)


@pytest.mark.parametrize("grid", [(8, 8), (6, 9), (5, 4), (1, 7)])
def test_without_noise_nothing_is_filtered(grid: tuple[int, int]) -> None:
    tokens = torch.randn(2, grid[0] * grid[1] + 3, 5, generator=torch.Generator().manual_seed(0))
    filtered = sea_filtered(tokens, grid, 0.0, 2.0)
    assert torch.allclose(filtered, tokens[:, :-3].unflatten(1, grid), atol=1e-5)


def grid_of(ids: torch.Tensor) -> tuple[int, int]:
    return grid_of_ids(None, ((), {"img_ids": ids}))


def test_the_grid_is_read_from_the_tokens_places() -> None:
    assert grid_of(ids_of(3, 5)) == (3, 5)
    assert grid_of(ids_of(3, 5)[None]) == (3, 5), "with a batch's dimension, as older pipelines give them"
    assert grid_of(ids_of(128, 64).bfloat16()) == (128, 64)
    both = torch.cat([ids_of(4, 6), ids_of(8, 8, picture=1)])
    assert grid_of(both) == (4, 6), "what is drawn, and not the image that is edited"
    for broken in (torch.zeros(16, 3), ids_of(3, 5)[:-1], ids_of(3, 5).flip(0), ids_of(3, 5, picture=1)):
        with pytest.raises(ValueError, match="are not those of an image, row by row"):
            grid_of(broken)


# The cache


@pytest.mark.parametrize(("threshold", "max_skip"), [(0.5, 5), (2.0, 2)])
def test_changes_add_up_since_the_last_computed_step(threshold: float, max_skip: int) -> None:
    """Against a plain reckoning over the inputs that were really seen."""
    made = session("flux", f"seacache({threshold}, max_skip={max_skip})")
    transformer = made.pipe.transformer
    looks: list[torch.Tensor] = []
    computed_at: list[int] = []
    is_computing: list[bool] = []
    transformer.transformer_blocks[0].register_forward_pre_hook(lambda *_: is_computing.append(True))

    def modulates(_: Any, __: Any, output: Any) -> None:
        if is_computing:
            is_computing.clear()
            computed_at.append(len(looks) - 1)
        else:
            looks.append(output[0])

    transformer.transformer_blocks[0].norm1.register_forward_hook(modulates)
    draw(made, **CALL)
    assert len(looks) == 11, "the last step is computed without a look"
    sigmas = made.pipe.scheduler.sigmas.tolist()
    filtered = [sea_filtered(look, (8, 8), sigmas[k], 2.0) for k, look in enumerate(looks)]
    distance, skipped, expected = 0.0, 0, [0]
    for step in range(1, 11):
        distance += relative_change(filtered[step], filtered[step - 1])
        if distance >= threshold or skipped == max_skip:
            expected.append(step)
            distance, skipped = 0.0, 0
        else:
            skipped += 1
    assert computed_at[:-1] == expected
    assert 2 < len(expected) < 10
    rate = 1 - (len(expected) + 1) / 12
    assert made.evidence() == {"cache_hit_rate": pytest.approx(rate), "cache_calls": 12}


def test_a_residual_on_a_line() -> None:
    """Every other step is skipped; the residual added there is the line through the two computed before."""
    pipe = build("flux")
    made = vivace.apply(pipe, "seacache(hits=0.5, order=1)")
    with watching_residuals(pipe.transformer) as residuals:
        draw(made, **CALL)
    # Computed: 0, 1, 3, 5 ...; a hit adds what it adds between the same two places.
    for hit in (4, 6, 8):
        before, last = residuals[hit - 3], residuals[hit - 1]
        assert torch.allclose(residuals[hit], last + (last - before) / 2, atol=1e-4)
    assert torch.allclose(residuals[2], 2 * residuals[1] - residuals[0], atol=1e-4), "a step apart"
    assert made.evidence()["cache_hit_rate"] == pytest.approx(5 / 12)


def test_a_picture_that_is_no_square() -> None:
    size = {"height": 96, "width": 160}
    made = session("flux", "seacache(0.5)")
    assert psnr(draw(made, **CALL, **size), drawn("flux", **CALL, **size)) > 18
    assert made.evidence()["cache_hit_rate"] > 0.2
