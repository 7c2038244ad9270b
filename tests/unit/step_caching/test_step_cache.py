"""What all step caches share."""

from typing import Any

import numpy as np
import pytest

import vivace
from tests.families import build, draw, drawn
from tests.targets import target_of
from vivace.errors import Unsupported
from vivace.machinery.step_caching.engine import CacheState, StepCounter
from vivace.machinery.step_caching.step_cache import StepCache
from vivace.machinery.step_caching.when import evenly_spaced
from vivace.recipes.resolve import resolve
from vivace.techniques import TECHNIQUES

CACHES = {name: kind for name, kind in TECHNIQUES.items() if issubclass(kind, StepCache)}
FAMILY = {"deepcache": "sd", "faster_cache": "sd"}


@pytest.mark.parametrize("name", CACHES)
def test_the_schedules_are_the_last_knobs(name: str) -> None:
    """Wherever order counts: a recipe's positions, its text, and the knobs as stored."""
    kind = CACHES[name]
    knobs = list(kind.knobs())
    assert knobs[-2:] == ["hits", "mask"] or (name == "dual_block_cache" and knobs[-1] == "hits")
    assert knobs[0] == kind.replaced[0]
    assert list(kind(hits=0.5).values) == knobs
    assert (kind.model_fields["hits"].description or "").endswith(f"instead of {kind.replaced_in_words}")
    assert resolve(f"{name}(hits=0.5)").text == f"{name}(hits=0.5)"
    assert resolve(f"{name}(mask=11100100)").text == f"{name}(mask='11100100')"
    first = kind.model_fields[knobs[0]].default + 2
    assert resolve(f"{name}({first})").text == f"{name}({first:g})"


@pytest.mark.parametrize("share", [0.1, 0.5, 0.65, 0.99])
def test_hits_are_evenly_spaced(share: float) -> None:
    is_hit = evenly_spaced(share)
    hits = [is_hit(CacheState(step), lambda: None) for step in range(101)]
    assert not hits[0]
    assert sum(hits) == int(100 * share)
    for start in range(1, 90):
        assert abs(sum(hits[start : start + 10]) - 10 * share) <= 1
    assert not any(evenly_spaced(0)(CacheState(step), lambda: None) for step in range(9))


def test_the_counter_says_when_nothing_was_skipped() -> None:
    counter = StepCounter()
    assert counter.refuted({}) is None, "before any step"
    counter.count(False)
    assert str(counter.refuted({})).startswith("the cache never hit in 1 call of the denoiser: ")
    counter.count(True)
    assert counter.refuted({}) is None
    assert counter.evidence() == {"cache_hit_rate": 0.5, "cache_calls": 2}


@pytest.mark.parametrize("knobs", [{}, {"hits": 0.5}])
@pytest.mark.parametrize(
    "name", [name for name in CACHES if name != "reference_cache"]
)  # it takes no such model
@pytest.mark.diagonal
def test_a_prediction_computes_every_step(name: str, knobs: dict[str, Any]) -> None:
    """Whatever is missing for a decision, such as TeaCache's fit: none is made."""
    family = FAMILY.get(name, "flux")
    expected = drawn(family, num_inference_steps=4)
    pipe = build(family)
    target = target_of(pipe=pipe, has_weights=False, has_random_weights=True)
    cache = CACHES[name](**knobs)
    assert cache.unsupported(target) is None
    effect = cache.predict(target)
    picture = draw(vivace.apply(pipe), num_inference_steps=4)
    assert np.allclose(picture, expected, atol=1e-5)
    assert effect.evidence is not None
    assert effect.evidence()["cache_hit_rate"] == 0
    assert effect.evidence()["cache_calls"] == 4
    assert effect.changed[f"denoiser.{name}"]


@pytest.mark.parametrize("name", [name for name, kind in CACHES.items() if kind.compared])
def test_each_step_cache_on_random_weights_takes_a_fixed_schedule_only(name: str) -> None:
    target = target_of(pipe=build("flux"), has_random_weights=True)
    reason = CACHES[name]().unsupported(target) or ""
    assert CACHES[name].compared in reason
    assert f"give a fixed schedule, {name}(hits=0.5)" in reason
    assert CACHES[name](hits=0.5).unsupported(target) is None


@pytest.mark.parametrize("name", ["teacache", "magcache"])
def test_nothing_is_decided_without_what_was_to_be_measured(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    with pytest.raises(Unsupported, match=f"{name}: no .* vivace calibrate {name} --model M"):
        CACHES[name]().apply(target_of(pipe=build("flux")))
