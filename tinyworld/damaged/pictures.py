"""What is damaged."""

import numpy as np
from numpy.typing import NDArray

Pictures = NDArray[np.uint8]


def as_bytes(pictures: NDArray[np.floating]) -> Pictures:
    return np.round(pictures).clip(0, 255).astype(np.uint8)
