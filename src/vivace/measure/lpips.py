"""LPIPS: perceptual distance of two images, from the features of AlexNet. Optional.

It needs AlexNet's published weights (244 MB), which vivace neither ships nor downloads. They exist only as a pickle,
which is read with `weights_only=True`: tensors, never code. The linear heads come from torchmetrics. The network is
built here with torch: torchmetrics 1.9 builds AlexNet with torchvision, which is not installed with vivace and has no
matching build for every torch, and it takes no path to local AlexNet weights.

Source: Zhang et al., The Unreasonable Effectiveness of Deep Features as a Perceptual Metric, arXiv 1801.03924
(version 0.1, AlexNet; the convolutions are Krizhevsky's One weird trick, arXiv 1404.5997).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from vivace.errors import Unsupported
from vivace.foundation.untrusted.files import open_plain, reading, user_path
from vivace.measure.image_metrics import Pixels

ALEXNET = "alexnet-owt-7be5be79.pth"
_URL = f"https://download.pytorch.org/models/{ALEXNET}"
_MAX_BYTES = 1_000_000_000
MIN_SIDE = 32  # pixels; AlexNet's pooling reduces smaller images to nothing
# Mean and standard deviation of ImageNet's channels for images in -1 .. 1, as in LPIPS training.
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Convolutions of AlexNet by their index in its published `features`: in, out, kernel, stride, padding.
_CONVOLUTIONS = {
    0: (3, 64, 11, 4, 2),
    3: (64, 192, 5, 1, 2),
    6: (192, 384, 3, 1, 1),
    8: (384, 256, 3, 1, 1),
    10: (256, 256, 3, 1, 1),
}
_POOLED_BEFORE = (3, 6)


class Lpips:
    """LPIPS distance with AlexNet: 0 for equal images, larger for images that look more different.

    Args:
        weights: file with AlexNet's weights; None: where PyTorch's libraries keep it.
    """

    def __init__(self, device: str = "cpu", weights: Path | None = None) -> None:
        import torch
        from torch import nn

        path = weights or default_weights()
        if not path.is_file():
            raise Unsupported(missing(path))
        self._stages: list[Any] = []
        self._heads: list[Any] = []
        with reading(path, Unsupported, f"replace it with {_URL}", problem="does not hold AlexNet's weights"):
            with open_plain(path, _MAX_BYTES) as opened:
                state = torch.load(opened, map_location="cpu", weights_only=True)
            heads = resources.files("torchmetrics.functional.image") / "lpips_models" / "alex.pth"
            with resources.as_file(heads) as file:
                linear = torch.load(file, map_location="cpu", weights_only=True)
            for k, (index, (num_in, num_out, kernel, stride, padding)) in enumerate(_CONVOLUTIONS.items()):
                convolution = nn.Conv2d(num_in, num_out, kernel, stride, padding)
                convolution.load_state_dict(
                    {kind: state[f"features.{index}.{kind}"] for kind in ("weight", "bias")}
                )
                pooling = [nn.MaxPool2d(3, 2)] if index in _POOLED_BEFORE else []
                stage = nn.Sequential(*pooling, convolution, nn.ReLU())
                self._stages.append(stage.eval().requires_grad_(False).to(device))
                self._heads.append(linear[f"lin{k}.model.1.weight"].to(device))
        self._device = device

    def distances(self, images: Sequence[Pixels], references: Sequence[Pixels]) -> list[float]:
        """Return the distance of each image (H, W, 3), 0 to 255, to its reference of the same size."""
        import torch

        distances = []
        for image, reference in zip(images, references, strict=True):
            if image.shape != reference.shape or min(image.shape[:2]) < MIN_SIDE:
                raise ValueError(
                    f"LPIPS needs images of equal size, at least {MIN_SIDE} pixels a side, "
                    f"got {image.shape[1]}x{image.shape[0]} and {reference.shape[1]}x{reference.shape[0]}"
                )
            pair = torch.from_numpy(np.stack([image, reference]).transpose(0, 3, 1, 2).copy())
            with torch.inference_mode():
                distances.append(self._distance(pair.float().to(self._device) / 127.5 - 1))
        return distances

    def _distance(self, pair: Any) -> float:
        """Return the distance of two images (2, 3, H, W) in -1 .. 1.

        It is the sum over stages of the weighted squared differences of normalised features.
        """
        import torch

        shift, scale = (torch.tensor(v, device=pair.device)[:, None, None] for v in (_SHIFT, _SCALE))
        features = (pair - shift) / scale
        total = 0.0
        for stage, head in zip(self._stages, self._heads, strict=True):
            features = stage(features)
            unit = features / (1e-8 + features.square().sum(dim=1, keepdim=True)).sqrt()
            difference = (unit[:1] - unit[1:]).square()
            total += float(torch.nn.functional.conv2d(difference, head).mean())
        return total


def default_weights() -> Path:
    """Return where torch's libraries keep AlexNet's weights, without importing torch."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = user_path(os.environ.get("TORCH_HOME") or Path(cache) / "torch")
    return home / "hub" / "checkpoints" / ALEXNET


def check() -> None:
    """Raise Unsupported if the weights are missing. Called before anything is measured."""
    if not default_weights().is_file():
        raise Unsupported(missing(default_weights()))


def missing(path: Path) -> str:
    return f"LPIPS needs AlexNet's weights (244 MB), which are missing; save {_URL} as {path}"
