"""The second witness, by a stand-in of BLIP's architecture with random weights."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForConditionalGeneration,
    BlipForImageTextRetrieval,
    BlipImageProcessor,
    BlipProcessor,
)

from vivace.benchmark.rounds.quality_pass import compute_figures
from vivace.benchmark.rounds.worker_requests import Scorer
from vivace.benchmark.store.images import save_image
from vivace.errors import UnknownModel
from vivace.foundation.spec.figures import FiguresKey
from vivace.measure.folders import compare
from vivace.measure.scorer import Witness
from vivace.models.prompts import PROMPT_SETS
from vivace.models.scorers import find_scorer, find_witness

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "blue", "circle", "square", "left", "of"]


def config() -> BlipConfig:
    small = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "projection_dim": 16, "encoder_hidden_size": 32, "initializer_range": 0.3,
    }  # fmt: skip
    text = {"vocab_size": len(WORDS), "max_position_embeddings": 16, "bos_token_id": 2, "sep_token_id": 3}
    return BlipConfig(
        text_config=small | text,
        vision_config=small | {"image_size": 32, "patch_size": 8},
        image_text_hidden_size=16,
    )


@pytest.fixture(scope="module")
def blip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blip")
    torch.manual_seed(0)
    BlipForImageTextRetrieval(config()).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    size = {"height": 32, "width": 32}
    BlipProcessor(BlipImageProcessor(size=size), BertTokenizer(str(folder / "vocab.txt"))).save_pretrained(
        folder
    )
    return folder


def test_the_witness_answers_as_transformers_own_forward(blip: Path) -> None:
    witness = Witness(blip)
    picture = Image.new("RGB", (48, 40), (222, 38, 38))
    prompts = ["a red circle", "a blue square left of a red circle"]
    scores = witness.scores(picture, prompts)
    assert all(0 < score < 100 for score in scores)
    assert scores[0] != scores[1]
    assert witness.scores(picture, prompts[:1]) == pytest.approx(scores[:1], abs=1e-3), (
        "padding does not matter"
    )
    assert witness.scores(Image.new("RGB", (48, 40)), prompts) != scores
    model = BlipForImageTextRetrieval.from_pretrained(blip).eval()
    processor = BlipProcessor.from_pretrained(blip)
    with torch.inference_mode():
        itm = model(**processor(images=picture, text=prompts[0], return_tensors="pt")).itm_score
    assert scores[0] == pytest.approx(100 * float(itm.softmax(-1)[0, 1]), abs=1e-3)


def test_it_is_found_like_a_scorer(blip: Path) -> None:
    located = find_witness(str(blip))
    assert located.folder == blip.resolve()
    assert located.revision == find_witness(str(blip)).revision
    with pytest.raises(UnknownModel, match="not a CLIP model"):
        find_scorer(str(blip))
    with pytest.raises(UnknownModel, match="not a BLIP model"):
        find_witness(str(find_scorer("tiny-clip").folder))
    with pytest.raises(UnknownModel, match=r"no scorer 'tiny-clip' .*a BLIP model"):
        find_witness("tiny-clip")


def test_a_blip_that_only_writes_captions_is_refused(blip: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(blip, tmp_path / "captions"))
    BlipForConditionalGeneration(config()).save_pretrained(folder)
    with pytest.raises(UnknownModel, match="without a head for image-text matching"):
        Witness(folder)


def test_the_quality_pass_and_two_folders_ask_it_too(blip: Path, tmp_path: Path) -> None:
    prompts = ["a red circle", "a blue square"]
    pictures = [Image.new("RGB", (48, 48), colour) for colour in ("red", "blue", "purple", "navy")]
    for k, picture in enumerate(pictures):
        folder = tmp_path / "ab"[k // 2]
        folder.mkdir(exist_ok=True)
        picture.save(folder / f"{k % 2}.png")
    witness = Witness(blip)
    scores = [witness.scores(picture, [prompts[k % 2]])[0] for k, picture in enumerate(pictures)]
    comparison = compare(
        tmp_path / "a", tmp_path / "b", ["0.png", "1.png"], prompts, None, witness=Witness(blip)
    ).to_dict()
    rows = comparison["pairs"]
    assert [row["a"]["witness_score"] for row in rows] == pytest.approx(scores[:2], abs=1e-3)
    assert [row["b"]["witness_score"] for row in rows] == pytest.approx(scores[2:], abs=1e-3)
    other = witness.scores(pictures[0], [prompts[1]])
    assert rows[0]["a"]["witness_score_of_others"] == pytest.approx(other[0], abs=1e-3)

    shas = []
    for picture in pictures:
        file = io.BytesIO()
        picture.save(file, format="PNG")
        shas.append(save_image(tmp_path / "pictures", file.getvalue()))
    keys = [
        FiguresKey(sha256=sha, reference=shas[k % 2], prompt=prompts[k % 2], scorer="clip and blip")
        for k, sha in enumerate(shas)
    ]
    asked = Scorer(folder=str(find_scorer("tiny-clip").folder), others="tinyworld", witness=str(blip))
    figures = compute_figures(tmp_path / "pictures", keys, asked, "cpu")
    assert [row.alone["witness_score"] for row in figures] == pytest.approx(scores, abs=1e-3)
    strangers = witness.scores(pictures[0], PROMPT_SETS["tinyworld"])
    mean = sum(strangers) / len(strangers)
    assert figures[0].alone["witness_score_of_others"] == pytest.approx(mean, abs=1e-3)
    assert "witness_score_of_others" not in figures[2].alone
