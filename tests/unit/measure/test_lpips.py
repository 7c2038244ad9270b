"""LPIPS against torchmetrics' own, over one AlexNet of random weights; the published ones are not at hand in tests."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from vivace.errors import Unsupported
from vivace.measure.scorer import Lpips


@pytest.fixture(scope="module")
def alexnet() -> nn.Sequential:
    """AlexNet's `features`, as published, with random weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 64, 11, 4, 2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(192, 384, 3, padding=1), nn.ReLU(),
        nn.Conv2d(384, 256, 3, padding=1), nn.ReLU(),
        nn.Conv2d(256, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def weights(alexnet: nn.Sequential, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("alexnet") / "alexnet.pth"
    torch.save({f"features.{key}": value for key, value in alexnet.state_dict().items()}, path)
    return path


@pytest.fixture(scope="module")
def pictures() -> list[Any]:
    rng = np.random.default_rng(0)
    smooth = np.add.outer(np.linspace(0, 100, 96), np.linspace(0, 100, 128))[..., None] * [1.0, 0.7, 0.4]
    return [smooth, smooth + rng.normal(0, 4, smooth.shape), 255 - smooth]


def test_it_agrees_with_torchmetrics(
    alexnet: nn.Sequential, weights: Path, pictures: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchmetrics.functional.image.lpips as theirs

    monkeypatch.setattr(theirs, "_get_tv_model_features", lambda net, pretrained: alexnet)
    network = theirs._LPIPS(pretrained=True, net="alex", pnet_rand=False)
    tensors = [torch.from_numpy(p.transpose(2, 0, 1)[None].copy()).float() / 127.5 - 1 for p in pictures]
    expected = [float(network(t, tensors[0])) for t in tensors]
    found = Lpips(weights=weights).distances(pictures, [pictures[0]] * 3)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-8)
    assert found[0] == 0
    assert found[0] < found[1] < found[2]


def test_another_file_is_refused_and_runs_no_code(tmp_path: Path) -> None:
    class Sly:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    path = tmp_path / "alexnet.pth"
    torch.save({"features.0.weight": Sly()}, path)
    with pytest.raises(Unsupported, match="does not hold AlexNet's weights"):
        Lpips(weights=path)
    assert not (tmp_path / "ran").exists()
    torch.save({"features.0.weight": torch.zeros(64, 3, 11, 11)}, path)
    with pytest.raises(Unsupported, match="does not hold AlexNet's weights"):
        Lpips(weights=path)
