"""A request for images: checked before a model is loaded, then the arguments of its calls."""

import pytest
import torch
from PIL import Image

from vivace.errors import RecipeError, UsageError, WorkloadError
from vivace.runtime.workloads import checked_request


def test_the_arguments_of_a_call_are_prompts_and_generators() -> None:
    request = checked_request("tiny-sd", "tiny_vae", prompts=["a red circle", "a blue square"], seed=7)
    (first,), *_ = request.workload.calls()
    alone = request.arguments([first])
    assert alone["prompt"] == "a red circle"
    assert alone["generator"].initial_seed() == 7
    both = request.arguments([*request.workload.calls()[0], *request.workload.calls()[1]])
    assert both["prompt"] == ["a red circle", "a blue square"]
    assert [generator.initial_seed() for generator in both["generator"]] == [7, 7]
    assert torch.randn(2, generator=alone["generator"]).equal(torch.randn(2, generator=both["generator"][0]))


def test_a_call_starts_from_its_own_source_image() -> None:
    request = checked_request("tiny-sd", "baseline", prompts=["a red circle"], task="inpaint")
    arguments = request.arguments(request.workload.calls()[0])
    size = request.workload.width, request.workload.height
    assert isinstance(arguments["image"], Image.Image)
    assert (arguments["image"].size, arguments["mask_image"].size) == (size, size)


@pytest.mark.parametrize(
    ("recipe", "fields", "error", "words"),
    [
        ("baseline", {"height": 100}, WorkloadError, "--height 100: tiny-sd takes multiples of"),
        ("baseline", {"num_inference_steps": 0}, WorkloadError, "--num-inference-steps 0 must be at least 1"),
        ("baseline", {"batches": (1, 2)}, UsageError, "one batch size"),
        ("tiny_vea", {}, RecipeError, "tiny_vae"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    recipe: str, fields: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        checked_request("tiny-sd", recipe, **fields)


@pytest.mark.parametrize(("model", "largest"), [("flux-dev", 4096), ("sdxl", 4096), ("sd35-large", 3072)])
def test_four_k_is_drawn_where_positions_reach_that_far(model: str, largest: int) -> None:
    size = {"height": largest, "width": largest}
    assert checked_request(f"synthetic:{model}", "baseline", **size).workload.height == largest
    with pytest.raises(WorkloadError, match=f"up to {largest} pixels"):
        checked_request(f"synthetic:{model}", "baseline", height=largest + 64)
