"""A pipeline that a program holds, or a function that makes one, is measured in its process."""

from pathlib import Path
from typing import Any

import pytest
import torch

import vivace
from vivace.benchmark.progress import Progress
from vivace.errors import UsageError
from vivace.foundation.spec.record import Outcome, Round


@pytest.fixture(scope="module")
def pipe() -> Any:
    return vivace.load("tiny-sd", device="cpu").pipe


def bench(model: Any, recipes: list[str], store: Path, **more: Any) -> vivace.Run:
    fields: dict[str, Any] = {
        "prompts": ["a red circle", "a blue square"],
        "num_inference_steps": 2,
        "store": store,
    }
    fields["timing"] = vivace.Timing(rounds=1, repeats=1, max_warmup=1)
    return vivace.bench(model, recipes, **fields | {"scorer": "tiny-clip"} | more)


class Counting(Progress):
    def __init__(self) -> None:
        self.num_rounds = 0

    def end_round(self, index: int, round_: Round) -> None:
        self.num_rounds += 1


@pytest.mark.long
def test_each_recipe_has_a_copy_and_its_images_are_compared(pipe: Any, tmp_path: Path) -> None:
    dtype, weights = pipe.dtype, pipe.unet.state_dict()["conv_in.weight"].clone()
    baseline, fewer, half, tiny = run = bench(pipe, ["baseline", "steps(1)", "bf16", "tiny_vae"], tmp_path)
    assert [record.outcome for record in run] == [Outcome.MEASURED] * 3 + [Outcome.UNSUPPORTED]
    assert "tiny VAE" in (tiny.reason or "")
    assert (baseline.trial.model.name, baseline.trial.model.source) == ("StableDiffusionPipeline", "object")
    figures = run.rows()[1].figures
    assert len(figures) == 2
    assert all("clip_score" in row.alone and "ssim" in row.against for row in figures)
    assert pipe.dtype is dtype
    assert torch.equal(pipe.unet.state_dict()["conv_in.weight"], weights), "the pipeline itself is as it was"
    again = Counting()
    bench(pipe, ["baseline", "steps(1)"], tmp_path, progress=again)
    assert again.num_rounds == 0, "stored rounds are kept"
    assert fewer.trial.key(fewer.environment) != half.trial.key(half.environment)


def test_a_function_makes_a_pipeline_for_each_recipe(pipe: Any, tmp_path: Path) -> None:
    made = []

    def make() -> Any:
        made.append(vivace.load("tiny-sd", device="cpu").pipe)
        return made[-1]

    run = bench(make, ["baseline", "steps(1)"], tmp_path, quality=False)
    assert len(run) == 2
    assert len(made) == 3, "one to look at, one for each recipe"
    assert (
        run.records[0].trial.model.revision
        == bench(pipe, ["baseline"], tmp_path, quality=False).records[0].trial.model.revision
    )


@pytest.mark.parametrize(
    ("model", "more", "says"),
    [
        (lambda: "tiny-sd", {}, "a function that makes one"),
        ("pipe", {"gpus": 1}, "other processes"),
        ("pipe", {"recipes": ["baseline", "parallel(cfg)"]}, "a process on each GPU"),
    ],
)
def test_what_needs_fresh_processes_is_refused(
    pipe: Any, model: Any, more: dict[str, Any], says: str, tmp_path: Path
) -> None:
    recipes = more.pop("recipes", ["baseline"])
    with pytest.raises(UsageError, match=says):
        bench(pipe if model == "pipe" else model, recipes, tmp_path, **more)
    assert not [*tmp_path.iterdir()]
