"""tiny-z-image: what is trained is what ZImagePipeline calls, and the folder that training leaves draws."""

from pathlib import Path

import pytest
import torch
from diffusers import ZImagePipeline

from tinyworld import networks, tokenizer, train_z_image, z_image

CAPTIONS = ["a red circle above a blue square", "a small yellow star", ""]


@pytest.fixture(scope="module")
def models():
    torch.manual_seed(0)
    return z_image.build_transformer().eval(), z_image.build_text_encoder().eval()


@torch.no_grad()
@pytest.mark.parametrize("real", [False, True], ids=["as it is", "in real numbers"])
def test_the_batched_velocity_is_the_transformers(models, real: bool) -> None:
    transformer, text_encoder = models
    words = tokenizer.build()
    ids = torch.tensor(tokenizer.encode(words, CAPTIONS))
    is_word = z_image.is_word(ids, words.eos_token_id)
    assert is_word.sum(1).tolist() == [len(row) for row in words(CAPTIONS).input_ids]
    encoded = z_image.encode(text_encoder, ids)
    latents, sigma = torch.randn(3, 16, 16, 16), torch.tensor([0.2, 0.5, 0.9])
    lists = (
        [image[:, None] for image in latents],
        1 - sigma,
        [row[is_] for row, is_ in zip(encoded, is_word, strict=True)],
    )
    expected = torch.stack([image[:, 0] for image in transformer(*lists, return_dict=False)[0]])
    rotary = (z_image.attend_in_real_numbers if real else z_image.rotations)(transformer, "cpu")
    made = z_image.velocity(transformer, z_image.pack(latents), sigma, encoded, is_word, rotary)
    torch.testing.assert_close(z_image.unpack(made), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_trained_folder_draws_what_training_encoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks.save_model(networks.build_vae(16), tmp_path / "vae")
    arguments = ["--out", str(tmp_path), "--vae", str(tmp_path / "vae"), "--steps", "2", "--batch", "4"]
    monkeypatch.setattr("sys.argv", ["train", *arguments, "--scenes", "16", "--device", "cpu"])
    train_z_image.main()
    pipe = ZImagePipeline.from_pretrained(tmp_path / z_image.FOLDER)
    pipe.set_progress_bar_config(disable=True)
    image = pipe(CAPTIONS[0], num_inference_steps=2, guidance_scale=z_image.GUIDANCE, **z_image.CALL).images[
        0
    ]
    assert image.size == (128, 128)
    embedded, _ = pipe.encode_prompt(CAPTIONS[0], do_classifier_free_guidance=False)
    ids = torch.tensor(tokenizer.encode(tokenizer.build(), CAPTIONS[:1]))
    is_word = z_image.is_word(ids, tokenizer.build().eos_token_id)
    expected = z_image.encode(pipe.text_encoder, ids)[is_word]
    torch.testing.assert_close(embedded[0], expected, rtol=1e-3, atol=1e-3)
