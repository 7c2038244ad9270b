"""The page of `vivace serve`: it draws, edits, shows an error, and fits a phone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.served import fake
from tests.unit.browser.conftest import WIDTHS, overflow
from tests.unit.serve.test_edits import png


@pytest.mark.parametrize("width", WIDTHS)
def test_a_person_draws_edits_and_is_told_what_is_wrong(
    open_page: Callable[..., Any], width: int, tmp_path: Path
) -> None:
    with fake(tmp_path) as server:
        page = open_page(server.url, width, color_scheme="dark" if width == 400 else "light")
        page.get_by_text("ready", exact=True).wait_for()
        page.fill("#seed", "7")
        page.click("#draw")
        page.locator("#caption", has_text="16x16, seed 7").wait_for()
        page.fill("#seed", "8")
        page.fill("#steps", "3")
        page.click("#draw")
        page.locator("#history button").nth(1).wait_for()
        page.locator("#history button").nth(1).click()
        assert page.input_value("#seed") == "7", "an image of the history brings its seed back"

        page.set_input_files("#source", {"name": "a.png", "mimeType": "image/png", "buffer": png()})
        canvas = page.locator("#mask")
        canvas.wait_for()
        page.click("#draw")
        page.locator("#history button").nth(2).wait_for()
        assert "outside of the mask" not in page.inner_text("#caption"), "no paint is no mask"
        canvas.scroll_into_view_if_needed()
        canvas.click(position={"x": 5, "y": 5})
        page.click("#draw")
        page.locator("#caption", has_text="outside of the mask").wait_for()
        assert server.states()["done"] == 4
        page.click("#forget")

        page.fill("#steps", "999")
        page.click("#draw")
        page.locator("#error", has_text="at most 50 steps").wait_for()
        assert page.is_enabled("#draw")
        assert not page.is_visible("#facts"), "what draws is folded away"
        page.click("summary")
        assert "baseline" in page.inner_text("#facts")
        assert overflow(page) <= 0
