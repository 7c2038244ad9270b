"""Words that prompts ask for: which they are, whether they can be read, and whether B writes them as A does."""

import re
from functools import partial
from pathlib import Path

import pytest

from tests import drawn_words, proved
from vivace.errors import Unsupported, UsageError
from vivace.proofs.verdicts import as_good
from vivace.proofs.verdicts.legible import share_missed, words_of

WORDS = [
    "OPEN 24 HOURS",
    "GOOD COFFEE",
    "SALE",
    "MIND THE GAP",
    "HAPPY BIRTHDAY",
    "BAKERY",
    "NO PARKING",
    "LIBRARY",
]
PROMPTS = [f'a sign that says "{words}"' for words in WORDS]
prove = partial(proved.prove, prompts=PROMPTS)
proof_of = partial(proved.proof_of, prompts=PROMPTS)
A, DAMAGED = "python:tests.drawn_words:draw", "python:tests.drawn_words:draw_damaged"


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> drawn_words.PixelReader:
    reader = drawn_words.PixelReader()
    monkeypatch.setattr(as_good, "find_reader", lambda threads=None: reader)
    return reader


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ('a sign that says "OPEN", and below it "24 h"', ("OPEN", "24 h")),
        ("ein Schild: „Grüße“, ein Plakat »Los!« und ‚Halt‘", ("Grüße", "Los!", "Halt")),
        ("une affiche « Bonjour », “thé” and ‘don’t walk’", ("Bonjour", "thé", "don’t walk")),
        ("看板「営業中」と『準備中』", ("営業中", "準備中")),
        ("a cat's bowl beside the dogs' basket and the farmers' market", ()),
        ("a 5\" screen and a 7\" tablet, rock 'n' roll", ()),
        ('a 55" screen that shows "NEWS"', ("NEWS",)),
        ('an empty pair of quotes "" and "!?"', ()),
    ],
)
def test_text_in_quotes_is_asked_for(prompt: str, texts: tuple[str, ...]) -> None:
    assert words_of(prompt) == texts


@pytest.mark.parametrize(
    ("text", "read", "missed"),
    [
        ("Open 24 Hours!", "est. 1984\nOPEN24\nHOURS\ncash only", 0),
        ("HOURS OPEN", "open hours", 0),
        ("OPEN", "OPFN", 1 / 4),
        ("営業中", "営業", 1 / 3),
        ("COFFEE SHOP", "COFEE", 4 / 10),
    ],
)
def test_letters_that_cannot_be_read_are_missed(text: str, read: str, missed: float) -> None:
    assert share_missed((text,), read) == pytest.approx(missed)


def test_damaged_words_are_named(tmp_path: Path, reader: drawn_words.PixelReader) -> None:
    page = tmp_path / "page.html"
    proof = proof_of(tmp_path, A, DAMAGED, "--claim", "legible", "-o", str(page))
    assert proof["answers"]["legible"]["verdict"] == "failed"
    assert proof["words"]["a_missed"] == 0
    assert proof["words"]["b_missed"] > 0.2
    start = "B's words are less legible than A's: of the letters asked for 0 % are missing or wrong in A"
    assert proof["headline"].startswith(start)
    worst = proof["words"]["pairs"][0]
    assert worst["a"]["read"] in WORDS
    assert worst["b"]["missed"] == max(pair["b"]["missed"] for pair in proof["words"]["pairs"])
    assert proof["exit_code"] == 1
    text = page.read_text()
    assert f"“{worst['b']['read']}”" in text
    lines = prove(tmp_path, A, DAMAGED).stdout
    assert re.search(r"Legible\? +no: of the letters asked for", lines)
    assert f"A “{worst['a']['read']}”, 0 % missed; B “" in " ".join(lines.split())


def test_the_same_words_are_legible_and_each_image_is_read_once(
    tmp_path: Path, reader: drawn_words.PixelReader
) -> None:
    proof = proof_of(tmp_path, A, A)
    assert proof["claims"] == ["as-good", "legible"]
    assert proof["answers"]["legible"]["verdict"] == "proven"
    assert proof["exit_code"] == 0
    assert reader.num_read == len(PROMPTS)


def test_few_prompts_and_an_illegible_reference_cannot_tell(
    tmp_path: Path, reader: drawn_words.PixelReader
) -> None:
    few = proof_of(tmp_path, A, DAMAGED, "--claim", "legible", prompts=PROMPTS[:2])
    assert few["answers"]["legible"]["verdict"] == "cannot tell"
    assert "about 6 prompts with words would tell" in few["answers"]["legible"]["reason"]
    assert few["exit_code"] == 4
    blind = proof_of(tmp_path, "python:tests.drawn_words:draw_illegible", A)
    assert "A's own words cannot be read" in blind["answers"]["legible"]["reason"]
    assert "legible" not in blind["claims"]


def test_without_a_reader_the_command_to_install_it_is_said_where_words_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(as_good, "find_reader", lambda threads=None: None)
    proof = proof_of(tmp_path, A, A)
    assert "pip install rapidocr onnxruntime" in proof["answers"]["legible"]["reason"]
    assert proof["answers"]["legible"]["reason"].startswith("8 prompts ask for words")
    plain = proof_of(tmp_path, A, A, prompts=["a cat", "a dog"])
    assert plain["answers"]["legible"]["reason"] == "no prompt asks for words in quotes"
    with pytest.raises(Unsupported, match=r"no text reader is installed; pip install rapidocr"):
        raise prove(tmp_path, A, A, "--claim", "legible").exception
    with pytest.raises(UsageError, match="put them in quotes"):
        raise prove(tmp_path, A, A, "--claim", "legible", prompts=["a cat"]).exception
