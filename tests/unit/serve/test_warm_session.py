"""A server draws what the session draws, with real workers of an embedded model."""

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import vivace
from tests.served import Served, image_of, served
from vivace.foundation.spec.sizes import Size
from vivace.models.sources import example_images
from vivace.serve.settings import ServeSettings

LORA = Path("tinyworld/loras/tiny-sd-outlines.safetensors")
OF_FLUX = Path("tinyworld/loras/tiny-flux-outlines.safetensors")
STEPS = 3


@pytest.fixture(scope="module")
def copies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return copies of a LoRA, of which a test spoils the one of that name; the weights of one are finite and huge."""
    folder = tmp_path_factory.mktemp("loras")
    files = {name: folder / f"{name}.safetensors" for name in ("kept", "spoilt", "outlines", "flux")}
    for name, path in files.items():
        shutil.copy(OF_FLUX if name == "flux" else LORA, path)
    files["huge"] = folder / "huge.safetensors"
    save_file({name: 1e15 * tensor.float() for name, tensor in load_file(LORA).items()}, files["huge"])
    return files


@pytest.fixture(scope="module")
def server(copies: dict[str, Path]) -> Iterator[Served]:
    sizes = (Size(128, 128), Size(96, 64))
    loras = copies["kept"].parent
    settings = ServeSettings(
        model="tiny-sd", recipe="tiny_vae", device="cpu", threads=1, sizes=sizes, loras=loras
    )
    with served(settings) as running:
        yield running


def pixels(server: Served, **fields: object) -> np.ndarray:
    answer = server.draw(seed=3, num_inference_steps=STEPS, **fields)
    assert answer.status == 200, answer.body
    return np.asarray(answer.images[0])


def test_images_are_those_of_the_session_bit_by_bit(server: Served) -> None:
    recipe = f"tiny_vae+lora('{LORA}', hot=True, layers=all, scale=0)"
    with vivace.load("tiny-sd", recipe, device="cpu") as session:
        for width, height in ((128, 128), (96, 64)):
            output = session(
                "a red circle",
                width=width,
                height=height,
                num_inference_steps=STEPS,
                generator=torch.Generator("cpu").manual_seed(3),
            )
            drawn = pixels(server, size=f"{width}x{height}")
            assert drawn.shape == (height, width, 3)
            assert np.array_equal(drawn, np.asarray(output.images[0]))


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_edits_are_those_of_the_session_bit_by_bit(server: Served) -> None:
    sources = example_images("StableDiffusionInpaintPipeline", {"height": 128, "width": 128})
    files = {"image": png(sources["image"])}
    plain = pixels(server)
    for task, sent in (("image", files), ("inpaint", files | {"mask": png(sources["mask_image"])})):
        recipe = f"tiny_vae+lora('{LORA}', hot=True, layers=all, scale=0)"
        with vivace.load("tiny-sd", recipe, device="cpu", task=task) as session:
            output = session(
                "a red circle",
                num_inference_steps=STEPS,
                strength=0.7,
                height=128,
                width=128,
                generator=torch.Generator("cpu").manual_seed(3),
                **(sources if task == "inpaint" else {"image": sources["image"]}),
            )
        answer = server.edit(
            files=sent, seed=3, num_inference_steps=STEPS, strength=0.7, keep_unmasked="false"
        )
        assert answer.status == 200, answer.body
        assert np.array_equal(np.asarray(answer.images[0]), np.asarray(output.images[0])), task
        assert np.array_equal(pixels(server), plain), "images from prompts are as before"
    with_lora = server.edit(
        files=files, seed=3, num_inference_steps=STEPS, strength=0.7, loras='[{"name": "outlines"}]'
    )
    assert not np.array_equal(np.asarray(with_lora.images[0]), np.asarray(answer.images[0]))


def test_fields_change_what_they_name_and_nothing_else(server: Served) -> None:
    plain = pixels(server)
    with_lora = pixels(server, loras=[{"name": "outlines"}])
    half = pixels(server, loras=[{"name": "outlines", "scale": 0.5}])
    unlike = [with_lora, half, pixels(server, guidance_scale=1.5), pixels(server, negative_prompt="red")]
    assert all(not np.array_equal(plain, other) for other in unlike)
    assert not np.array_equal(with_lora, half)
    assert np.array_equal(pixels(server), plain), "nothing of earlier requests is left"
    assert np.array_equal(pixels(server, loras=[{"name": "outlines"}]), with_lora)


def test_a_lora_that_is_spoilt_on_disk_harms_its_request_alone(
    server: Served, copies: dict[str, Path]
) -> None:
    path = copies["spoilt"]
    kept = [{"name": "kept", "scale": 2.0}]
    plain, with_kept = pixels(server), pixels(server, loras=kept)
    assert np.array_equal(pixels(server, loras=[{"name": "spoilt", "scale": 2.0}]), with_kept)
    for spoil, reason in (
        (lambda: os.truncate(path, 1000), "spoilt.safetensors is truncated"),
        (lambda: shutil.copy(OF_FLUX, path), "its layers are those of FLUX"),
        (path.unlink, "no LoRA 'spoilt'; there are: huge, kept, outlines"),
    ):
        assert np.array_equal(pixels(server, loras=kept), with_kept)
        spoil()
        answer = server.draw(loras=[{"name": "spoilt"}])
        assert answer.status == 400
        assert reason in answer.message
        assert str(path.parent) not in answer.message, "nothing of the server's folders"
        assert np.array_equal(pixels(server), plain), "the LoRA before is not left in the image"
        assert np.array_equal(pixels(server, loras=kept), with_kept)
    assert server.pool.replicas[0].num_restarts == 0


def test_an_image_that_is_not_finite_is_an_error_and_the_worker_lives_on(server: Served) -> None:
    plain, before = pixels(server), server.states()
    huge = {"loras": [{"name": "huge"}], "num_inference_steps": 2}
    source = example_images("StableDiffusionInpaintPipeline", {"height": 128, "width": 128})["image"]
    answers = [
        server.draw(**huge),
        server.draw(**huge, response_format="url"),
        server.edit(files={"image": png(source)}, num_inference_steps=2, loras='[{"name": "huge"}]'),
    ]
    for answer in answers:
        assert answer.status == 500
        assert "not finite" in answer.message
    streamed = server.draw(**huge, stream=True, partial_images=1).body.decode()
    assert "not finite" in streamed
    assert "b64_json" not in streamed
    after = server.states()
    assert (after["done"], after["failed"]) == (before["done"], before["failed"] + 4)
    assert np.array_equal(pixels(server), plain)
    assert server.pool.replicas[0].num_restarts == 0


def test_partial_images_look_like_the_finished_one(server: Served) -> None:
    client = server.send(
        "/v1/images/generations",
        {
            "prompt": "a red circle",
            "seed": 3,
            "num_inference_steps": 12,
            "stream": True,
            "partial_images": 3,
        },
    )
    events = [
        line.removeprefix("data: ") for line in client.body.decode().split("\n") if line.startswith("data: ")
    ]
    images = [np.asarray(image_of(json.loads(event)["b64_json"]), dtype=float) for event in events]
    assert [image.shape for image in images] == [(128, 128, 3)] * 4
    *partial, finished = images
    correlations = [np.corrcoef(each.ravel(), finished.ravel())[0, 1] for each in partial]
    assert correlations == sorted(correlations)
    assert correlations[-1] > 0.5


def test_a_cancelled_image_leaves_the_next_one_right(server: Served) -> None:
    expected, before = pixels(server), server.states()["cancelled"]
    client = server.leave("a blue square", num_inference_steps=50)
    server.wait_for("running", 1)
    client.close()
    assert np.array_equal(pixels(server), expected)
    assert server.states()["cancelled"] == before + 1


def test_a_prompt_that_is_cut_off_is_said(server: Served) -> None:
    long = server.draw("a red circle above a blue square, " * 20, num_inference_steps=1)
    (note,) = long.json["notes"]
    assert "tokens and the model reads " in note
    assert "notes" not in server.draw("a red circle above a blue square", num_inference_steps=1).json
    events = server.draw("a red circle above a blue square, " * 20, num_inference_steps=1, stream=True)
    assert note in events.body.decode()


def test_the_page_and_the_models_say_what_is_served(server: Served) -> None:
    (model,) = server.send("/v1/models").json["data"]
    assert (model["id"], model["sizes"]) == ("tiny-sd", ["96x64", "128x128"])
    assert {"huge", "kept", "outlines"} <= set(model["loras"])
    assert model["recipe"] == "tiny_vae"
    assert model["tasks"] == ["text", "image", "inpaint"]
    unfit = model["unfit_loras"]["flux"]
    assert "its layers are those of FLUX" in unfit
    assert "this is Stable Diffusion" in unfit
    assert "/" not in model["unfit_loras"]["flux"], "nothing of the server's folders"
    answer = server.draw(loras=[{"name": "flux"}])
    assert answer.status == 400
    assert "'flux' cannot be used: lora: flux.safetensors is not a LoRA" in answer.message
    page = server.send("/")
    assert page.headers["content-type"].startswith("text/html")
    assert b"<form" in page.body
    assert server.send("/openapi.json").json["paths"]["/v1/images/generations"]
