"""What is said of a prompt that is longer than a model reads."""

from tests.families import build
from vivace.cli.generate import truncation

LONG = "a red circle " * 60


def test_clip_alone_reads_its_first_tokens() -> None:
    (note,) = truncation(build("sd"), LONG)
    assert "the model reads the first" in note
    assert truncation(build("sd"), "a red circle") == []


def test_of_flux_the_second_encoder_reads_what_clip_does_not() -> None:
    pipe = build("flux")
    pipe.tokenizer_2.model_max_length = 512
    (note,) = truncation(pipe, LONG, {"max_sequence_length": 512})
    assert "text_encoder reads the first" in note
    assert "text_encoder_2 reads all of it" in note
    assert "ignores the rest" not in note


def test_what_no_encoder_reads_is_ignored() -> None:
    pipe = build("flux")
    pipe.tokenizer_2.model_max_length = 512
    (note,) = truncation(pipe, LONG, {"max_sequence_length": 100})
    assert "the model reads the first 100 and ignores the rest" in note
