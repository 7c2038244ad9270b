"""The words of each command are those of its file, which `python -m tests.golden` writes anew."""

import pytest

from tests.golden import ANSWERS, FOLDER, written


@pytest.mark.parametrize("name", ANSWERS)
def test_the_words_of_a_command_are_those_of_its_file(name: str) -> None:
    assert written(name) == (FOLDER / f"{name}.txt").read_text(encoding="utf-8"), "python -m tests.golden"
