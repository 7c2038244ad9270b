"""A saved model: the `vivace.json` of a folder that `vivace save` wrote."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, JsonValue

from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.recipe_syntax import RecipeSpec
from vivace.foundation.spec.trial import Model

FORMAT = 2
"""Version of the folder's format. A later one is refused, an earlier one read."""


class SavedTechnique(Spec):
    """A technique's effect on the weights in the folder; see `vivace.machinery.technique.Effect`.

    Attributes:
        text: the technique in recipe notation.
        defaults: of the call, that it sets.
    """

    text: str
    changed: dict[str, int | float | str] = Field(default={})
    notes: tuple[str, ...] = ()
    defaults: dict[str, JsonValue] = Field(default={})
    evidence: dict[str, int | float | str | list[str]] = Field(default={})


class CallDefaults(Spec):
    """Defaults of the pipeline's call, as the source has them."""

    height: int = Field(ge=8, le=80_000)
    width: int = Field(ge=8, le=80_000)
    num_inference_steps: int = Field(ge=1, le=1000)
    guidance_scale: float = Field(ge=0, le=100)


class SavedModel(Spec):
    """The content of `vivace.json` in a saved folder.

    Attributes:
        model: what was saved; of a folder or file its last name alone.
        entry: the catalogue's entry that says how the model is run; None if it has none.
        defaults, call: of the pipeline's call, without the recipe.
        is_small: whether the source's weights are of the size of the models that ship with vivace.
        recipe: the whole recipe.
        stored: the techniques whose result the weights are; the others are applied when the folder is loaded.
        sources: the sha256 of each file that was read, by name.
        files: the digest of each file of the folder, by name: its sha256; since format 2 by pieces, see
            `vivace.models.saved_folder.digests`.
    """

    format: Literal[1, 2]
    environment: Environment
    model: Model
    entry: str | None
    defaults: CallDefaults
    call: dict[str, JsonValue]
    is_small: bool
    recipe: RecipeSpec
    stored: tuple[SavedTechnique, ...]
    sources: dict[str, str]
    files: dict[str, str]
