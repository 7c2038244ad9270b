"""Each figure against images computed by hand, and against a well-kept library where there is one."""

from pathlib import Path

import numpy as np
import pytest
import scipy.ndimage
import torch
from PIL import Image
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPProcessor, CLIPTokenizer

import vivace
from vivace.errors import UsageError
from vivace.measure.folders import compare, pair
from vivace.measure.image_metrics import (
    faults,
    image_metrics,
    paired_metrics,
    pixels,
)
from vivace.measure.scorer import ClipScorer
from vivace.models.find import WEIGHTS


def plain(red: float, green: float, blue: float, size: int = 16) -> np.ndarray:
    return np.full((size, size, 3), (red, green, blue), dtype=np.float64)


def noise(seed: int = 0, size: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).uniform(0, 255, (size, size, 3))


def test_pixels_takes_what_pipelines_and_files_give() -> None:
    array = np.zeros((4, 5, 3), dtype=np.uint8)
    array[..., 0] = 255
    for given in (
        array,
        array / np.float32(255),
        Image.fromarray(array),
        Image.fromarray(array).convert("RGBA"),
    ):
        assert np.array_equal(pixels(given), array.astype(np.float64))
    with pytest.raises(ValueError, match=r"\(H, W, 3\)"):
        pixels(np.zeros((4, 5)))


@pytest.mark.parametrize(
    ("picture", "fault"),
    [
        (plain(0, 0, 0), "black"),
        (plain(3, 2, 4) + noise(size=16) / 100, "black"),
        (plain(255, 255, 255), "flat"),
        (plain(200, 10, 10), "flat"),
        (noise(), "noise"),
        (np.random.default_rng(1).normal(128, 40, (64, 64, 3)), "noise"),
        (np.full((16, 16, 3), np.nan), "not finite"),
    ],
)
def test_ruined_pictures_are_named(picture: np.ndarray, fault: str) -> None:
    assert faults(picture) == [fault]
    assert set(image_metrics(picture)) == (
        set() if fault == "not finite" else {"sharpness", "colourfulness", "entropy_bits"}
    )


def test_drawn_pictures_have_no_fault_even_on_black() -> None:
    torch.set_num_threads(1)
    session = vivace.load("tiny-sd", "steps(12)+scheduler(dpmpp_2m)")
    for prompt in ("a small red circle on a black background", "a large yellow star on a white background"):
        image = session(prompt, generator=torch.Generator().manual_seed(0)).images[0]
        assert faults(pixels(image)) == []


def test_psnr_and_ssim() -> None:
    reference = noise()
    same = paired_metrics(reference, reference)
    assert same["psnr_db"] == float("inf")
    assert same["ssim"] == pytest.approx(1.0)
    off_by_one = paired_metrics(reference + 1, reference)
    assert off_by_one["psnr_db"] == pytest.approx(20 * np.log10(255), abs=1e-4)
    assert paired_metrics(noise(1), reference)["ssim"] < 0.1
    with pytest.raises(ValueError, match="64x64 and 32x32"):
        paired_metrics(reference, noise(size=32))
    with pytest.raises(ValueError, match="at least 11 pixels"):
        paired_metrics(noise(size=8), noise(size=8))


@pytest.fixture(scope="module")
def clip_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CLIP with random weights: the code path of any real one."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("clip")
    tokenizer = CLIPTokenizer.from_pretrained(str(WEIGHTS / "tiny-sd" / "tokenizer"))
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = small | {"vocab_size": len(tokenizer), "max_position_embeddings": 32, "projection_dim": 16}
    text |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    vision = small | {"image_size": 32, "patch_size": 8, "projection_dim": 16}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    CLIPModel(config).save_pretrained(folder)
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    CLIPProcessor(image_processor=images, tokenizer=tokenizer).save_pretrained(folder)
    return folder


def test_clip_scores_are_cosines_of_its_own_embeddings(clip_folder: Path) -> None:
    scorer = ClipScorer(clip_folder)
    pictures = [Image.fromarray(noise(k).astype(np.uint8)) for k in range(3)]
    prompts = ["a red circle", "a blue square", "a green triangle"]
    together = scorer.scores(pictures, prompts)
    apart = [scorer.scores([p], [t])[0] for p, t in zip(pictures, prompts, strict=True)]
    assert together == pytest.approx(apart, abs=1e-3), "a batch scores like its members"
    assert all(-100 <= score <= 100 for score in together)
    assert scorer.similarities(pictures, pictures) == pytest.approx([100.0] * 3, abs=1e-3)
    assert scorer.similarities(pictures[:1], pictures[1:2])[0] < 99.99
    # The model's own forward agrees.
    model = CLIPModel.from_pretrained(str(clip_folder))
    processor = CLIPProcessor.from_pretrained(str(clip_folder))
    inputs = processor(text=prompts[:1], images=pictures[:1], return_tensors="pt", padding=True)
    with torch.inference_mode():
        logits = model(**inputs).logits_per_image / model.logit_scale.exp()
    assert together[0] == pytest.approx(100 * float(logits), abs=1e-3)


def save(folder: Path, name: str, picture: np.ndarray) -> None:
    folder.mkdir(exist_ok=True)
    Image.fromarray(picture.astype(np.uint8)).save(folder / name)


def test_folders_are_compared_pair_by_pair(tmp_path: Path, clip_folder: Path) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    for k in range(6):
        smooth = scipy.ndimage.gaussian_filter(noise(k), (3, 3, 0)) * 2
        save(a, f"{k}.png", np.clip(smooth, 0, 255))
        save(b, f"{k}.png", np.clip(smooth if k else smooth * 0, 0, 255))
    save(a, "only-here.png", noise())
    (b / "notes.txt").write_text("not an image")
    names, unpaired = pair(a, b)
    assert names == [f"{k}.png" for k in range(6)]
    assert unpaired == ["only-here.png"]
    comparison = compare(
        a, b, names, [f"a red circle {'left ' * k}" for k in range(6)], ClipScorer(clip_folder)
    ).to_dict()
    assert "clip_score_of_others" in comparison["pairs"][0]["a"]
    assert [p["faults_b"] for p in comparison["pairs"]] == [["black"], [], [], [], [], []]
    assert comparison["summary"]["psnr_db"]["identical"] == 5
    assert comparison["summary"]["clip_similarity"]["mean"]["mean"] < 100.0
    assert comparison["summary"]["clip_score"]["difference"]["ci95"] is not None
    sharp = comparison["summary"]["sharpness"]
    assert sharp["b"] - sharp["a"] == pytest.approx(sharp["difference"]["mean"])
    assert sharp["difference"]["mean"] < 0


def test_wrong_folders(tmp_path: Path) -> None:
    save(tmp_path / "a", "x.png", noise())
    save(tmp_path / "b", "y.png", noise())
    with pytest.raises(UsageError, match="no image has the same name"):
        pair(tmp_path / "a", tmp_path / "b")
    with pytest.raises(UsageError, match="is not a folder"):
        pair(tmp_path / "a", tmp_path / "nowhere")
    (tmp_path / "b" / "x.png").write_bytes(b"no image")
    with pytest.raises(UsageError, match=r"x\.png cannot be read as an image"):
        compare(tmp_path / "a", tmp_path / "b", ["x.png"], None, None)
    save(tmp_path / "b", "x.png", noise(size=32))
    comparison = compare(tmp_path / "a", tmp_path / "b", ["x.png"], None, None).to_dict()
    assert "32x32 and 64x64" in comparison["pairs"][0]["reason"]
    assert "psnr_db" not in comparison["summary"]
    assert "sharpness" in comparison["summary"]
