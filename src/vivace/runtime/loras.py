"""Exchange the LoRAs of a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vivace.machinery.lora.hot import exchange
from vivace.runtime.taking_turns import turn

if TYPE_CHECKING:
    from vivace.runtime.session import Session


def set_lora(
    self: Session, path: str | None = None, *, scale: float | None = None, instead_of: str | None = None
) -> None:
    """Exchange or rescale a LoRA that the recipe loaded by `lora(PATH, hot=True)`, for the calls that follow.

    Nothing is compiled or captured anew: the matrices are replaced in place. If it raises, nothing has changed.

    Args:
        path: another LoRA, as in a recipe; None keeps the file. Unused parts of it are added to `warnings`.
        scale: its factor; None keeps the factor.
        instead_of: path or name of the LoRA to change, if there are several.

    Raises:
        UsageError: the recipe has no hot LoRA, or several and none is named.
        Unsupported: the file is not one for this pipeline, or its layers or ranks were not reserved.
        UnusableModel: the file is damaged, or not a LoRA.
    """
    with turn():  # not during a call
        notes = exchange(self.pipe, path, scale, instead_of)
    self.warnings += [f"lora: {path}: {note}" for note in notes]
