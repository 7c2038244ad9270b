"""Models that edit an image, with random weights: the image counts, in what they draw, compute and take."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.flow_models import EDITING, PROMPT, draw, pipeline, reference, session, source
from tests.narrow import SIDE, make_all_small
from tests.typed import typed
from vivace.architectures import ARCHITECTURES
from vivace.benchmark import Store
from vivace.errors import Unsupported, WorkloadError
from vivace.foundation.spec.record import Outcome
from vivace.models.find import find_model
from vivace.models.sources import FOLDER
from vivace.models.synthetic import on_meta, tokenizer_for, with_processor
from vivace.models.tasks import check_installed
from vivace.runtime.workloads import checked_request

QWEN = EDITING[1:]
QUICK = ["--repeats", "1", "--rounds", "1", "--warmup", "1", "--device", "cpu", "--no-rivals"]
TOKENS = (SIDE // 16) ** 2
"""Of an image of SIDE pixels."""


@pytest.mark.parametrize("model", EDITING)
@pytest.mark.slow("qwen-image-edit-25*")
@pytest.mark.quick("qwen*")
def test_it_looks_at_the_picture_and_hears_the_prompt(model: str) -> None:
    opened = session(model)
    tokens: list[int] = []
    opened.pipe.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: tokens.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    picture = draw(opened)
    assert picture.shape == (1, SIDE, SIDE, 3)
    assert 0.05 < picture.std() < 0.5
    assert np.array_equal(picture, reference(model))
    assert set(tokens) == {2 * TOKENS}, "the source's tokens lie behind the image's own"
    assert not np.array_equal(draw(opened, image=source(1)), picture)
    assert not np.array_equal(draw(opened, "a yellow star"), picture)


@pytest.mark.parametrize("model", QWEN)
def test_the_text_encoder_sees_as_many_tokens_as_when_published(model: str) -> None:
    """A megapixel is 37 x 37 tokens, the smaller copy of 2509 14 x 14."""
    config = on_meta(ARCHITECTURES[model].components["text_encoder"], with_buffers=False).config
    pipe = pipeline(model)
    parts = {"text_encoder": SimpleNamespace(config=config), "tokenizer": tokenizer_for(config, 1024)}
    processor = with_processor(type(pipe), parts)["processor"]
    before = pipe.prompt_template_encode.partition("{}")[0].partition("<|vision_start|>")[0]
    # Qwen's vocabulary has "'s", which is in the template twice, and ")," as one token each.
    assert len(processor.tokenizer.tokenize(before)) == pipe.prompt_template_encode_start_idx + 3
    side, tokens = (1024, 37 * 37) if model == "qwen-image-edit" else (384, 14 * 14)
    text = "<|vision_start|><|image_pad|><|vision_end|>"
    inputs = processor(text=[text + PROMPT, text], images=[Image.new("RGB", (side, side))] * 2, padding=True)
    assert inputs.input_ids.shape == (2, tokens + 2 + 7)
    assert (inputs.input_ids == config.image_token_id).sum(dim=1).tolist() == [tokens, tokens]
    assert inputs["attention_mask"].sum(dim=1).tolist() == [tokens + 9, tokens + 2]
    assert inputs["pixel_values"].shape == (2 * 4 * tokens, 3 * 2 * 14 * 14)
    assert int(inputs.input_ids.max()) == config.image_token_id, "no word has the id of a mark"


@pytest.mark.parametrize("model", QWEN)
@pytest.mark.quick("*2511")
def test_prompts_are_kept_with_the_picture_that_they_go_with(model: str) -> None:
    call: dict[str, Any] = {"num_inference_steps": 2, "output_type": "latent"}
    opened = session(model, "prompt_cache")
    first, other = reference(model, **call), draw(session(model), image=source(1), **call)
    assert not np.array_equal(first, other)
    assert np.array_equal(draw(opened, **call), first)
    assert np.array_equal(draw(opened, image=source(1), **call), other)
    assert np.array_equal(draw(opened, **call), first)
    evidence = opened.evidence()
    assert (evidence["prompt_cache_misses"], evidence["prompt_cache_hits"]) == (4, 2), (
        "prompt and negative prompt"
    )


@pytest.mark.long
def test_a_batch_has_a_picture_for_each_prompt() -> None:
    both = draw(session("qwen-image-edit"), [PROMPT, PROMPT], image=[source(), source(1)])
    assert both.shape == (2, SIDE, SIDE, 3)
    assert np.abs(both[:1] - reference("qwen-image-edit")).max() < 0.02
    with pytest.raises(
        WorkloadError, match=r"--batch 2: synthetic:qwen-image-edit-2509 is a .* one prompt a call"
    ):
        checked_request("synthetic:qwen-image-edit-2509", "baseline", batches=(2,))


def test_torchvision_is_asked_for_before_57_gb_are_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Unsupported, match="needs torchvision, which is not installed; run `pip install"):
        check_installed("QwenImageEditPipeline", "qwen-image-edit")
    check_installed("FluxKontextPipeline", "flux-kontext")


@pytest.mark.parametrize("model", EDITING)
def test_its_entry_says_how_it_is_run(model: str) -> None:
    workload = checked_request(f"synthetic:{model}", "baseline").workload
    assert (workload.task, workload.strength, workload.width) == ("edit", None, 1024)
    assert len(workload.sources) == len(workload.prompts) == 6
    assert workload.prompts[0].startswith("turn it into")
    with pytest.raises(Unsupported, match="no pipeline for the task 'inpaint'"):
        checked_request(f"synthetic:{model}", "baseline", task="inpaint")


def test_building_a_model_leaves_its_architecture_as_it_is() -> None:
    before = find_model("synthetic:qwen-image-edit").model.revision
    on_meta(ARCHITECTURES["qwen-image-edit"].components["text_encoder"], with_buffers=False)
    assert find_model("synthetic:qwen-image-edit").model.revision == before


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_all_small(monkeypatch)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("model", EDITING)
@pytest.mark.long
@pytest.mark.exhaustive("flux-kontext", "qwen-image-edit", "qwen-image-edit-2509")
def test_it_is_planned_benched_and_generates(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name = f"synthetic:{model}"
    assert typed(monkeypatch, "plan", name, "--why") == 0
    assert "vae encoder" in " ".join(capfd.readouterr().out.split())
    picture = str(FOLDER / "03.png")
    command = ["bench", "--model", name, "--task", "edit", "--image", picture, "--steps", "3"]
    command += ["--recipe", "baseline", "--recipe", "taylorseer(hits=0.5)", *QUICK]
    assert typed(monkeypatch, *command) == 0, capfd.readouterr().err
    out, err = capfd.readouterr()
    assert f"{name} on " in out
    assert "\nedit · " in out
    assert "ignored" not in out + err, "nothing is passed that its pipeline has no use for"
    with Store.read_only(tmp_path / ".vivace") as store:
        records = [store.record(key) for key in store.runs()[0].keys]
    assert [record.outcome for record in records if record is not None] == [Outcome.MEASURED] * 2
    generate = ["generate", "make it blue", "--model", name, "--image", picture, "--device", "cpu"]
    assert typed(monkeypatch, *generate) == 0
    with Image.open(capfd.readouterr().out.strip()) as drawn:
        assert drawn.size == (SIDE, SIDE)
        assert drawn.text["task"] == "edit"  # type: ignore[attr-defined]
    assert typed(monkeypatch, "generate", "x", "--model", name, "--image", picture, "--strength", "0.5") == 2
    assert "--strength 0.5: only image-to-image and inpainting have one" in capfd.readouterr().err
