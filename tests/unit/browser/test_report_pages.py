"""Pages of answers open without a network, at the width of a desk and of a phone, without overflow or errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden import ANSWERS
from tests.unit.answers.test_page import everything
from tests.unit.browser.conftest import WIDTHS, overflow
from vivace.answers.page import page_of


@pytest.mark.parametrize("name", [*ANSWERS, "every block"])
@pytest.mark.quick("every block", "bench", "tune")
def test_a_page_opens_offline_at_both_widths(
    name: str, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    answer = everything("a few words and a_longer_one") if name == "every block" else ANSWERS[name]()
    (tmp_path / "page.html").write_text(page_of(answer))
    for width in WIDTHS:
        page = open_page((tmp_path / "page.html").as_uri(), width, offline=True)
        assert page.locator("h1").count() == 1
        assert overflow(page) <= 0, f"at {width} px"
