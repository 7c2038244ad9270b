"""What is typed as a side means one thing."""

from pathlib import Path

import pytest

from vivace.benchmark.load_testing.images_endpoint import ImagesEndpoint
from vivace.errors import RecipeError, UsageError
from vivace.proofs.sides.endpoint_side import EndpointSide
from vivace.proofs.sides.folder_side import FolderSide
from vivace.proofs.sides.plan import FunctionSide, parse_side
from vivace.proofs.sides.recipe_side import RecipeSide


@pytest.mark.parametrize(
    ("text", "model", "recipe"),
    [
        ("tiny-sd:baseline", "tiny-sd", "baseline"),
        ("tiny-sd", "tiny-sd", "baseline"),
        ("tiny-sd:distilled(lcm, steps=4)+tiny_vae", "tiny-sd", "distilled(lcm, steps=4)+tiny_vae"),
        ("synthetic:sd15:bf16", "synthetic:sd15", "bf16"),
        ("org/repo@main:bf16", "org/repo@main", "bf16"),
        ("./models/x.safetensors:steps(4)", "./models/x.safetensors", "steps(4)"),
    ],
)
def test_the_recipe_begins_behind_the_model(text: str, model: str, recipe: str) -> None:
    assert parse_side(text) == RecipeSide(text, model, recipe)


def test_a_path_with_a_colon_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "v1:final.safetensors"
    file.touch()
    assert parse_side(f"{file}:bf16") == RecipeSide(f"{file}:bf16", str(file), "bf16")
    assert parse_side(str(file)) == RecipeSide(str(file), str(file), "baseline")


def test_folders_of_images_and_of_models_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_side(str(tmp_path)) == FolderSide(str(tmp_path))
    (tmp_path / "model_index.json").write_text("{}")
    assert parse_side(str(tmp_path)) == RecipeSide(str(tmp_path), str(tmp_path), "baseline")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny-sd").mkdir()
    assert isinstance(parse_side("tiny-sd"), RecipeSide), "a name of the catalogue is the model"
    assert isinstance(parse_side("./tiny-sd"), FolderSide)


def endpoint(url: str) -> ImagesEndpoint:
    return ImagesEndpoint(url, uses_proxy=True)


def test_fields_of_an_endpoint_are_its_query() -> None:
    text = "http://127.0.0.1:8000/v1/?model=7&true_cfg_scale=4.5&lora=style"
    fields = {"model": "7", "true_cfg_scale": 4.5, "lora": "style"}
    assert parse_side(text) == EndpointSide(text, endpoint("http://127.0.0.1:8000/v1"), fields)
    whole = "https://images.example/v1/images/generations"
    assert parse_side(whole) == EndpointSide(whole, endpoint("https://images.example/v1"), {})


def test_functions() -> None:
    assert parse_side("python:a.b:draw") == FunctionSide("python:a.b:draw", "a.b", "draw")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a side is empty"),
        ("http://", "give http://HOST:PORT/v1"),
        ("http://user:word@host/v1", "a user or a password"),
        ("http://host/v1?api_key=word", "looks like a secret"),
        ("http://host/v1?seed=3", "the field seed is set by vivace"),
        ("http://host/v1?x=1&x=2", "the field x is there twice"),
        ("python:draw", "give python:MODULE:FUNCTION"),
        ("comfyui:http://host:8188", "give comfyui:http://HOST:PORT?workflow=FILE"),
        ("steps(4)", "is a recipe without a model"),
    ],
)
def test_what_is_no_side_says_what_is(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", r"\?").replace("(", r"\(")):
        parse_side(text)


def test_a_wrong_recipe_is_marked() -> None:
    with pytest.raises(RecipeError, match="\n  stepz"):
        parse_side("tiny-sd:stepz(4)")
