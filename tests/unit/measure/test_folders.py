"""Which image of two folders goes with which, and with which prompt."""

import random
from pathlib import Path

import pytest
from PIL import Image, ImageFilter

from tests.drawn_shapes import COLOURS, draw
from tests.typed import run_vivace
from vivace.foundation.spec.limits import Limits
from vivace.foundation.spec.settings import read_prompts
from vivace.foundation.stats import Gate
from vivace.measure.folders import compare, pair


def test_images_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["1-9.png", "1-10.png", "cat.png", "cat2.png", "cat10.png", "Image_2.png", "image_10.png"]
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in random.Random(folder).sample(names, len(names)):
            (tmp_path / folder / name).touch()
    assert pair(tmp_path / "a", tmp_path / "b") == (names, [])


@pytest.mark.parametrize("inside", ["\u2028", "\u2029", "\x0b", "\x0c", "\x1c", "\x1e", "\x85"])
def test_what_may_stand_inside_a_line_does_not_end_it(inside: str, tmp_path: Path) -> None:
    path = tmp_path / "prompts.txt"
    path.write_bytes(f"a red{inside}circle\r\na blue square\r\r\n\na green one".encode())
    assert read_prompts(path) == [f"a red{inside}circle", "a blue square", "a green one"]


def test_the_command_says_which_prompt_it_gave_to_which_image(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for number in (2, 10):
            Image.new("RGB", (64, 64), (20 * number, 0, 0)).save(tmp_path / folder / f"image_{number}.png")
    (tmp_path / "prompts.txt").write_text("the second\nthe tenth\n")
    scored = ("--prompts", "prompts.txt", "--scorer", "tiny-clip")
    errors = run_vivace(tmp_path, "quality", "a", "b", *scored, "--min-quality", "clip=off,match=off").stderr
    assert "prompts: image_2.png is 'the second', image_10.png is 'the tenth'" in errors


@pytest.mark.parametrize("same_picture", [True, False])
def test_black_squares_and_images_of_another_seed_are_named(same_picture: bool, tmp_path: Path) -> None:
    names = [f"image_{number}.png" for number in range(1, 13)]
    prompts = [f"a {colour} circle {number % 6}" for number, colour in enumerate(2 * [*COLOURS])]
    for folder in ("a", "squares", "seeds"):
        (tmp_path / folder).mkdir()
        for number, (name, prompt) in enumerate(zip(names, prompts, strict=True)):
            seed = 1000 if folder == "seeds" and number == 5 else number
            image = draw(prompt, seed, 128, 128).filter(ImageFilter.GaussianBlur(1))
            if folder == "squares" and number % 3 == 0:
                image.paste((0, 0, 0), (50, 41, 74, 65))
            image.save(tmp_path / folder / name)
    limits = Limits(clip=None, match=0.9)
    verdicts = {}
    for folder in ("squares", "seeds"):
        compared = compare(tmp_path / "a", tmp_path / folder, names, prompts, None)
        verdicts[folder], _ = compared.judge(limits, same_picture=same_picture)
    assert verdicts["squares"].gate is Gate.FAILED
    assert "4 of 12 images have a hole" in verdicts["squares"].reason
    assert "image_1.png" in verdicts["squares"].reason
    assert (verdicts["seeds"].gate is Gate.FAILED) is same_picture
    assert ("1 of 12 images is not" in verdicts["seeds"].reason) is same_picture
    assert ("image_6.png" in verdicts["seeds"].reason) is same_picture
