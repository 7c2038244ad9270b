"""The server with models of each family that was added last: random weights, small, from start to image."""

import sys

import pytest
from PIL import Image

from tests.narrow import SIDE
from tests.served import served
from tests.unit.serve.test_edits import encoded
from vivace.foundation.spec.sizes import Size
from vivace.serve.settings import ServeSettings

_WORKER = """
from tests.narrow import set_up
set_up()
from vivace.serve.worker import warm_session
warm_session.check_fits = lambda *_, **__: None  # asks what the full size needs
from vivace.serve.worker.main import main
main()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "model", ["chroma1-hd", "ernie-image", "ideogram-4", "longcat-image", "flux2-klein-base-4b"]
)
def test_it_draws_by_seed(model: str) -> None:
    settings = ServeSettings(
        model=f"synthetic:{model}", recipe="baseline", device="cpu", sizes=(Size(SIDE, SIDE),)
    )
    with served(settings, (sys.executable, "-c", _WORKER)) as server:
        first, again, other = (server.draw(seed=seed, num_inference_steps=2).images[0] for seed in (1, 1, 2))
        assert first.size == (SIDE, SIDE)
        assert first.tobytes() == again.tobytes() != other.tobytes()
        assert server.draw(num_inference_steps=2, size="7x7").status == 400


@pytest.mark.long
@pytest.mark.parametrize("model", ["flux2-klein-4b", "qwen-image-2.1"])
def test_one_that_draws_and_edits_does_both(model: str) -> None:
    settings = ServeSettings(
        model=f"synthetic:{model}", recipe="baseline", device="cpu", sizes=(Size(SIDE, SIDE),)
    )
    one = {"image": encoded(Image.new("RGB", (SIDE, SIDE), (7, 0, 0)))}
    two = one | {"image[]": encoded(Image.new("RGB", (SIDE, SIDE), (0, 200, 0)))}
    with served(settings, (sys.executable, "-c", _WORKER)) as server:
        drawn = server.draw(seed=1, num_inference_steps=2).images[0].tobytes()
        edited = server.edit(files=one, seed=1, num_inference_steps=2)
        assert edited.images[0].tobytes() != drawn
        of_two = server.edit(files=two, seed=1, num_inference_steps=2)
        if model == "qwen-image-2.1":
            assert "2 images are sent" in of_two.message
        else:
            assert of_two.images[0].tobytes() not in (drawn, edited.images[0].tobytes())
        assert server.draw(seed=1, num_inference_steps=2).images[0].tobytes() == drawn
