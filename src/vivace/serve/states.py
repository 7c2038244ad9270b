"""A worker's report on its model, parsed for the server."""

from __future__ import annotations

from typing import Any

from vivace.foundation.spec.sizes import Size
from vivace.serve.settings import Batching, EditState, ModelState, StepTimes

_PLAIN = (
    "name",
    "recipe",
    "device",
    "steps",
    "guidance",
    "multiple",
    "guided_above",
    "has_partials",
    "draws_text",
)


def state_of(fields: dict[str, Any]) -> ModelState:
    """Return the state of a loaded model from its event."""
    edits = fields["edits"]
    return ModelState(
        **{name: fields[name] for name in _PLAIN},
        size=Size(*fields["size"]),
        takes=frozenset(fields["takes"]),
        speeds={
            Size(width, height): StepTimes(step_s, rest_s)
            for width, height, step_s, rest_s in fields["speeds"]
        },
        notes=tuple(fields["notes"]),
        edits=EditState(**edits | {"tasks": frozenset(edits["tasks"]), "takes": frozenset(edits["takes"])}),
        batching={
            Size(each["width"], each["height"]): Batching(
                {int(number): gain for number, gain in each["gains"].items()},
                tuple(each["allowed"]),
                each["difference"],
            )
            for each in fields["batching"]
        },
        unfit_loras=fields["unfit_loras"],
    )
