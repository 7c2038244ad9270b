"""Model x Recipe x Workload: the unit of isolation."""

from __future__ import annotations

from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.spec.model import Model
from vivace.spec.recipe import RecipeSpec
from vivace.spec.workload import Workload


class Trial(Spec):
    model: Model
    recipe: RecipeSpec
    workload: Workload
    device: str

    def key(self, environment: Environment) -> str:
        """Identity of this trial's row: the trial, the environment and vivace's version (part of it)."""
        return Keyed(trial=self, environment=environment).digest()


class Keyed(Spec):
    trial: Trial
    environment: Environment
