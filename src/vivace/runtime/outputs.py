"""The return type of a session, for type checkers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from PIL.Image import Image


class PipelineOutput(Protocol):
    """The return value of a diffusers pipeline.

    Attributes:
        images: one for each prompt; with another `output_type` than "pil" an array, a tensor or latents.
    """

    images: list[Image]
