"""Images of several sizes and kinds of files: compared rightly, or named in one line each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import BadParameter
from PIL import Image

from tests.drawn_shapes import draw
from tests.images_server import ODD_ANSWERS, serving
from tests.proved import PROMPTS, SHAPES, failed, proof_of, prove
from vivace.benchmark.load_testing import images_endpoint
from vivace.errors import UsageError, WorkloadError

SIZES = ("--sizes", "96x96,64x128", "--sizes", "128x64")


def test_every_prompt_is_drawn_in_every_size(tmp_path: Path) -> None:
    more = (*SIZES, "--claim", "same", "--claim", "as-good")
    proof = proof_of(tmp_path, SHAPES, SHAPES, *more)
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
    proof = proof_of(tmp_path, SHAPES, soft, *SIZES)
    assert "softer (sharpness at 64x128 ×" in proof["headline"]
    assert "the worst size is 64x128" in proof["answers"]["same"]["reason"]
    assert next(iter(proof["distances"]["b_to_a_by_size"])) == "64x128"
    assert proof["exit_code"] == 1


def test_a_server_that_draws_another_size_fails_and_the_other_sizes_are_compared(tmp_path: Path) -> None:
    with serving("ignored size") as server:
        proof = proof_of(tmp_path, SHAPES, server.url, *SIZES)
    assert "the size is what was asked for" in failed(proof)
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


def test_images_in_other_kinds_of_files_are_the_same_and_transparency_is_noted(tmp_path: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for folder in (a, b):
        folder.mkdir()
    for kind, save in KINDS.items():
        draw(PROMPTS[0], 0, 96, 64).save(a / f"{kind}.png")
        save(draw(PROMPTS[0], 0, 96, 64), b / f"{kind}.png")
    grey = draw(PROMPTS[0], 0).convert("L")
    for name in ("8.png", "16.png", "cmyk.png"):
        grey.save(a / name)
    grey.convert("RGB").save(b / "8.png")
    Image.fromarray(np.asarray(grey).astype(np.uint16) * 257).save(b / "16.png")
    grey.convert("CMYK").save(b / "cmyk.png", "JPEG", quality=98)
    draw(PROMPTS[1], 0).save(a / "alpha.png")
    alpha_that_hides(draw(PROMPTS[1], 0)).save(b / "alpha.png")
    proof = proof_of(tmp_path, str(a), str(b), prompts=(), seeds=None)
    nearness = {pair["prompt"].removesuffix(".png"): pair["nearness"] for pair in proof["pairs"]}
    assert nearness.pop("alpha") in ("changed", "another image")
    assert nearness.pop("cmyk") in ("as near as the reference is to itself", "near")
    assert set(nearness) == {*KINDS, "8", "16"}
    assert set(nearness.values()) == {"as near as the reference is to itself"}
    assert len(proof["notes"]) == 1
    assert "transparent pixels, which are put on white (1 of 10)" in proof["notes"][0]
    assert not proof["failures"]


def test_odd_answers_are_a_line_each_and_the_rest_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        images_endpoint, "FIRST_WAIT_S", 0.005
    )  # eight tries of the busy server take 12 s otherwise
    prompts = [text for odd in ODD_ANSWERS for text in (f"a {odd} thing", f"a good red and {odd} shape")]
    with serving("odd answers") as server:
        more = ("--height", "96", "--width", "96", "--claim", "same")
        proof = proof_of(tmp_path, SHAPES, server.url, *more, prompts=prompts[1:] + prompts[:1])
    reasons = {failure["what"].split()[1]: failure["reason"] for failure in proof["failures"]}
    expected = {
        "fewer": "there is no list",
        "more": "asked for 1 image, got 2",
        "cut": "cannot be read as an image",
        "bits": "b64_json is not base64",
        "empty": "it is not an image",
        "gone": "is not there",
        "html": "the answer is not that of an images endpoint",
        "null": "there is no list",
        "busy": "HTTP 429: come back later",
        "broken": "HTTP 500: Internal Server Error",
        "animated": "it has 2 frames",
        "gif": "it is not an image",
        "larger": "128x96 and 96x96 cannot be compared",
    }
    assert reasons.keys() == expected.keys()
    assert all(expected[name] in reason for name, reason in reasons.items()), reasons
    assert proof["verdict"] == "proven", "of the others"
    assert proof["exit_code"] == 4
