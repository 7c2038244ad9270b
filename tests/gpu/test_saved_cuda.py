"""Saved models on a GPU, where weights have other precisions and layouts than on a CPU."""

from pathlib import Path

import numpy as np
import pytest
import torch

from vivace.errors import Unsupported
from vivace.models.find import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.opening import open_session
from vivace.runtime.saving import save
from vivace.runtime.session import Session

pytestmark = pytest.mark.gpu


def drawn(session: Session) -> np.ndarray:
    generator = torch.Generator("cpu").manual_seed(3)
    return np.asarray(session("a red circle", generator=generator, num_inference_steps=3).images[0])


@pytest.mark.parametrize("scheme", ["int8", "int8_dynamic", "fp8_weight", "fp8", "fp8_static", "nf4", "int4"])
@pytest.mark.parametrize("later", ["", "+offload(model)"])
def test_a_saved_folder_draws_on_a_gpu_as_the_recipe_applied_afresh(
    scheme: str, later: str, tmp_path: Path
) -> None:
    recipe = f"bf16+quantize({scheme}){later}"
    try:
        afresh = drawn(open_session(find_model("tiny-flux"), resolve(recipe), "cuda"))
    except Unsupported as error:
        pytest.skip(str(error))
    save(find_model("tiny-flux"), resolve(recipe), "cuda", tmp_path / "folder")
    loaded = open_session(find_model(str(tmp_path / "folder")), resolve("baseline"), "cuda")
    assert np.array_equal(drawn(loaded), afresh)


def test_a_folder_is_for_its_kind_of_device(tmp_path: Path) -> None:
    save(find_model("tiny-sd"), resolve("bf16"), "cpu", tmp_path / "folder")
    with pytest.raises(Unsupported, match="was saved for cpu"):
        open_session(find_model(str(tmp_path / "folder")), resolve("baseline"), "cuda")
