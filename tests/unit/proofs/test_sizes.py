"""Images of several sizes and kinds of files: compared rightly, or named in one line each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import BadParameter
from click.testing import CliRunner, Result
from PIL import Image

from tests.drawn_shapes import draw
from tests.images_server import ODD_ANSWERS, serving
from vivace.benchmark.load_testing import images_endpoint
from vivace.cli import app
from vivace.errors import UsageError, WorkloadError

SHAPES = "python:tests.drawn_shapes:draw"
PROMPTS = [
    f"a {first} and a {second} shape" for first in ("red", "blue", "green") for second in ("yellow", "purple")
]
SIZES = ("--sizes", "96x96,64x128", "--sizes", "128x64")


def prove(folder: Path, a: str, b: str, *more: str, prompts: list[str] = PROMPTS) -> Result:
    file = folder / "prompts.txt"
    file.write_text("\n".join(prompts))
    arguments = ["prove", a, b, "--prompts", str(file), "--seeds", "1", "--store", str(folder / "store")]
    return CliRunner().invoke(app, [*arguments, "--scorer", "none", *more], standalone_mode=False)


def answer(result: Result) -> dict:
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def test_every_prompt_is_drawn_in_every_size(tmp_path: Path) -> None:
    more = (*SIZES, "--format", "json", "--claim", "same", "--claim", "as-good")
    proof = answer(prove(tmp_path, SHAPES, SHAPES, *more))
    assert proof["exit_code"] == 0
    assert proof["sizes"] == ["96x96", "64x128", "128x64"]
    assert [pair["size"] for pair in proof["pairs"]] == [[96, 96], [64, 128], [128, 64]] * len(PROMPTS)
    assert set(proof["distances"]["b_to_a_by_size"]) == set(proof["sizes"])
    assert (
        "6 prompts × 1 seed × 3 sizes (96x96, 64x128, 128x64)"
        in prove(tmp_path, SHAPES, SHAPES, *SIZES).stdout
    )


def test_a_size_that_is_worse_is_named(tmp_path: Path) -> None:
    soft = "python:tests.drawn_shapes:draw_soft_if_tall"
    proof = answer(prove(tmp_path, SHAPES, soft, *SIZES, "--format", "json"))
    assert "softer (sharpness at 64x128 ×" in proof["headline"]
    assert "the worst size is 64x128" in proof["answers"]["same"]["reason"]
    assert next(iter(proof["distances"]["b_to_a_by_size"])) == "64x128"
    assert proof["exit_code"] == 1


def test_a_server_that_draws_another_size_is_named_and_the_other_sizes_are_compared(tmp_path: Path) -> None:
    with serving("ignored size") as server:
        proof = answer(prove(tmp_path, SHAPES, server.url, *SIZES, "--format", "json"))
    (finding,) = [f for f in proof["findings"] if f["text"].startswith("another size")]
    assert (
        "12 images of B, e.g. “a red and a yellow shape” seed 0 at 64x128: 96x96, A's is 64x128"
        in finding["text"]
    )
    assert '"size": "64x128"' in finding["request"]
    assert any(note.startswith("B: 12 images of another size than asked for") for note in proof["notes"])
    assert len(proof["failures"]) == 12
    assert proof["distances"]["b_to_a"]["identical"], "of the six squares"
    assert proof["exit_code"] == 1


def test_sizes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="a size is WIDTHxHEIGHT in pixels"):
        raise prove(tmp_path, SHAPES, SHAPES, "--sizes", "96x96,tall").exception
    with pytest.raises(UsageError, match="give --sizes, or --height and --width, not both"):
        raise prove(tmp_path, SHAPES, SHAPES, *SIZES, "--height", "96").exception
    folder = tmp_path / "images"
    folder.mkdir()
    draw(PROMPTS[0], 0).save(folder / "x.png")
    with pytest.raises(UsageError, match="is a folder, whose images have their own sizes"):
        raise prove(tmp_path, SHAPES, str(folder), *SIZES).exception
    with pytest.raises(WorkloadError, match="40"):
        raise prove(tmp_path, "tiny-sd:baseline", SHAPES, "--sizes", "64x64,40x64").exception


def alpha_that_hides(picture: Any) -> Any:
    picture = picture.convert("RGBA")
    picture.putalpha(Image.linear_gradient("L").resize(picture.size))
    return picture


def turned(picture: Any, path: Path, format_: str = "PNG") -> None:
    """Save an image on its side, with EXIF data that turn it back."""
    exif = Image.Exif()
    exif[0x0112] = 6
    picture.transpose(Image.Transpose.ROTATE_90).save(path, format_, exif=exif)


KINDS: dict[str, Callable[[Any, Path], None]] = {
    "opaque": lambda picture, path: picture.convert("RGBA").save(path),
    "palette": lambda picture, path: picture.quantize(256, dither=Image.Dither.NONE).save(path),
    "turned": turned,
    "tiff": lambda picture, path: picture.save(path, "TIFF"),
    "bmp": lambda picture, path: picture.save(path, "BMP"),
    "webp": lambda picture, path: picture.save(path, "WEBP", lossless=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_image_in_another_kind_of_file_is_the_same(tmp_path: Path, kind: str) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
    draw(PROMPTS[0], 0, 96, 64).save(a / "x.png")
    KINDS[kind](draw(PROMPTS[0], 0, 96, 64), b / "x.png")
    proof = answer(
        CliRunner().invoke(
            app,
            [
                "prove",
                str(a),
                str(b),
                "--claim",
                "same",
                "--format",
                "json",
                "--store",
                str(tmp_path / "store"),
            ],
            standalone_mode=False,
        )
    )
    assert proof["pairs"][0]["nearness"] == "as near as the reference is to itself", proof["pairs"]
    assert proof["exit_code"] == 0


def test_grey_images_of_8_and_16_bits_are_compared_and_transparency_is_noted(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
    grey = draw(PROMPTS[0], 0).convert("L")
    for name in ("8.png", "16.png", "cmyk.png"):
        grey.save(a / name)
    grey.convert("RGB").save(b / "8.png")
    Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(b / "16.png")
    grey.convert("CMYK").save(b / "cmyk.png", "JPEG", quality=98)
    draw(PROMPTS[1], 0).save(a / "alpha.png")
    alpha_that_hides(draw(PROMPTS[1], 0)).save(b / "alpha.png")
    proof = answer(
        CliRunner().invoke(
            app,
            ["prove", str(a), str(b), "--format", "json", "--store", str(tmp_path / "store")],
            standalone_mode=False,
        )
    )
    by_name = {pair["prompt"]: pair for pair in proof["pairs"]}
    assert by_name["8.png"]["against"]["identical"]
    assert by_name["16.png"]["against"]["identical"]
    assert by_name["cmyk.png"]["nearness"] in ("as near as the reference is to itself", "near")
    assert by_name["alpha.png"]["nearness"] in ("changed", "another image")
    assert proof["notes"] == ["B: an image: it has transparent pixels, which are put on white (1 of 4)"]
    assert not proof["failures"]


def test_odd_answers_are_a_line_each_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images_endpoint, "FIRST_WAIT_S", 0.005)  # eight tries of the busy server take 12 s otherwise
    prompts = [text for odd in ODD_ANSWERS for text in (f"a {odd} thing", f"a good red and {odd} shape")]
    with serving("odd answers") as server:
        more = ("--height", "96", "--width", "96", "--format", "json", "--claim", "same")
        proof = answer(prove(tmp_path, SHAPES, server.url, *more, prompts=prompts[1:] + prompts[:1]))
    reasons = {failure["what"].split()[1]: failure["reason"] for failure in proof["failures"]}
    assert {name: reason.split(";")[0][:56] for name, reason in reasons.items()} == {
        "fewer": "the answer is not that of an images endpoint: there is n",
        "more": "asked for 1 image, got 2",
        "cut": "the image cannot be read as an image: image file is trun",
        "bits": "the answer is not that of an images endpoint: b64_json i",
        "empty": "it is not an image: it begins with b''",
        "gone": "the answer is not that of an images endpoint: the image ",
        "html": "the answer is not that of an images endpoint: it is not ",
        "null": "the answer is not that of an images endpoint: there is n",
        "busy": "HTTP 429: come back later",
        "broken": "HTTP 500: Internal Server Error",
        "animated": "the image cannot be read as an image: it has 2 frames or",
        "gif": "it is not an image: it begins with b'GIF89a\\x00\\x00\\x00\\",
        "larger": "images of 128x96 and 96x96 cannot be compared pixel by p",
    }
    assert proof["verdict"] == "proven", "of the others"
    assert proof["exit_code"] == 4
