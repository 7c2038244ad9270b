"""Where a pipeline comes from."""

from __future__ import annotations

from typing import Literal

from vivace.spec.base import Spec


class Model(Spec):
    """A catalogue entry, a repository of the Hugging Face hub, a folder, a single file, or an architecture with random
    weights.

    `revision` identifies the weights, so that two rows of one name but of different weights never merge: the commits of
    the repositories that they come from, or a fingerprint of local files.
    """

    name: str
    source: Literal["embedded", "hub", "folder", "file", "synthetic"]
    revision: str

    @property
    def is_synthetic(self) -> bool:
        """Random weights at a published architecture: times and memory are meant, pictures show nothing."""
        return self.source == "synthetic"
