"""The pixels of a call's images, copied from the GPU and converted while the next call runs.

A pipeline that is asked for PIL images waits for the GPU, copies and converts, and the GPU has nothing to do meanwhile.
Asked for tensors, it returns once its work is queued. The bytes are the same, rounded as diffusers rounds them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vivace.runtime.calls import accepted_by
from vivace.runtime.finite_images import FiniteCheck

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Pixels:
    """Images as bytes.

    Attributes:
        images: a tensor of bytes (images, rows, columns, colours) in the CPU's memory, a tensor of colours from 0 to 1
            (images, colours, rows, columns), or images of PIL.
        copied: an event of the GPU, after which the bytes are there; None if they are.
        is_finite: a truth value on the host, there after `copied`; None if that is known already.
    """

    images: Any
    copied: Any = None
    is_finite: Any = None

    @classmethod
    def of(cls, images: Any, check: FiniteCheck) -> Pixels:
        """Begin to copy what a pipeline returned; return at once.

        Args:
            check: of the call.
        """
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
        """Wait until the bytes are there; return each image as (rows, columns, 3), without gaps.

        Raises:
            NotFinite: the call computed NaN or infinity.
        """
        import numpy as np
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
    import numpy as np
    from PIL import Image

    if array.shape[2] == 3:
        return array
    return np.asarray(Image.fromarray(array.squeeze()).convert("RGB"))


def returns_tensors(pipe: Any, device: str) -> bool:
    """Return whether a pipeline returns tensors on request, which diffusers' own processor would make into images."""
    return device in _DEVICES and hasattr(pipe, "image_processor") and "output_type" in accepted_by(pipe)
