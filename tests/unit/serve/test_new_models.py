"""The server with models of each family that was added last: random weights, small, from start to image."""

import sys

import pytest

from tests.narrow import SIDE
from tests.served import served
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
