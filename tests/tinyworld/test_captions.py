import random

import pytest

from tinyworld import captions, scenes
from tinyworld.captions import Description, Thing, parse


def agrees(parsed: object, true: object) -> bool:
    return parsed is None or parsed == true


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_reading_a_caption_back_gives_what_the_scene_is(noise):
    rng = random.Random(2)
    spoken = {"size": 0, "position": 0, "relation": 0, "tone": 0}
    for full in captions.describe(scenes.sample(4000, 21)):
        text = captions.write(full, rng, noise=noise)
        read = parse(text)
        assert len(read.things) == len(full.things), text
        for thing, true in zip(read.things, full.things, strict=True):
            assert all(
                agrees(getattr(thing, key), getattr(true, key)) for key in ("colour", "shape", "size")
            ), text
            if noise == 0:
                assert thing.colour == true.colour, text
                assert thing.shape == true.shape, text
            spoken["size"] += thing.size is not None
        for key in ("position", "relation", "tone", "kind"):
            assert agrees(getattr(read, key), getattr(full, key)), text
            if key in spoken:
                spoken[key] += getattr(read, key) is not None
    # Attributes are left out often, but far from always.
    assert 3000 < spoken["size"] < 5500
    assert 700 < spoken["position"] < 1400
    assert 1900 < spoken["relation"] < 2500
    assert 2000 < spoken["tone"] < 2900


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "a red circle above a blue square",
            Description((Thing("red", "circle"), Thing("blue", "square")), relation="above"),
        ),
        (
            "A tiny violet Disc to the left of the huge box, on a white background.",
            Description(
                (Thing("purple", "circle", "small"), Thing(None, "square", "large")),
                relation="left of", tone="white", kind="plain",
            ),
        ),
        (
            "at the top a green triangle on a striped gray background",
            Description((Thing("green", "triangle"),), position="top", tone="gray", kind="striped"),
        ),
        (
            "draw a yellow star on the left side of the picture, please",
            Description((Thing("yellow", "star"),), position="left"),
        ),
        (
            "a big cross in the middle on a dark checkered background",
            Description((Thing(None, "cross", "large"),), position="center", tone="black", kind="checkered"),
        ),
        (
            "a pink dot beneath a cyan diamond against a shaded backdrop",
            Description((Thing("pink", "circle"), Thing("cyan", "diamond")), relation="below", kind="gradient"),
        ),
        ("a blue square and a red star", Description((Thing("blue", "square"), Thing("red", "star")))),
        ("an astronaut riding a horse", Description()),
        ("", Description()),
    ],
)  # fmt: skip
def test_what_captions_say(text, expected):
    assert parse(text) == expected


def test_any_text_has_an_answer():
    rng = random.Random(0)
    words = [*sorted(captions.vocabulary()), "left", "of", "zebra", "🙂", "\x00", "12", ",,,"]
    for _ in range(500):
        read = parse(" ".join(rng.choices(words, k=rng.randint(0, 40))))
        assert len(read.things) <= 2
