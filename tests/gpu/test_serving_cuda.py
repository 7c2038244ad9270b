"""A worker's images on a GPU: those of the session, whose call returns before the GPU has ended."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import vivace
from vivace.serve.queue.messages import Draw, Load
from vivace.serve.worker.warm_session import Drawing

pytestmark = pytest.mark.gpu
_STEPS = 8


@pytest.mark.parametrize("recipe", ["baseline", "cuda_graph", "cuda_graph+gpu_postprocess"])
def test_images_that_are_queued_behind_each_other_are_the_sessions(tmp_path: Path, recipe: str) -> None:
    request = Load("tiny-sd", recipe, "cuda", None, ((128, 128),), (), str(tmp_path), "text")
    drawing = Drawing.load(request, lambda phase: None)
    call = {"width": 128, "height": 128, "num_inference_steps": _STEPS}
    steps: list[int] = []
    queued = [
        drawing.draw(
            Draw((f"job-{seed}",), ("a red circle",), (seed,), call),
            lambda kind, fields: steps.append(fields["step"]),
        )
        for seed in range(4)
    ]
    events = [finish() for finish in queued]
    assert steps == [*range(1, _STEPS + 1)] * 4
    with vivace.load("tiny-sd", recipe, device="cuda", task="text") as session:
        for seed, event in enumerate(events):
            (image,) = event["images"]
            pixels = np.frombuffer(Path(image["file"]).read_bytes(), np.uint8).reshape(128, 128, 3)
            generator = torch.Generator("cpu").manual_seed(seed)
            own = session("a red circle", generator=generator, **call).images[0]
            assert np.array_equal(pixels, np.asarray(own)), (recipe, seed)
            assert event["steps"] == _STEPS
            assert min(event["phases"][name] for name in ("text", "denoise", "decode")) >= 0
            assert event["phases"]["denoise"] > 0


def test_a_new_size_is_captured_while_the_last_image_is_copied(tmp_path: Path) -> None:
    """Calls of other threads invalidate a capture in CUDA's strictest mode."""
    request = Load("tiny-sd", "cuda_graph", "cuda", None, ((128, 128),), (), str(tmp_path), "text")
    drawing = Drawing.load(request, lambda phase: None)
    for number, size in enumerate(range(64, 129, 8)):
        call = {"width": size, "height": size, "num_inference_steps": _STEPS}
        draw = Draw((f"job-{number}",), ("a red circle",), (number,), call)
        finish = drawing.draw(draw, lambda kind, fields: None)
        with ThreadPoolExecutor(1) as other:
            ended = other.submit(finish)
            follower = drawing.draw(
                Draw(("next",), ("a blue square",), (1,), call | {"width": size + 64}),
                lambda kind, fields: None,
            )
            assert ended.result()["steps"] == follower()["steps"] == _STEPS
