"""`vivace prove` on recipes, folders and functions; interrupted runs; the page."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from tests import drawn_shapes
from tests.drawn_shapes import draw
from tests.images_server import serving
from vivace.cli import app
from vivace.errors import UsageError
from vivace.proofs.sides import endpoint

SHAPES = "python:tests.drawn_shapes:draw"
PROMPTS = [
    f"a {first} and a {second} shape" for first in ("red", "blue", "green") for second in ("yellow", "purple")
]


def prove(folder: Path, a: str, b: str, *more: str) -> Result:
    arguments = ["prove", a, b, "--store", str(folder / "store"), "--scorer", "none", *more]
    return CliRunner().invoke(app, arguments, standalone_mode=False)


def answer(result: Result) -> dict:
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def shapes(folder: Path, b: str, *more: str) -> Result:
    file = folder / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return prove(folder, SHAPES, b, "--prompts", str(file), "--seeds", "1", "--format", "json", *more)


def save(folder: Path, names: list[str], function: str = "draw") -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        getattr(drawn_shapes, function)(PROMPTS[number % len(PROMPTS)], 0).save(folder / name)
    return folder


def test_rounding_is_as_near_as_the_reference_is_to_itself(tmp_path: Path) -> None:
    proof = answer(shapes(tmp_path, "python:tests.drawn_shapes:draw_rounded", "--claim", "same"))
    assert proof["exit_code"] == 0
    assert {pair["nearness"] for pair in proof["pairs"]} == {"as near as the reference is to itself"}
    assert proof["distances"]["a_to_itself"]["identical"]
    assert proof["distances"]["a_to_another_seed"]["psnr_db"] < 30


def test_limits_on_means_decide_the_exit_code(tmp_path: Path) -> None:
    soft = "python:tests.drawn_shapes:draw_soft"
    proof = answer(shapes(tmp_path, soft, "--claim", "same", "--fail-under", "psnr_db=60,ssim=0.1"))
    assert [limit["verdict"] for limit in proof["fail_under"]] == ["failed", "proven"]
    assert proof["exit_code"] == 1
    result = shapes(tmp_path, soft, "--fail-under", "sharpness=1")
    assert "NAME is one of psnr_db, ssim, match, lpips" in str(result.exception)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    proof = answer(shapes(tmp_path, "python:tests.drawn_shapes:draw_not_finite"))
    assert proof["findings"][0]["text"].startswith("not finite: 6 images of B")
    assert proof["exit_code"] == 1


def test_a_function_that_ignores_an_argument_fails_its_check(tmp_path: Path) -> None:
    proof = answer(shapes(tmp_path, "python:tests.drawn_shapes:draw_in_eight_steps", "--steps", "8"))
    failed = [check["name"] for check in proof["checks"] if check["status"] == "failed"]
    assert set(failed) == {"the number of steps changes the image"}


def test_a_reference_that_fails_is_a_line_for_each_image(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    fails = "python:tests.drawn_shapes:fail_sometimes"
    more = ("--prompts", str(file), "--seeds", "1", "--format", "json", "--claim", "same")
    proof = answer(prove(tmp_path, fails, SHAPES, *more))
    assert [failure["side"] for failure in proof["failures"]] == ["A", "A"]
    assert "RuntimeError: out of paint" in proof["failures"][0]["reason"]
    assert proof["verdict"] == "proven", "of the four others"
    assert proof["exit_code"] == 4


def test_an_interrupted_run_goes_on_and_one_that_ended_is_begun_anew(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    with serving() as server:
        a, b = SHAPES, server.url
        more = ("--prompts", str(file), "--seeds", "1", "--height", "96", "--width", "96", "--claim", "same")
        whole = endpoint.Endpoint.draw

        def draw_three(self: endpoint.Endpoint, *arguments: object) -> object:
            if len(server.requests) >= 3:
                raise KeyboardInterrupt
            return whole(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(endpoint.Endpoint, "draw", draw_three)
            result = prove(tmp_path, a, b, *more)
        assert result.return_value == 130
        assert "the images are kept" in result.stderr
        server.requests.clear()
        result = prove(tmp_path, a, b, *more)
        assert result.return_value == 0, result.output
        assert "going on with" in result.stderr
        prompts = [body["prompt"] for body in server.requests[:6]]
        assert PROMPTS[1] not in prompts, "it was drawn before"
        assert PROMPTS[5] in prompts
        server.requests.clear()
        result = prove(tmp_path, a, b, *more)
        assert "going on" not in result.stderr
        assert PROMPTS[1] in [body["prompt"] for body in server.requests]


def test_more_prompts_go_on_with_the_images_of_before(tmp_path: Path) -> None:
    more = ("--prompt-set", "tinyworld", "--seeds", "1", "--format", "json", "--claim", "same")
    assert len(answer(prove(tmp_path, SHAPES, SHAPES, *more, "--num-prompts", "2"))["pairs"]) == 2
    result = prove(tmp_path, SHAPES, SHAPES, *more, "--num-prompts", "14", "--reuse")
    assert len(answer(result)["pairs"]) == 14
    assert "going on with" in result.stderr
    refused = prove(tmp_path, SHAPES, SHAPES, *more, "--num-prompts", "40")
    assert "the set tinyworld has 39" in str(refused.exception)


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    names = [f"image_{number}.png" for number in range(8)]
    a = save(tmp_path / "a", names)
    b = save(tmp_path / "b", names[1:])
    (b / "image_3.png").write_bytes(b"no image")
    result = prove(tmp_path, str(a), str(b), "--format", "json")
    proof = answer(result)
    assert len(proof["pairs"]) == 7
    assert "it is not an image" in proof["failures"][0]["reason"]
    assert proof["exit_code"] == 4


def test_folders_of_alpha_16_bits_and_other_sizes(tmp_path: Path) -> None:
    import numpy as np

    a = save(tmp_path / "a", ["x.png", "y.png", "z.png"])
    b = save(tmp_path / "b", ["y.png"])
    draw(PROMPTS[0], 0).convert("RGBA").save(b / "x.png")
    grey = np.asarray(draw(PROMPTS[2], 0, 120, 96).convert("L")).astype(np.uint16) * 257
    Image.fromarray(grey).save(b / "z.png")
    proof = answer(prove(tmp_path, str(a), str(b), "--format", "json"))
    assert proof["pairs"][0]["against"]["identical"], "an alpha channel that hides nothing"
    assert "120x96 and 96x96 cannot be compared" in proof["failures"][0]["reason"]


def test_a_folder_without_prompts_and_a_function_ask_for_them(tmp_path: Path) -> None:
    a = save(tmp_path / "a", ["x.png"])
    with pytest.raises(UsageError, match="add --prompts FILE"):
        raise prove(tmp_path, str(a), SHAPES).exception
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPTS[0]}\n{PROMPTS[1]}\n")
    with pytest.raises(UsageError, match=r"has 1 image, .* for 2 pairs"):
        raise prove(tmp_path, str(a), SHAPES, "--prompts", str(file), "--seeds", "1").exception
    file.write_text(PROMPTS[0])
    proof = answer(
        prove(
            *(
                tmp_path,
                str(a),
                SHAPES,
                "--prompts",
                str(file),
                "--seeds",
                "1",
                "--format",
                "json",
                "--claim",
                "same",
            )
        )
    )
    assert proof["exit_code"] == 0


def test_the_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    prompts = [f"<script>alert({number})</script> red" for number in range(6)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(prompts))
    with serving("blurred") as server:
        more = ("--prompts", str(file), "--seeds", "1", "-o", str(page), "--height", "96", "--width", "96")
        result = prove(tmp_path, SHAPES, server.url, *more)
    assert result.return_value == 1, result.output
    text = page.read_text()
    assert "<script>alert" not in text
    assert "B is worse than A" in text
    assert "softer" in text
    assert text.count("data:image/") == 18, "A, B and their difference of six prompts"
    assert text.count("<rect") == 36
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert "curl http://127.0.0.1" in text


@pytest.mark.long
def test_tiny_sd_against_its_tiny_vae(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a red circle above a blue square\na large green triangle on a white background\n")
    more = ("--prompts", str(file), "--seeds", "1", "--steps", "4", "--format", "json", "--scorer", "auto")
    proof = answer(prove(tmp_path, "tiny-sd:baseline", "tiny-sd:tiny_vae", *more))
    assert proof["settings"]["num_inference_steps"] == 4
    assert next(witness["witness"] for witness in proof["witnesses"]) == "CLIP"
    assert proof["distances"]["a_to_itself"]["identical"]
    assert proof["exit_code"] == 4, "two prompts cannot tell"
    again = answer(prove(tmp_path, "tiny-sd:baseline", "tiny-sd:baseline", *more, "--claim", "same"))
    assert again["exit_code"] == 0
