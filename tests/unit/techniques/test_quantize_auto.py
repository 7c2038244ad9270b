"""quantize(skip=auto): which layers are left, measured once, and said in the record."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import vivace
from tests import flow_models
from tests.families import build, draw
from vivace.errors import RecipeError, Unsupported
from vivace.machinery.quantization.sensitivity import most_sensitive
from vivace.machinery.technique import component_of
from vivace.models import find_model, load_pipeline
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import session_of
from vivace.runtime.session import Session

PROMPTS = ["a red circle above a blue square", "a large green triangle"]
CALL = {"height": 64, "width": 64, "num_inference_steps": 3}
OTHERS = "single_transformer_blocks, transformer_blocks"
RECIPE = "quantize(int4, skip='auto, single_transformer_blocks', pictures=1, skip_share=0.1)"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VIVACE_CACHE", str(tmp_path))
    return tmp_path / "sensitivity"


def opened(recipe: str, prompts: list[str] = PROMPTS, call: dict[str, int] = CALL) -> Session:
    torch.set_num_threads(1)
    located = find_model("tiny-flux")
    return session_of(load_pipeline(located, "cpu"), located, resolve(recipe), "cpu", dict(call), prompts)


def effect(made: Session) -> dict[str, Any]:
    return made.effects["quantize@denoiser"]


def test_most_error_for_the_cost_within_the_budget() -> None:
    errors = {"dear": 8.0, "cheap": 4.0, "same": 1.0, "twin": 1.0, "free": 0.5, "dull": 0.1}
    costs = {"dear": 0.5, "cheap": 0.04, "same": 0.01, "twin": 0.01, "free": 0.0, "dull": 0.44}
    assert most_sensitive(errors, costs, 0.05) == ["cheap", "same"], "the twin comes later, by name"
    assert most_sensitive(errors, costs, 0.07) == ["cheap", "same", "twin"]
    assert most_sensitive(errors, costs, 0.035) == ["same", "twin"], (
        "what does not fit leaves room for others"
    )
    assert most_sensitive(errors, costs, 1.0) == ["cheap", "same", "twin", "dear"], (
        "not what costs more than it helps"
    )
    assert most_sensitive(dict.fromkeys(errors, 0.0), costs, 1.0) == []


def test_it_is_measured_once_and_chooses_the_same_when_reloaded(cache: Path) -> None:
    first = opened(RECIPE)
    facts = effect(first)
    assert facts["sensitivity"] == "measured on 1 image"
    assert 0 < facts["denoiser.sensitive_share_of_work"] <= 0.1
    assert 0 < facts["denoiser.sensitive_share_of_weights"] <= 0.1
    assert facts["denoiser.predicted_error"] < facts["denoiser.predicted_error_with_all"]
    evidence = first.evidence()
    listed = evidence["denoiser.sensitive"]
    assert isinstance(listed, list)
    assert len(listed) == facts["denoiser.sensitive_layers_left"]
    left = [line.partition(":")[0] for line in listed]
    assert "x_embedder" in left, "what enters the denoiser is worth most"
    for name in left:
        weight = component_of(first.pipe, "denoiser").get_submodule(name).weight
        assert type(weight) is torch.nn.Parameter
    assert "x_embedder: sensitive" in evidence["denoiser.left_alone"]
    (file,) = cache.iterdir()
    assert facts["sensitivity_file"] == file.name

    second = opened(RECIPE)
    assert effect(second) == facts | {"sensitivity": "reloaded, measured on 1 image"}
    assert second.evidence() == evidence
    assert np.array_equal(draw(second), draw(first))

    more = opened(RECIPE.replace("0.1", "0.5"))
    assert "reloaded" in effect(more)["sensitivity"], "the share is no part of what is measured"
    assert effect(more)["denoiser.sensitive_layers_left"] > facts["denoiser.sensitive_layers_left"]

    file.write_text(json.dumps({"errors": {}, "work": {}, "source": ""}))
    assert effect(opened(RECIPE)) == facts, "what is damaged is measured again, and comes out the same"


def test_measuring_leaves_the_layers_as_they_were(cache: Path) -> None:
    """With a share that nothing fits into, it is the same as without."""
    none = opened(f"quantize(int8, skip='{OTHERS}')")
    auto = opened(f"quantize(int8, skip='auto, {OTHERS}', pictures=1, skip_share=0.0001)")
    assert effect(auto)["denoiser.sensitive_layers_left"] == 0
    assert np.array_equal(draw(auto), draw(none))


def test_where_it_cannot_measure_it_says_why(cache: Path) -> None:
    with pytest.raises(Unsupported, match=r"measure which layers are sensitive.*prompts=\[\.\.\.\]"):
        vivace.apply(build("flux"), "quantize(int8, skip=auto)")
    with pytest.raises(Unsupported, match="synthetic:sana-1600m has random weights"):
        flow_models.session("sana-1600m", "quantize(int8, skip=auto)")
    assert not cache.exists()
    with pytest.raises(Unsupported, match="no layer of denoiser is called 'nothing'"):
        opened("quantize(int8, skip='auto, nothing')")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("quantize(int8, skip_share=0.1)", "skip_share is for skip=auto"),
        ("quantize(int8, skip=auto)@denoiser,text_encoder", "aim it at the denoiser alone"),
        ("quantize(int8, skip=auto, skip_share=0.6)", "skip_share must be a number"),
    ],
)
def test_knobs_that_do_not_go_together(recipe: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        resolve(recipe)


def test_records_of_before_keep_their_form() -> None:
    plain, auto = resolve("quantize(int8)").spec, resolve("quantize(int8, skip=auto, skip_share=0.1)").spec
    assert "skip_share" not in plain.techniques[0].knobs
    assert auto.techniques[0].knobs["skip_share"] == 0.1
    assert auto.text == "quantize(int8, skip=auto, skip_share=0.1)"
