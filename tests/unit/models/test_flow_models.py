"""The transformers after FLUX.1 with random weights: they draw, and what they take is predicted without them."""

from typing import Any

import numpy as np
import pytest

from tests.flow_models import MODELS, PROMPT, STEPS, draw, reference, session
from tests.narrow import SIDE
from vivace.architectures import ARCHITECTURES
from vivace.errors import WorkloadError
from vivace.evidence.lint.model_limits import flops_of
from vivace.models.sources import example_images
from vivace.models.synthetic import on_meta, tokenizer_for
from vivace.recipes.resolve import resolve
from vivace.runtime.export import _call_block
from vivace.runtime.memory.predict import predict
from vivace.runtime.memory.weightless import find_weightless
from vivace.runtime.workloads import checked_request


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.quick("sd35*", "sana-sprint*", "qwen-image-2.1*", "flux2-dev*", "ideogram*")
def test_it_draws_something(model: str) -> None:
    spreads: list[float] = []
    opened = session(model)
    step = opened.pipe.scheduler.step

    def keep(*args: Any, **kwargs: Any) -> Any:
        made = step(*args, **kwargs)
        spreads.append(float(made[0].std()))
        return made

    opened.pipe.scheduler.step = keep
    picture = draw(opened)
    assert len(spreads) == STEPS
    assert all(0.3 < spread < 3 for spread in spreads), spreads
    assert picture.shape[-1] == (4 if model == "qwen-image-2.1" else 3), "that one has an alpha channel"
    assert np.isfinite(picture).all()
    assert picture.std() > 0.05
    assert ((picture == 0) | (picture == 1)).mean() < 0.2, "hardly any pixel is clipped"
    assert not np.array_equal(draw(session(model), "a yellow star"), picture), "it hears the prompt"


def test_sana_sprint_takes_any_number_of_steps() -> None:
    for steps in (1, 2, 3):
        assert np.isfinite(draw(session("sana-sprint-1600m"), num_inference_steps=steps)).all()


def test_prompts_are_left_as_they_were() -> None:
    prompts = ["a red circle"]
    first = draw(session("z-image-turbo"), prompts)
    assert prompts == ["a red circle"], "ZImagePipeline writes its template into the list"
    assert np.array_equal(first, draw(session("z-image-turbo"), prompts))


def test_qwen_image_s_template_is_as_long_as_what_its_pipeline_drops() -> None:
    config = on_meta(ARCHITECTURES["qwen-image"].components["text_encoder"], with_buffers=False).config
    tokenizer = tokenizer_for(config, 1024)
    opened = session("qwen-image")
    before, _, _ = opened.pipe.prompt_template_encode.partition("{}")
    assert len(tokenizer.tokenize(before)) == opened.pipe.prompt_template_encode_start_idx
    rows = tokenizer([PROMPT, "a"], padding=True, return_tensors="pt")
    assert rows.input_ids.shape == rows.attention_mask.shape == (2, 7)
    assert rows["attention_mask"].sum(dim=1).tolist() == [7, 1]


def test_qwen_image_21_drops_its_first_turn_and_knows_a_picture_s_tokens() -> None:
    pipe = session("qwen-image-2.1").pipe
    before, _, _ = pipe.prompt_template_t2i.partition("<|im_start|>user")
    processor = pipe.processor
    assert len(processor.tokenizer.encode(before)) == pipe._drop_idx == 12
    assert pipe._img_token_id == pipe.text_encoder.config.image_token_id
    embeddings, mask, is_image = pipe.encode_prompt(["a", PROMPT])
    assert embeddings.shape[:2] == mask.shape == is_image.shape
    assert mask.sum(dim=1).tolist() == [9, 15], "prompts are as long as they are"
    assert not is_image.any()


def test_qwen_image_21_takes_multiples_of_32_pixels() -> None:
    with pytest.raises(WorkloadError, match="takes multiples of 32 pixels; the nearest is 1024"):
        predict(find_weightless("qwen-image-2.1"), resolve("baseline"), height=1040)


def test_krea_2_raw_is_guided_at_any_scale() -> None:
    picture, plain = reference("krea-2-raw"), draw(session("krea-2-raw", guidance_scale=0.0))
    assert np.isfinite(picture).all()
    assert 0.05 < picture.std() < 0.5
    assert np.abs(draw(session("krea-2-raw", guidance_scale=0.5)) - plain).max() > 0.001
    assert np.abs(picture - plain).max() > 0.01


