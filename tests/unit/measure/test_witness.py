"""The second witness, by a stand-in of BLIP's architecture with random weights."""

import json
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

from vivace.errors import UnknownModel
from vivace.measure.witness import Witness
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
    found = witness.scores(picture, prompts)
    assert all(0 < score < 100 for score in found)
    assert found[0] != found[1]
    assert witness.scores(picture, prompts[:1]) == pytest.approx(found[:1], abs=1e-3), (
        "padding does not matter"
    )
    assert witness.scores(Image.new("RGB", (48, 40)), prompts) != found
    model = BlipForImageTextRetrieval.from_pretrained(blip).eval()
    processor = BlipProcessor.from_pretrained(blip)
    with torch.inference_mode():
        itm = model(**processor(images=picture, text=prompts[0], return_tensors="pt")).itm_score
    assert found[0] == pytest.approx(100 * float(itm.softmax(-1)[0, 1]), abs=1e-3)


def test_it_is_found_like_a_scorer(blip: Path) -> None:
    found = find_witness(str(blip))
    assert found.folder == blip.resolve()
    assert found.revision == find_witness(str(blip)).revision
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


def test_a_broken_folder_is_named(blip: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(blip, tmp_path / "broken"))
    settings = json.loads((folder / "config.json").read_text())
    settings["vision_config"]["hidden_size"] = 24
    (folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnknownModel, match="does not load as a BLIP model"):
        Witness(folder)
