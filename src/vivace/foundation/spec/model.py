"""The identity of a model."""

from __future__ import annotations

from typing import Literal

from vivace.foundation.spec.base import Spec


class Model(Spec):
    """A model: where it comes from, and which weights it has.

    Attributes:
        source: embedded in vivace, a repository of the Hugging Face hub, a folder, a single file, or a published
            architecture with random weights ("synthetic").
        revision: identifies the weights, so that rows of different weights under one name never merge: the commits of
            the repositories that they come from, or a fingerprint of local files.
    """

    name: str
    source: Literal["embedded", "hub", "folder", "file", "synthetic"]
    revision: str

    @property
    def is_synthetic(self) -> bool:
        """Whether the weights are random: time and memory are those of the architecture, images have no content."""
        return self.source == "synthetic"
