"""Where a pipeline comes from."""

from __future__ import annotations

from typing import Literal

from vivace.spec.base import Spec


class Model(Spec):
    """A catalogue entry, a local folder in diffusers' format, or an architecture with random weights.

    `revision` fingerprints the weights, so that two rows of one name but of different weights never merge.
    """

    name: str
    source: Literal["embedded", "folder", "synthetic"]
    revision: str

    @property
    def is_synthetic(self) -> bool:
        """Random weights at a published architecture: times and memory are meant, pictures show nothing."""
        return self.source == "synthetic"
