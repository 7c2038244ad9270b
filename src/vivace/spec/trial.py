"""A trial: model x recipe x workload."""

from __future__ import annotations

from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.spec.model import Model
from vivace.spec.recipe import RecipeSpec
from vivace.spec.workload import Workload


class Trial(Spec):
    """What is measured in isolated processes: a recipe on a model with a workload, on "cpu" or "cuda"."""

    model: Model
    recipe: RecipeSpec
    workload: Workload
    device: str

    def key(self, environment: Environment) -> str:
        """Return the digest of the trial and its environment, which includes vivace's version."""
        return Keyed(trial=self, environment=environment).digest()


class Keyed(Spec):
    """What a trial's key is the digest of."""

    trial: Trial
    environment: Environment
