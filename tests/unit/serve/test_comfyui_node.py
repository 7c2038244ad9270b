"""The ComfyUI node of deploy/comfyui, by the contract that ComfyUI's loader and executor ask of a node."""

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.served import Served

FOLDER = Path(__file__).parents[3] / "deploy" / "comfyui" / "vivace"
PLAIN = {"prompt": "a red circle", "seed": 5, "width": 0, "height": 0, "steps": 0, "count": 1}


@pytest.fixture(scope="module")
def module() -> ModuleType:
    """As ComfyUI loads a folder of custom_nodes: by the path of its __init__.py."""
    spec = importlib.util.spec_from_file_location("custom_nodes_vivace", FOLDER / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(module: ModuleType, plain: Served | str, **inputs: Any) -> torch.Tensor:
    """Call the node as the executor does: an instance, FUNCTION by keywords, a tuple as in RETURN_TYPES."""
    kind = module.NODE_CLASS_MAPPINGS["VivaceServer"]
    declared = kind.INPUT_TYPES()
    given = PLAIN | {"server": plain if isinstance(plain, str) else f"http://127.0.0.1:{plain.port}"} | inputs
    assert set(declared["required"]) <= set(given) <= {*declared["required"], *declared["optional"]}
    answer = getattr(kind(), kind.FUNCTION)(**given)
    assert len(answer) == len(kind.RETURN_TYPES) == 1
    images: torch.Tensor = answer[0]
    assert images.dtype == torch.float32
    assert images.shape[-1] == 3
    assert 0 <= images.min() <= images.max() <= 1
    return images


def colour(images: torch.Tensor, index: int = 0) -> list[int]:
    return [round(255 * float(value)) for value in images[index, 0, 0]]


def test_it_draws_by_seed_and_as_many_as_asked(module: ModuleType, plain: Served) -> None:
    images = run(module, plain, count=2)
    assert images.shape[0] == 2
    assert [colour(images, index)[0] for index in range(2)] == [5, 6]


def test_a_connected_image_is_edited(module: ModuleType, plain: Served) -> None:
    image = torch.zeros(1, 16, 16, 3)
    image[..., 0] = 7 / 255
    assert colour(run(module, plain, image=image))[2] == 7
    mask = torch.zeros(1, 16, 16)
    mask[:, :, :8] = 1
    edited = run(module, plain, image=image, mask=mask)
    assert colour(edited)[0] == 5, "the mask's part is drawn anew"
    assert round(255 * float(edited[0, 0, 15, 0])) == 7, "the rest stays"


def test_what_is_wrong_is_said_in_the_servers_words(module: ModuleType, plain: Served) -> None:
    with pytest.raises(RuntimeError, match=r"400: .*lora"):
        run(module, plain, lora="nothing")
    with pytest.raises(ValueError, match="width and height"):
        run(module, plain, width=512)
    with pytest.raises(ValueError, match="connect the image"):
        run(module, plain, mask=torch.zeros(1, 8, 8))
    with pytest.raises(RuntimeError, match="vivace serve MODEL"):
        run(module, "http://127.0.0.1:9")
