"""Sizes that are not announced, and what partial images cost."""

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.served import Served, fake
from vivace.serve.queue.messages import Draw, Load
from vivace.serve.worker.warm_session import Drawing


@pytest.fixture
def any_size(tmp_path: Path) -> Iterator[Served]:
    with fake(tmp_path, any_size=True) as running:
        yield running


def test_any_size_is_drawn_within_its_bounds(any_size: Served) -> None:
    (image,) = any_size.draw(size="24x40", seed=5).images
    assert (image.size, image.getpixel((0, 0))) == ((24, 40), (5, 0, 0))
    odd = any_size.draw(size="20x24")
    assert (odd.status, odd.message) == (400, "width and height must be multiples of 8; got 20x24")
    large = any_size.draw(size="512x64")
    assert (large.status, large.message) == (
        400,
        "an image has at most 16,384 pixels here; 512x64 has more",
    )
    thin = any_size.draw(size="8x2048")
    assert thin.status == 200, "as many pixels as a square of 128"


@pytest.mark.parametrize(
    ("pairs", "most"),
    [
        pytest.param(3, 0.25, marks=pytest.mark.long),
        pytest.param(200, 0.03, marks=[pytest.mark.soak, pytest.mark.timeout(900)]),
    ],
)
def test_partial_images_cost_an_image_little(tmp_path: Path, pairs: int, most: float) -> None:
    """What encodes them is not the worker, which is measured here."""
    drawing = Drawing.load(
        Load("tiny-sd", "tiny_vae", "cpu", 1, ((128, 128),), (), str(tmp_path), task="text"),
        lambda phase: None,
    )
    call = {"height": 128, "width": 128, "num_inference_steps": 20}

    def seconds(partials: tuple[int, ...]) -> float:
        began = time.perf_counter()
        drawn: list[Any] = []
        drawing.draw(
            Draw(("img-1",), ("a red circle",), (3,), call, partials=partials),
            lambda kind, fields: drawn.extend(fields.get("images", ())),
        )
        assert len(drawn) == len(partials)
        return time.perf_counter() - began

    ratios = []
    for number in range(pairs):
        order = [(), (5, 10, 15)] if number % 2 else [(5, 10, 15), ()]
        measured = {partials: seconds(partials) for partials in order}
        ratios.append(measured[5, 10, 15] / measured[()])
    gain = statistics.median(ratios) - 1
    print(f"three partial images cost {gain:+.1%} of an image of {1000 * measured[()]:.0f} ms")
    assert gain < most