def test_klein_s_base_is_guided_by_a_second_call_and_klein_is_not() -> None:
    for model, calls in (("flux2-klein-base-4b", 2), ("flux2-klein-4b", 1)):
        opened = session(model)
        seen: list[int] = []
        opened.pipe.transformer.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        assert np.isfinite(draw(opened, output_type="latent")).all()
        assert len(seen) == calls * STEPS, model


def test_the_text_is_computed_in_the_first_step_alone() -> None:
    opened = session("qwen-image-2.1")
    lengths: list[int] = []
    opened.pipe.transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    draw(opened)
    tokens = (SIDE // 16) ** 2
    assert lengths == [tokens + 15, *[tokens] * (STEPS - 1)]


def test_klein_9b_kv_draws_with_and_without_a_source_which_is_computed_once() -> None:
    opened = session("flux2-klein-9b-kv")
    lengths: list[int] = []
    opened.pipe.transformer.register_forward_pre_hook(
        lambda _, __, kwargs: lengths.append(kwargs["hidden_states"].shape[1]), with_kwargs=True
    )
    plain = draw(opened)
    edited = draw(opened, **example_images("FluxKontextPipeline", {"height": SIDE, "width": SIDE}))
    tokens = (SIDE // 16) ** 2
    assert lengths == [*[tokens] * STEPS, 2 * tokens, *[tokens] * (STEPS - 1)]
    assert np.isfinite(edited).all()
    assert np.abs(edited - plain).max() > 0.01
    with pytest.raises(WorkloadError, match="ignores it; leave it out"):
        checked_request("synthetic:flux2-klein-9b-kv", "baseline", guidance_scale=4.0)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("FLUX.2 [klein] 9B KV", "flux2-klein-9b-kv"),
        ("FLUX.2-klein-9b-kv-fp8", "flux2-klein-9b-kv"),
        ("FLUX.2 [klein] 9B", "flux2-klein-9b"),
        ("FLUX.2 [klein] base 9B", "flux2-klein-base-9b"),
    ],
)
def test_tables_name_each_klein_of_9b(name: str, model: str) -> None:
    found = flops_of(name)
    assert found is not None
    assert found.entry.name == model


def test_scripts_call_each_pipeline_as_it_takes_it() -> None:
    def call_of(model: str, **defaults: object) -> str:
        return " ".join("".join(_call_block(session(model, **defaults), "pipe", "a star", 7, [], [])).split())

    assert 'pipe( prompt="a star",' in call_of("flux2-klein-4b"), "its first argument is an image"
    assert 'pipe( "a star",' in call_of("z-image-turbo")
    assert "guidance_scale" not in call_of("qwen-image")
    assert 'true_cfg_scale=4.0, negative_prompt=" "' in call_of("qwen-image")
    assert "intermediate_timesteps=None" in call_of("sana-sprint-1600m", num_inference_steps=4)
    assert "intermediate_timesteps" not in call_of("sana-sprint-1600m", num_inference_steps=2)


@pytest.mark.parametrize(
    ("model", "model_gb", "peak_gb"),
    [
        ("sd35-medium", 16.32, 18.91),
        ("sana-1600m", 9.15, 10.93),
        ("sana-sprint-1600m", 9.16, 10.94),
        ("z-image-turbo", 20.69, 23.28),
        ("qwen-image", 57.75, 61.42),
        ("qwen-image-2.1", 32.46, 39.85),
        ("flux2-klein-4b", 16.03, 18.62),
        ("flux2-dev", 112.65, 115.25),
        ("cogview4-6b", 31.15, 37.4),
        ("krea-2-turbo", 34.83, 38.53),
    ],
)
@pytest.mark.quick("sd35*")
def test_memory_of_a_flow_model_is_predicted(model: str, model_gb: float, peak_gb: float) -> None:
    """At full size. The model's bytes follow from the number of parameters; the peak was not measured yet."""
    predicted = predict(find_weightless(model), resolve("baseline"))
    assert predicted.model_bytes / 1e9 == pytest.approx(model_gb, abs=0.02)
    assert predicted.peak_bytes / 1e9 == pytest.approx(peak_gb, abs=0.1)
    assert {"text encoders", "denoiser", "vae"} <= set(predicted.stages)
