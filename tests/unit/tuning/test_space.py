"""The space of recipes comes from the techniques' declarations."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from vivace.benchmark.rounds.support import Support, support_of
from vivace.errors import RecipeError, UsageError
from vivace.foundation.spec.arguments import parse_bytes, parse_seconds
from vivace.foundation.spec.record import Outcome
from vivace.machinery.technique import (
    Effect,
    Machine,
    Stage,
    Target,
    Technique,
    TechniqueFacts,
    knob,
)
from vivace.models.find import find_model
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.runtime.cache_fits import schedule_file
from vivace.techniques import TECHNIQUES
from vivace.tuning import tuner
from vivace.tuning.model.by_model import ModelSampler
from vivace.tuning.model.priors import effects
from vivace.tuning.search.objective import Objective
from vivace.tuning.search.results import Result, Rung
from vivace.tuning.search.space import Space, options


class Halving(Technique):
    name: ClassVar[str] = "halving"
    summary: ClassVar[str] = "a technique of tomorrow"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(
        stage=Stage.SCHEDULE, owns="halving", same_picture=True
    )

    share: float = knob(0.5, gt=0, le=1, tune=[0.25, 0.75])

    def unsupported(self, target: Target) -> str | None:
        return None

    def apply(self, target: Target) -> Effect:
        return Effect(changed={"share": self.share})


def bench_on(device: str) -> Any:
    return SimpleNamespace(
        launcher=None, model=None, device=device, task=None, judges=True,
        request=SimpleNamespace(batch=1), environment=SimpleNamespace(device=device),
    )  # fmt: skip


def texts(space: Space) -> set[str]:
    return {option.text for option in space.options}


def test_options_are_the_declared_values() -> None:
    assert [option.text for option in options(TECHNIQUES["steps"])] == ["steps(8)", "steps(12)", "steps(20)"]
    option_texts = {option.text for option in options(TECHNIQUES["quantize"])}
    assert {"quantize(int8)", "quantize(fp8)", "quantize(int8)@vae"} <= option_texts
    assert {option.text for option in options(TECHNIQUES["first_block_cache"])} >= {
        "first_block_cache",
        "first_block_cache(0.3)",
        "first_block_cache(hits=0.5)",
    }


def test_a_new_technique_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TECHNIQUES, "halving", Halving)
    space = Space.of(Objective())
    assert {"halving", "halving(0.25)", "halving(0.75)"} <= texts(space)
    around = {recipe.text for recipe in space.neighbours(resolve("tiny_vae"))}
    assert "tiny_vae+halving(0.25)" in around


def test_neighbours_never_conflict_and_swap_what_owns_the_slot() -> None:
    space = Space.of(Objective())
    start = resolve("fp16+first_block_cache(0.1)+steps(8)")
    by_text = {recipe.text: recipe for recipe in space.neighbours(start)}
    assert "dtype(fp16)+first_block_cache(0.1)" in by_text  # one less
    assert "dtype(bf16)+first_block_cache(0.1)+steps(8)" in by_text  # one swapped
    assert "tiny_vae+dtype(fp16)+first_block_cache(0.1)+steps(8)" in by_text  # one more
    for recipe in by_text.values():
        assert resolve(recipe.text) == recipe  # raises for a conflict
        assert sum(t.name in ("first_block_cache", "teacache") for t in recipe) <= 1


def test_same_picture_only() -> None:
    space = Space.of(Objective(same_picture_only=True))
    assert all(option.facts.same_picture for option in space.options)
    assert "quality" in space.cut["steps"]


def test_keep_and_without() -> None:
    space = Space.of(Objective(keep=("bf16", "tiny_vae"), without=("steps",)))
    assert space.base().text == "tiny_vae+dtype(bf16)"
    around = list(space.neighbours(space.base()))
    assert around
    assert space.base() in space.pool(lambda recipes: [0.0] * len(recipes), [])
    for recipe in around:
        assert {"tiny_vae", "dtype"} <= {t.name for t in recipe}
        assert resolve("bf16").techniques[0] in recipe.techniques
        assert "steps" not in {t.name for t in recipe}


def test_keep_and_without_contradict() -> None:
    with pytest.raises(UsageError, match="--keep steps and --without steps"):
        Objective(keep=("steps(8)",), without=("steps",))
    with pytest.raises(UsageError, match="--keep tiny_vea: no technique 'tiny_vea'; did you mean 'tiny_vae'"):
        Objective(keep=("tiny_vea",))
    with pytest.raises(RecipeError, match="keep one"):
        Objective(keep=("bf16", "fp16"))


def test_what_only_a_benchmark_gains_by_is_searched_on_request_alone() -> None:
    space = Space.of(Objective())
    assert "prompt_cache" not in texts(space)
    assert "--keep prompt_cache" in space.cut["prompt_cache"]
    assert "prompt_cache" in texts(Space.of(Objective(keep=("prompt_cache",))))


def test_precision_that_may_overflow_needs_a_judge() -> None:
    assert "dtype(fp16)" in texts(Space.of(Objective(), judges=True))
    unjudged = Space.of(Objective(same_picture_only=True), judges=False)
    assert "dtype(fp16)" not in texts(unjudged)
    assert "dtype(bf16)" in texts(unjudged)
    assert "dtype(fp16)" in texts(Space.of(Objective(same_picture_only=True, keep=("fp16",)), judges=False))


@pytest.mark.parametrize(
    ("device", "keep", "searched"), [("cpu", "", False), ("cpu", "parallel", True), ("cuda", "", True)]
)
def test_several_processes_are_searched_on_gpus(
    device: str, keep: str, searched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner, "ask_support", lambda *_: Support({}))
    space = tuner.space_of(Objective(keep=(keep,) if keep else ()), bench_on(device))
    assert ("parallel(cfg)" in texts(space)) == searched
    assert searched or "--keep parallel" in space.cut["parallel(cfg)"]


@pytest.mark.parametrize("task", ["text", "edit"])
def test_what_keeps_sources_is_searched_for_edits(task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "ask_support", lambda *_: Support({}))
    bench = bench_on("cuda")
    bench.task = task
    assert ("reference_cache" in texts(tuner.space_of(Objective(), bench))) == (task == "edit")


@pytest.mark.long
def test_options_name_only_components_that_the_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    support = support_of("synthetic:sdxl", ["compile@vae"], "cpu")
    assert support.components == {"denoiser", "text_encoder", "text_encoder_2", "vae"}
    queried: list[str] = []

    def answer(*arguments: Any) -> Support:
        queried.extend(arguments[2])
        everywhere = next(text for text in queried if text.startswith("quantize(int8)@denoiser,"))
        return Support({everywhere: "too old"}, support.components)

    monkeypatch.setattr(tuner, "ask_support", answer)
    space = tuner.space_of(Objective(same_picture_only=True), bench_on("cuda"))
    assert not [text for text in texts(space) if "text_encoder_3" in text]
    everywhere = "@denoiser,text_encoder,text_encoder_2,vae"
    assert space.cut[f"quantize(int8){everywhere}"] == "too old"
    assert f"compile{everywhere}" in texts(space)
    around = [recipe.text for recipe in space.neighbours(resolve("compile"))]
    assert f"compile{everywhere}" in around
    assert not [text for text in around if "text_encoder_3" in text]


GRAPHS = "cuda_graph@denoiser,text_encoder,text_encoder_2,vae"


@pytest.mark.long
def test_a_technique_judges_what_those_before_it_have_made_and_left_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    works = [f"fused(fp8)@denoiser,vae+{GRAPHS}+gpu_postprocess", "fused(fp8)+cuda_graph"]
    fails = {
        GRAPHS: "no fixed address",
        f"fused(fp8)+{GRAPHS}": "no fixed address",
        "fused(fp8)@denoiser,vae+channels_last": "channels_last: no convolution to convert",
    }
    gpu = Machine("cuda", "NVIDIA H100", (9, 0), "c++")
    monkeypatch.setattr("vivace.measure.machine.choose_device", lambda device: device)
    monkeypatch.setattr("vivace.measure.machine.this_machine", lambda device: gpu)
    monkeypatch.setattr(Machine, "has_package", lambda self, name: True)
    idle, useful = "fused(fp8)@denoiser,vae+tf32", "fused(fp8)+tf32"
    support = support_of("synthetic:sdxl", [*works, *fails, idle, useful], "cuda")
    assert support.reasons.keys() == fails.keys()
    for text, reason in fails.items():
        assert reason in support.reasons[text]
    assert set(support.by_model) == fails.keys()
    assert list(support.idle) == [idle], "without fused, SDXL's VAE computes in fp32"
    assert "nothing computes in fp32" in support.idle[idle]["tf32"]
    recipes = [resolve(idle), resolve(useful)]
    refused = support.refusals(recipes)
    assert idle in refused
    assert useful not in refused
    assert idle not in support.refusals(recipes, Objective(keep=("tf32",)).keeps)


def test_what_breaks_without_weights_is_left_to_its_round(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Effect:
        raise NotImplementedError("no kernel for meta tensors")

    monkeypatch.setattr(TECHNIQUES["channels_last"], "predict", broken)
    assert support_of("tiny-sd", ["channels_last+steps(8)", "channels_last"], "cpu").reasons == {}


def test_amounts_have_units() -> None:
    amounts = {"12GB": 12e9, "8": 8e9, "1.5 GiB": 1.5 * 2**30, "900mb": 9e8}
    assert {text: parse_bytes(text) for text in amounts} == amounts
    assert parse_seconds("2min") == 120
    for text in ("", "12 apples", "-3GB", "0", "1e9"):
        with pytest.raises(UsageError, match="is not"):
            parse_bytes(text)


def test_what_a_model_has_of_its_own_is_proposed_and_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few-step LoRAs at the steps that they are made for, and schedules of `vivace calibrate schedule`."""
    told: list[str] = []
    flux2 = find_model("synthetic:flux2-dev")
    assert not tuner.of_the_model(flux2, 50, told.append), "distilled(turbo) is what it has"
    lightning = tuner.of_the_model(find_model("synthetic:qwen-image-2512"), 50, told.append)
    assert [option.text for option in lightning] == ["distilled(lightning, steps=8)"]
    assert not told

    monkeypatch.chdir(tmp_path)
    located = find_model("tiny-sd")
    about = {"model": f"tiny-sd@{located.model.revision}", "cache": "taylorseer(order=0)"}
    mask = "1100100010" + "0100000100" + "00000"
    for budget, model in ((7, about["model"]), (8, "tiny-sd@another")):
        written = {"about": about | {"model": model}, "distances": {}, "mask": mask, "version": 1}
        (tmp_path / schedule_file("tiny-sd", str(budget), 25)).write_text(json.dumps(written))
    own = tuner.of_the_model(located, 25, told.append)
    (searched,) = [option for option in own if option.name == "taylorseer"]
    assert searched.values["mask"] == mask
    assert searched.text in told[0]
    assert "left out" in told[1]

    space = Space.of(Objective(), reported=own)
    recipes = list(space.neighbours(resolve(searched.text)))
    assert resolve(f"tiny_vae+{searched.text}") in recipes
    assert not any(
        searched in recipe.techniques and {"steps", "distilled"} & {t.name for t in recipe}
        for recipe in recipes
    ), "its steps are 25"
    stages = {"steps": 0.9, "vae": 0.1}
    beliefs = effects(space.options, stages, Objective(), 25)
    assert beliefs[searched.text].mean == pytest.approx(-math.log(1 - 0.9 * 19 / 25))
    sampler = ModelSampler(
        Space.of(Objective(without=("distilled",)), reported=own), np.random.default_rng(0), (), beliefs
    )
    base = Result(Recipe(), Outcome.MEASURED, Rung.SCREENED, 0.0, 0.01, stages_s=tuple(stages.items()))
    assert sampler.ask([base], 4) == [resolve(searched.text)], "it promises most"
    (usual,) = resolve("distilled(turbo)")
    beliefs = effects([usual], stages, Objective(), 50, few_steps=tuner.known_few_steps(flux2))
    assert beliefs[usual.text].mean == pytest.approx(-math.log(1 - 0.9 * 42 / 50)), "8 steps, not 4"
