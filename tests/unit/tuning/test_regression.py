"""The model of effects learns from few trials, and says how unsure it is."""

import math

import pytest

from tests.unit.recommendation.tables import evidence
from tests.unit.recommendation.tables import table as community_table
from vivace.evidence.recorded import all_recorded
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.tuning.model import priors
from vivace.tuning.model.priors import known_sources, no_record
from vivace.tuning.model.regression import Datum, Regression
from vivace.tuning.search.objective import Objective


def recipes(*texts: str) -> list[Recipe]:
    return [resolve(text) for text in texts]


def test_effects_add_up() -> None:
    belief = Regression()
    belief.learn([Datum(resolve("tiny_vae"), 0.3, 0.01), Datum(resolve("steps(8)"), 0.5, 0.01)])
    mean, sd = belief.estimate(recipes("tiny_vae+steps(8)", "tiny_vae", "channels_last"))
    assert mean[0] == pytest.approx(0.8, abs=0.05)
    assert mean[1] == pytest.approx(0.3, abs=0.01)
    assert sd[1] < sd[0] < sd[2]  # measured, made of what was measured, unknown


def test_a_pair_is_learnt_only_from_recipes_that_have_it() -> None:
    belief = Regression()
    singles = [Datum(resolve("tiny_vae"), 0.3, 0.005), Datum(resolve("steps(8)"), 0.5, 0.005)]
    belief.learn([*singles, Datum(resolve("tiny_vae+steps(8)"), 0.6, 0.005)])
    mean, _ = belief.estimate(recipes("tiny_vae+steps(8)", "tiny_vae", "tiny_vae+steps(8)+channels_last"))
    assert mean[0] == pytest.approx(0.6, abs=0.02)
    assert mean[1] == pytest.approx(0.3, abs=0.03)
    assert mean[2] == pytest.approx(0.6, abs=0.05)  # the pair's loss is expected of larger recipes


def test_records_of_the_same_model_and_family_count_most() -> None:
    data = [d for s in known_sources("flux-dev", "NVIDIA H100", Objective()) for d in s.data]
    mine = [d for d in data if d.recipe.text == "quantize(fp8)+compile"]
    assert min(d.error for d in mine) == 0.05
    elsewhere = [d for s in known_sources("flux-dev", "some CPU", Objective()) for d in s.data]
    assert min(d.error for d in elsewhere) == 0.4
    named = {source.name for source in known_sources("flux-dev", "NVIDIA H200", Objective(), ("records",))}
    assert "vivace's records" not in named
    assert "study 004" in named


@pytest.mark.parametrize(
    ("gpu", "least"),
    [
        ("NVIDIA H800", 0.05),
        ("NVIDIA A10G", 0.05),
        ("NVIDIA RTX 6000 Ada Generation", 0.15),
        ("NVIDIA B300", 0.15),
        ("Tesla T4", 0.2),
        ("AMD Instinct MI300X", 0.4),
    ],
)
def test_all_generations_learn_from_their_own(gpu: str, least: float) -> None:
    """Of these, tuning once knew none, and took an H100's records for as good as an A100's."""
    sources = known_sources("flux-dev", gpu, Objective())
    assert min(datum.error for source in sources for datum in source.data) == pytest.approx(least)


def test_what_owners_of_cards_reported_is_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    reported = community_table(
        evidence("compile", 1.5),
        evidence("quantize(fp8)", 1.2),
        kind="community",
        gpu="NVIDIA GeForce RTX 4090",
    )
    monkeypatch.setattr(priors, "community_tables", lambda: (reported,))
    (source,) = (
        s for s in known_sources("flux-dev", "NVIDIA L40S", Objective()) if s.name == "reports of others"
    )
    gains = {datum.recipe.text: (datum.value, datum.error) for datum in source.data}
    assert gains["compile"] == (pytest.approx(math.log(1.5)), 0.05)
    assert set(gains) == {"compile", "quantize(fp8)"}
    assert no_record("NVIDIA L40S") is None


def test_a_card_that_nobody_measured_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(priors, "community_tables", lambda: ())
    for name in ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090", "NVIDIA A100-SXM4-80GB", "some card"):
        assert f"no record is of {name} or its generation" in (no_record(name) or "")
    assert no_record("NVIDIA H100 NVL") is None
    assert no_record("AMD EPYC", "cpu") is None


def test_what_fewer_steps_gained_is_not_taken_from_records() -> None:
    """15 steps of 30 halve the time, and 15 of 20 do not."""
    assert any("steps(" in recipe for _, recipe, _, _ in all_recorded())
    (records,) = (
        s for s in known_sources("sd15", "NVIDIA H100", Objective()) if s.name == "vivace's records"
    )
    assert records.data
    assert not any("steps(" in datum.recipe.text for datum in records.data)


def test_a_cpu_learns_from_gpus_only_what_leaves_work_out() -> None:
    gpu = [d for s in known_sources("flux-dev", "some card", Objective()) for d in s.data]
    cpu = [d for s in known_sources("flux-dev", "AMD EPYC", Objective(), is_cpu=True) for d in s.data]
    assert cpu
    assert len(cpu) < len(gpu)
    assert not any(technique.facts.same_picture for datum in cpu for technique in datum.recipe)
    assert any(technique.facts.same_picture for datum in gpu for technique in datum.recipe)
