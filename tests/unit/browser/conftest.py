"""A browser without a window. Its tests are skipped where Playwright or Chromium is missing: `make browser`."""

import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
WIDTHS = (1280, 400)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="Playwright is not installed: make browser"
    )
    program = os.environ.get("VIVACE_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip("Chromium is not installed: make browser")
    with playwright.sync_playwright() as started:
        running = started.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return what opens a URL; the page must have no errors on its console at the end, but those that it is told of."""
    errors: list[str] = []
    pages = []

    def open_at(url: str, width: int, **options: Any) -> Any:
        page = browser.new_page(viewport={"width": width, "height": 800}, **options)
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(url)
        pages.append(page)
        return page

    yield open_at
    for page in pages:
        page.close()
    assert [text for text in errors if "status of 400" not in text] == []


def overflow(page: Any) -> int:
    """Return by how many pixels a page is wider than its window."""
    return int(page.evaluate("document.documentElement.scrollWidth - window.innerWidth"))
