"""Thousands of damaged recipes: each gives a recipe whose canonical form is stable, or one clear error."""

import random
import string

from vivace.errors import RecipeError
from vivace.recipes.resolve import resolve

SEEDS = [
    "baseline",
    "bf16+attention(flash)+quantize(int8)+compile(mode=max-autotune)@denoiser,vae",
    "bf16+attention:flash+int8+compile@denoiser,vae",
    "tiny_vae+scheduler(dpmpp_2m, karras=True, spacing=trailing)+steps(20)+cfg_cutoff(0.4)",
    "fp16@denoiser+fp32@vae,text_encoder+channels_last@vae+guidance(4.5)",
]
ALPHABET = string.printable + "äß→\u202e\x00🙂" + "+@(),:='\"[]{}" * 4


def mutate(text: str, generator: random.Random) -> str:
    if generator.random() < 0.15:  # harmless ones: case and spaces do not matter
        text = text.replace(generator.choice("+@(,:"), generator.choice([" + ", " @ ", " ( ", " , ", " : "]))
        return "".join(c.upper() if generator.random() < 0.3 else c for c in text)
    characters = list(text)
    for _ in range(generator.randint(1, 3)):
        at = generator.randrange(len(characters) + 1)
        kind = generator.randrange(5)
        if kind == 0:
            characters.insert(at, generator.choice(ALPHABET))
        elif kind == 1 and characters:
            del characters[min(at, len(characters) - 1)]
        elif kind == 2 and characters:
            characters[min(at, len(characters) - 1)] = generator.choice(ALPHABET)
        elif kind == 3:
            other = generator.choice(SEEDS)
            start = generator.randrange(len(other))
            characters[at:at] = other[start : start + generator.randint(1, 12)]
        else:
            generator_slice = slice(at, at + generator.randint(1, 8))
            characters[generator_slice] = characters[generator_slice] * 2
    return "".join(characters)


def test_mutated_recipes_give_a_result_or_a_clear_error() -> None:
    generator = random.Random(0)
    good = bad = 0
    for _ in range(5000):
        text = mutate(generator.choice(SEEDS), generator)
        try:
            recipe = resolve(text)
        except RecipeError as error:
            bad += 1
            lines = str(error).split("\n")
            assert len(lines) == 3, text
            assert lines[0], text
            assert "^" in lines[2], text
            assert 0 <= error.start <= len(text), text
        else:
            good += 1
            assert resolve(recipe.text) == recipe, text
    # Both kinds must really have been met.
    assert good > 200
    assert bad > 1000
