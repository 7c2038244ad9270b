"""What continues computed steps: exact on the trajectories that each predictor assumes."""

from collections.abc import Callable

import pytest
import torch

from tests.families import build, draw, session
from tests.targets import target_of
from vivace.machinery.step_caching.engine import CacheState, Predictor
from vivace.machinery.step_caching.what import AverageVelocity, Dmd, Taylor
from vivace.recipes.resolve import resolve

MASK = "1101001000100000"
LEVELS = [(1 - k / 16) ** 1.5 for k in range(17)]
START, CHANGE = torch.randn(2, 2, 5, 3, generator=torch.Generator().manual_seed(0))


def errors(predictor: Predictor, value: Callable[[int], torch.Tensor], mask: str = MASK) -> list[float]:
    """Return each step's largest error, where the steps of a mask are computed and the rest predicted."""
    state, found = CacheState(), []
    for step, digit in enumerate(mask):
        state.step = step
        if digit == "1":
            state.previous, state.kept = state.kept, ()
            state.kept = predictor.keep(state, (value(step),))
            found.append(0.0)
        else:
            (predicted,) = predictor.predict(state)
            assert predicted.dtype == value(step).dtype
            found.append(float((predicted - value(step)).abs().max()))
    return found


def test_the_average_velocity_continues_what_is_linear_in_the_noise_level() -> None:
    def linear(step: int) -> torch.Tensor:
        return START + CHANGE * LEVELS[step]

    assert max(errors(AverageVelocity(lambda _: LEVELS), linear)) < 1e-5
    assert max(errors(Taylor(1, in_fp32=True), linear)) > 0.01, "a line in the number of steps is another"


@pytest.mark.parametrize("rate", [0.6, 0.95, 1.3])
def test_dmd_continues_an_exponential_however_far_apart_the_steps_are(rate: float) -> None:
    def exponential(step: int) -> torch.Tensor:
        return START + CHANGE * rate**step

    assert max(errors(Dmd(), exponential)[4:]) < 1e-3 * rate**16
    if rate == 0.6:
        assert max(errors(Taylor(1, in_fp32=True), exponential)[4:]) > 0.05
    assert max(errors(Dmd(), lambda step: START + CHANGE * step)) < 0.02, "a line is its limit"


def test_dmd_stays_where_it_is_when_what_changes_turns_back() -> None:
    values = {0: START, 1: START + CHANGE, 2: START + 0.5 * CHANGE}
    assert max(errors(Dmd(), lambda step: values[min(step, 2)], "111000")) < 0.05


@pytest.mark.parametrize(
    ("family", "cache"), [("flux", "taylorseer"), ("sd", "taylorseer"), ("flux", "seacache")]
)
@pytest.mark.parametrize("predictor", ["average_velocity", "dmd"])
def test_a_recipe_names_the_predictor(family: str, cache: str, predictor: str) -> None:
    made = session(family, f"{cache}(predictor={predictor}, mask=111010)")
    draw(made, num_inference_steps=6)
    assert made.evidence()["cache_hit_rate"] == pytest.approx(2 / 6)
    effect = made.effects[f"{cache}@denoiser"]
    assert effect[f"denoiser.{cache}_predictor"] == predictor
    assert effect[f"denoiser.{cache}"] == "mask=111010"


def test_what_goes_with_no_predictor_is_refused() -> None:
    with pytest.raises(ValueError, match="order is of the Taylor series"):
        resolve("taylorseer(order=2, predictor=dmd)")
    target = target_of(pipe=build("sd"))
    del target.pipe.scheduler.alphas_cumprod, target.pipe.scheduler.sigmas
    reason = resolve("taylorseer(predictor=average_velocity)").techniques[0].unsupported(target) or ""
    assert "tells no noise levels" in reason
