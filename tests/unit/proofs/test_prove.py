"""`vivace prove` on recipes, folders and functions; interrupted runs; the page."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests import drawn_shapes
from tests.drawn_shapes import draw
from tests.images_server import serving
from tests.proved import PROMPTS, SHAPES, answer, proof_of, prove
from vivace.errors import UsageError
from vivace.proofs.sides.endpoint_side import EndpointSide

_FOLDERS = {"prompts": (), "seeds": None}


def save(folder: Path, names: list[str], function: str = "draw") -> Path:
    folder.mkdir()
    for number, name in enumerate(names):
        getattr(drawn_shapes, function)(PROMPTS[number % len(PROMPTS)], 0).save(folder / name)
    return folder


def test_rounding_is_as_near_as_the_reference_is_to_itself(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, SHAPES, "python:tests.drawn_shapes:draw_rounded", "--claim", "same")
    assert proof["exit_code"] == 0
    assert {pair["nearness"] for pair in proof["pairs"]} == {"as near as the reference is to itself"}
    assert proof["distances"]["a_to_itself"]["identical"]
    assert proof["distances"]["a_to_another_seed"]["psnr_db"] < 30


def test_limits_on_means_decide_the_exit_code(tmp_path: Path) -> None:
    soft = "python:tests.drawn_shapes:draw_soft"
    proof = proof_of(tmp_path, SHAPES, soft, "--claim", "same", "--fail-under", "psnr_db=60,ssim=0.1")
    assert [limit["verdict"] for limit in proof["fail_under"]] == ["failed", "proven"]
    assert proof["exit_code"] == 1
    result = prove(tmp_path, SHAPES, soft, "--fail-under", "sharpness=1")
    assert "NAME is one of psnr_db, ssim, match, lpips" in str(result.exception)


def test_ci_files_have_a_case_for_each_question_and_request(tmp_path: Path) -> None:
    junit, summary = tmp_path / "prove.xml", tmp_path / "summary.md"
    ignoring = "python:tests.drawn_shapes:draw_in_eight_steps"
    more = f"--steps 8 --claim same --claim honest --junit {junit} --summary {summary}".split()
    assert prove(tmp_path, SHAPES, ignoring, *more).return_value == 1
    suite = ElementTree.parse(junit).getroot()
    cases = {case.attrib["name"]: case for case in suite}
    assert len(cases["Same image?"].findall("failure")) == 0
    (failure,) = cases["Honest? the number of steps changes the image"].findall("failure")
    assert "of 7 another one" in failure.attrib["message"]
    assert cases["Honest?"].find("failure") is not None
    assert cases["Fast?"].find("skipped") is not None
    assert suite.attrib["tests"] == str(len(suite))
    assert suite.attrib["failures"] == str(len(suite.findall("testcase/failure")))
    assert "Honest?" in summary.read_text()


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, SHAPES, "python:tests.drawn_shapes:draw_not_finite")
    assert proof["findings"][0]["text"].startswith("not finite: 6 images of B")
    assert proof["exit_code"] == 1


def test_a_reference_that_fails_is_a_line_for_each_image(tmp_path: Path) -> None:
    proof = proof_of(tmp_path, "python:tests.drawn_shapes:fail_sometimes", SHAPES, "--claim", "same")
    assert [failure["side"] for failure in proof["failures"]] == ["A"]
    assert "RuntimeError: out of paint" in proof["failures"][0]["reason"]
    assert proof["verdict"] == "proven", "of the others"
    assert proof["exit_code"] == 4


def test_an_interrupted_run_goes_on_and_one_that_ended_is_begun_anew(tmp_path: Path) -> None:
    with serving() as server:
        a, b = SHAPES, server.url
        more = ("--height", "96", "--width", "96", "--claim", "same")
        whole = EndpointSide.draw

        def draw_three(self: EndpointSide, *arguments: object) -> object:
            if len(server.requests) >= 3:
                raise KeyboardInterrupt
            return whole(self, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(EndpointSide, "draw", draw_three)
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
    more = ("--prompt-set", "tinyworld", "--format", "json", "--claim", "same", "--num-prompts")
    assert len(proof_of(tmp_path, SHAPES, SHAPES, *more, "2", prompts=())["pairs"]) == 2
    result = prove(tmp_path, SHAPES, SHAPES, *more, "14", "--reuse", prompts=())
    assert len(answer(result)["pairs"]) == 14
    assert "going on with" in result.stderr
    refused = prove(tmp_path, SHAPES, SHAPES, *more, "40", prompts=())
    assert "the set tinyworld has 39" in str(refused.exception)


def test_folders_are_paired_by_name(tmp_path: Path) -> None:
    names = [f"image_{number}.png" for number in range(8)]
    a = save(tmp_path / "a", names)
    b = save(tmp_path / "b", names[1:])
    (b / "image_3.png").write_bytes(b"no image")
    (b / "image_4.png").unlink()
    draw(PROMPTS[2], 0, 120, 96).save(b / "image_4.png")
    proof = proof_of(tmp_path, str(a), str(b), **_FOLDERS)
    assert len(proof["pairs"]) == 7
    reasons = [failure["reason"] for failure in proof["failures"]]
    assert "it is not an image" in reasons[0]
    assert "120x96 and 96x96 cannot be compared" in reasons[1]
    assert proof["exit_code"] == 4


def test_a_folder_without_prompts_and_a_function_ask_for_them(tmp_path: Path) -> None:
    a = str(save(tmp_path / "a", ["x.png"]))
    with pytest.raises(UsageError, match="add --prompts FILE"):
        raise prove(tmp_path, a, SHAPES, **_FOLDERS).exception
    with pytest.raises(UsageError, match=r"has 1 image, .* for 2 pairs"):
        raise prove(tmp_path, a, SHAPES, prompts=PROMPTS[:2]).exception
    assert proof_of(tmp_path, a, SHAPES, "--claim", "same", prompts=PROMPTS[:1])["exit_code"] == 0


def test_the_page_holds_everything_and_fetches_nothing(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    prompts = [f"<script>alert({number})</script> red" for number in range(6)]
    with serving("blurred") as server:
        more = ("-o", str(page), "--height", "96", "--width", "96")
        result = prove(tmp_path, SHAPES, server.url, *more, prompts=prompts)
    assert result.return_value == 1, result.output
    text = page.read_text()
    assert "<script>alert" not in text
    assert "B is worse than A" in text
    assert "softer" in text
    assert text.count("data:image/") == 18, "A, B and their difference of six prompts"
    assert text.count("<rect") == 12, "a frame on each image of B, in two colours"
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    assert "curl http://127.0.0.1" in text


@pytest.mark.long
def test_tiny_sd_against_its_tiny_vae(tmp_path: Path) -> None:
    prompts = ("a red circle above a blue square", "a large green triangle on a white background")
    more = ("--steps", "4", "--scorer", "auto")
    proof = proof_of(tmp_path, "tiny-sd:baseline", "tiny-sd:tiny_vae", *more, prompts=prompts)
    assert proof["settings"]["num_inference_steps"] == 4
    assert next(witness["witness"] for witness in proof["witnesses"]) == "CLIP"
    assert proof["distances"]["a_to_itself"]["identical"]
    assert proof["exit_code"] == 4, "two prompts cannot tell"
    same = proof_of(
        tmp_path, "tiny-sd:baseline", "tiny-sd:baseline", *more, "--claim", "same", prompts=prompts
    )
    assert same["exit_code"] == 0
