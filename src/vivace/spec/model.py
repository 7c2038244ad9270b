"""Where a pipeline comes from."""

from __future__ import annotations

from typing import Literal

from vivace.spec.base import Spec


class Model(Spec):
    """A catalogue entry or a local folder in diffusers' format.

    `revision` fingerprints the weights, so that two rows of one name but of different weights never merge.
    """

    name: str
    source: Literal["embedded", "folder"]
    revision: str
