"""`vivace generate -o`, its times, and prompts on the command line of other commands."""

import json
from pathlib import Path

import pytest
from PIL import Image

from tests.typed import run_vivace

QUICK = ("--recipe", "steps(1)")


def test_one_image_goes_where_it_is_wanted_and_its_time_is_said(tmp_path: Path) -> None:
    done = run_vivace(tmp_path, "generate", "a red circle", *QUICK, "-o", "new/circle.jpg")
    assert done.stdout == "new/circle.jpg\n"
    assert done.stderr.splitlines()[-1].endswith("s an image")
    with Image.open(tmp_path / "new" / "circle.jpg") as image:
        assert image.format == "JPEG"
        assert json.loads(image.getexif()[0x010E])["prompt"] == "a red circle"
    run_vivace(tmp_path, "generate", "a red circle", *QUICK, "--num-images", "2")
    (tmp_path / "link.png").symlink_to(tmp_path / "new" / "circle.png")
    run_vivace(tmp_path, "generate", "a red circle", *QUICK, "-o", "link.png")
    same = (tmp_path / "pictures" / "a-red-circle-0.png").read_bytes()
    assert (tmp_path / "new" / "circle.png").read_bytes() == same
    assert (tmp_path / "link.png").is_symlink()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("-o", "a.png", "--num-images", "2"), "-o a.png is one file, for one image"),
        (("-o", "a.png", "--out", "folder"), "give one of them"),
        (("-o", "a.gif"), "give a name that ends in .png, .jpg, .jpeg, .webp"),
        (("-o", "a"), "give a name that ends in"),
    ],
)
def test_what_one_file_cannot_be(arguments: tuple[str, ...], says: str, tmp_path: Path) -> None:
    assert says in run_vivace(tmp_path, "generate", "x", *QUICK, *arguments, code=2).stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "compare", "tune", "profile"])
def test_prompts_are_given_in_words_or_in_a_file(command: str, tmp_path: Path) -> None:
    recipes = {"bench": ("--recipe", "baseline"), "compare": ("baseline", "tiny_vae"), "tune": ("tiny-sd",)}
    arguments = ("--prompt", "a", "--prompts", "file")
    done = run_vivace(tmp_path, command, *recipes.get(command, ()), *arguments, code=2)
    assert "--prompt TEXT or --prompts FILE, not both" in done.stderr


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing.safetensors", "missing.safetensors: there is no such file or folder"),
        ("./modle", "there is no such file or folder; did you mean 'model'?"),
        ("nowhere/model.gguf", "there is no folder nowhere either"),
        ("a/b/c", "there is no folder a either"),
    ],
)
def test_a_missing_path_is_not_there(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    done = run_vivace(tmp_path, "generate", "x", "--model", name, code=2)
    assert says in done.stderr
    assert "catalogue" not in done.stderr
