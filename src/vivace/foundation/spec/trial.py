"""A trial: model x recipe x workload."""

from __future__ import annotations

from typing import Literal

from vivace.foundation.spec.base import SparseSpec, Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.recipe_syntax import RecipeSpec
from vivace.foundation.spec.workload import Workload


class Model(Spec):
    """A model: where it comes from, and which weights it has.

    Attributes:
        source: embedded in vivace, a repository of the Hugging Face hub, a folder, a single file, a published
            architecture with random weights ("synthetic"), or an object of the program that measured it.
        revision: identifies the weights, so that rows of different weights under one name never merge: the commits of
            the repositories that they come from, or a fingerprint of local files.
    """

    name: str
    source: Literal["embedded", "hub", "folder", "file", "synthetic", "object"]
    revision: str

    @property
    def identity(self) -> str:
        """NAME@REVISION."""
        return f"{self.name}@{self.revision}"

    @property
    def is_synthetic(self) -> bool:
        """Whether the weights are random: time and memory are those of the architecture, images have no content."""
        return self.source == "synthetic"


class Trial(SparseSpec):
    """A recipe on a model with a workload, on "cpu" or "cuda": the unit of isolated measurement.

    Attributes:
        repetition: 1 for the second trial of the same recipe in a comparison, and so on.
    """

    omits = ("repetition",)

    model: Model
    recipe: RecipeSpec
    workload: Workload
    device: str
    repetition: int = 0

    @property
    def title(self) -> str:
        """The recipe, numbered if it is compared with itself."""
        return f"{self.recipe.text} #{self.repetition + 1}" if self.repetition else self.recipe.text

    def key(self, environment: Environment) -> str:
        """Return the digest of the trial and its environment, which includes vivace's version."""
        return Keyed(trial=self, environment=environment).digest()


class Keyed(Spec):
    """The content whose digest is a trial's key."""

    trial: Trial
    environment: Environment
