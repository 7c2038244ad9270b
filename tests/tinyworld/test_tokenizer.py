import pytest
from transformers import CLIPTokenizer

from tinyworld import evaluate, networks, tokenizer
from tinyworld.words import vocabulary


@pytest.fixture(scope="module")
def shipped():
    return CLIPTokenizer.from_pretrained(evaluate.WEIGHTS / networks.SD_FOLDER / "tokenizer")


def test_every_word_is_one_token_in_the_shipped_folder(shipped):
    assert shipped.model_max_length == 32
    ids = [shipped(word).input_ids for word in vocabulary()]
    assert {len(row) for row in ids} == {3}
    assert len({row[1] for row in ids}) == len(ids)


def test_the_folder_holds_the_tokenizer_that_the_code_builds(shipped):
    text = ["a tiny red circle above a big blue box, please!", "zebra ÄÖ 🙂 7"]
    assert shipped(text).input_ids == tokenizer.build()(text).input_ids


@pytest.mark.parametrize(
    "prompt",
    ["", "   ", "🙂🙂", "żółw", "中文", "\x00\t\n", "zebra'll", "word " * 1000, "<|endoftext|>", "a" * 5000],
)
def test_nothing_breaks_it(shipped, prompt):
    (row,) = tokenizer.encode(shipped, [prompt])
    assert len(row) == 32
    assert row[0] == shipped.bos_token_id
    assert shipped.eos_token_id in row
    assert max(row) < len(shipped)


def test_unknown_characters_do_not_end_the_prompt(shipped):
    row = tokenizer.encode(shipped, ["🙂 red circle"])[0]
    ids_of_words = shipped.convert_tokens_to_ids(["red</w>", "circle</w>"])
    assert row.index(ids_of_words[0]) < row.index(ids_of_words[1]) < row.index(shipped.eos_token_id)
