"""The scorer, its captions with a mistake, and its folder."""

import argparse
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import CLIPModel, CLIPProcessor

from tinyworld import captions, clip, scenes, train_clip


def test_a_mistake_changes_what_was_asked_and_nothing_else():
    rng = random.Random(3)
    made = dict.fromkeys(captions.MISTAKES, 0)
    for full in captions.describe(scenes.sample(400, 3)):
        caption = captions.write(full, rng)
        right = captions.parse(caption)
        for mistake in captions.MISTAKES:
            wrong = captions.mistaken(caption, mistake, rng)
            if wrong is None:
                continue
            made[mistake] += 1
            parsed = captions.parse(wrong)
            if mistake in ("relation", "position"):
                assert getattr(parsed, mistake) != getattr(right, mistake), (caption, wrong)
                assert replace(parsed, **{mistake: getattr(right, mistake)}) == right, (caption, wrong)
                continue
            changed = [a != b for a, b in zip(parsed.things, right.things, strict=True)]
            assert sum(changed) == 1, (caption, wrong)
            thing, was = next(
                pair for pair in zip(parsed.things, right.things, strict=True) if pair[0] != pair[1]
            )
            assert replace(thing, **{mistake: getattr(was, mistake)}) == was, (caption, wrong)
            assert replace(parsed, things=right.things) == right
    assert min(made.values()) > 50, made


def test_articles_stay_right():
    made = {captions.mistaken("a red circle", "colour", random.Random(k)) for k in range(60)}
    assert "an orange circle" in made
    assert not any(text.startswith(("a o", "an r", "an b")) for text in made)


def test_what_a_caption_does_not_say_cannot_be_mistaken():
    assert captions.mistaken("a red circle", "relation", random.Random(0)) is None
    assert captions.mistaken("hello", "colour", random.Random(0)) is None


@pytest.fixture
def toy():
    torch.manual_seed(0)
    model = clip.build()
    args = argparse.Namespace(device="cpu", no_compile=True, scenes=8)
    return model, train_clip.ClipLoss(model, args, 8)


@torch.no_grad()
def test_the_folder_loads_plainly_and_scores_as_in_training(toy, tmp_path):
    model, _ = toy
    clip.save(tmp_path / clip.FOLDER, model)
    plain = CLIPModel.from_pretrained(tmp_path / clip.FOLDER)
    processor = CLIPProcessor.from_pretrained(tmp_path / clip.FOLDER)
    assert plain.dtype == torch.float32
    pictures = scenes.draw(scenes.sample(3, 5))[0]
    texts = ["a red circle", "two żółw 🙂", "word " * 100]
    inputs = processor(
        text=texts,
        images=list(scenes.to_uint8(pictures).numpy()),
        return_tensors="pt",
        padding=True,
        truncation=True,
    )
    assert np.abs(inputs.pixel_values.numpy() - (pictures.numpy() * 2 - 1)).max() < 0.01
    ids = torch.tensor(train_clip.tokenizer.encode(processor.tokenizer, texts))
    model.eval()
    own = clip.embed_images(model, inputs.pixel_values) @ clip.embed_captions(model, ids).T
    scored = plain(**inputs).logits_per_image / plain.logit_scale.exp()
    assert torch.allclose(scored, own, atol=2e-2), (
        "fp16 weights and the shorter padding change next to nothing"
    )


def test_every_caption_comes_with_mistakes_of_several_kinds():
    kinds = set()
    for right, *wrongs in train_clip.caption_sets(scenes.sample(200, 9), 1):
        assert len(wrongs) == len(set(wrongs)) == train_clip.WRONG
        was = captions.parse(right)
        for wrong in wrongs:
            parsed = captions.parse(wrong)
            assert parsed != was
            kinds |= {
                name for name in ("relation", "position") if getattr(parsed, name) != getattr(was, name)
            }
            kinds |= {
                name
                for a, b in zip(parsed.things, was.things, strict=True)
                for name in ("colour", "shape")
                if getattr(a, name) != getattr(b, name)
            }
    assert kinds == set(captions.MISTAKES)
