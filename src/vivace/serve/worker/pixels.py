"""The pixels of a call's images, copied from the GPU and converted while the next call runs; and partial images, a
linear projection of the latents to colours, fitted to the model's own decoder once.

A pipeline that is asked for PIL images waits for the GPU, copies and converts, and the GPU has nothing to do meanwhile.
Asked for tensors, it returns once its work is queued. The bytes are the same, rounded as diffusers rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vivace.runtime.calls import accepted_by
from vivace.runtime.finite_images import FiniteCheck

if TYPE_CHECKING:
    from PIL.Image import Image

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Pixels:
    """Images as bytes.

    Attributes:
        images: a tensor of bytes (images, rows, columns, colours) in the CPU's memory, a tensor of colours from 0 to 1
            (images, colours, rows, columns), or images of PIL.
        copied: an event of the GPU, after which the bytes and `is_finite` are there; None if they are.
    """

    images: Any
    copied: Any = None
    is_finite: Any = None

    @classmethod
    def of(cls, images: Any, check: FiniteCheck) -> Pixels:
        """Begin to copy what a pipeline returned; return at once."""
        import torch

        if not isinstance(images, torch.Tensor) or images.device.type != "cuda":
            return cls(images)
        with torch.inference_mode(), torch.cuda.device(images.device):
            colours = images.permute(0, 2, 3, 1).float()
            # The output of a CUDA graph is overwritten by its next replay, which is queued after this copy.
            on_gpu = (colours * 255).round().byte().contiguous()
            on_host = torch.empty(on_gpu.shape, dtype=torch.uint8, pin_memory=True)
            on_host.copy_(on_gpu, non_blocking=True)
            is_finite = torch.empty((), dtype=torch.bool, pin_memory=True)
            is_finite.copy_(check.flag, non_blocking=True)
            copied = torch.cuda.Event(blocking=True)
            copied.record()
        return cls(on_host, copied, is_finite)

    def wait(self) -> list[NDArray[np.uint8]]:
        """Wait until the bytes are there; return each image as (rows, columns, 3), without gaps. NotFinite for NaN or
        infinity."""
        import torch

        if self.copied is not None:
            self.copied.synchronize()
            FiniteCheck().refuse(not self.is_finite)
            arrays = list(self.images.numpy())
        elif isinstance(self.images, torch.Tensor):
            colours = self.images.permute(0, 2, 3, 1).float().numpy()
            arrays = list(np.ascontiguousarray((colours * 255).round().astype(np.uint8)))
        else:
            return [np.asarray(image.convert("RGB")) for image in self.images]
        return [_rgb(array) for array in arrays]


def _rgb(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
    from PIL import Image

    if array.shape[2] == 3:
        return array
    return np.asarray(Image.fromarray(array.squeeze()).convert("RGB"))


def returns_tensors(pipe: Any, device: str) -> bool:
    """Return whether a pipeline returns tensors on request, which diffusers' own processor would make into images."""
    return device in _DEVICES and hasattr(pipe, "image_processor") and "output_type" in accepted_by(pipe)


@dataclass(frozen=True)
class Projection:
    """Latents to colours.

    Attributes:
        weights: (channels + 1, 3); the last row is the offset.
        spread: standard deviation of finished latents. Those of early steps are larger, by their noise.
    """

    pipe: Any
    weights: NDArray[np.float32]
    spread: float

    def image(self, latents: Any, height: int, width: int) -> Image:
        """Return an image of the size of the first latents, one pixel for each of their places; NotFinite for NaN or
        infinity."""
        from PIL import Image

        grid = _grid(self.pipe, latents, height, width)
        assert grid is not None
        FiniteCheck().look(grid)
        grid = grid * min(1.0, self.spread / max(float(grid.std()), 1e-6))
        colours = _with_offset(grid) @ self.weights
        return Image.fromarray(np.clip(colours, 0, 255).astype(np.uint8))


def fit_projection(pipe: Any, latents: Any, image: Image) -> Projection | None:
    """Fit the projection to the last latents of a call and its image by least squares; None for an unknown layout."""
    grid = _grid(pipe, latents, image.height, image.width)
    if grid is None:
        return None
    rows, columns = grid.shape[:2]
    pixels = np.asarray(image.convert("RGB").resize((columns, rows)), dtype=np.float64)
    inputs = _with_offset(grid).reshape(rows * columns, -1).astype(np.float64)
    ridge = 1e-3 * np.trace(inputs.T @ inputs) / inputs.shape[1] * np.eye(inputs.shape[1])
    weights = np.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ pixels.reshape(-1, 3))
    return Projection(pipe, weights.astype(np.float32), float(grid.std()))


def _grid(pipe: Any, latents: Any, height: int, width: int) -> NDArray[np.float32] | None:
    """Return the first latents as (rows, columns, channels); None where their layout is not known."""
    if latents.dim() == 3 and hasattr(pipe, "_unpack_latents") and height and width:
        latents = pipe._unpack_latents(latents, height, width, pipe.vae_scale_factor)
    if latents.dim() != 4:
        return None
    grid: NDArray[np.float32] = latents[0].permute(1, 2, 0).float().cpu().numpy()
    return grid


def _with_offset(grid: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.concatenate([grid, np.ones((*grid.shape[:2], 1), np.float32)], axis=2)
