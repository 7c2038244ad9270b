"""The seven nouns, as frozen data with a JSON round trip. Nothing here imports torch."""

from vivace.spec.environment import Environment
from vivace.spec.figures import PictureFigures
from vivace.spec.model import Model
from vivace.spec.recipe import Recipe, TechniqueCall, parse_recipe
from vivace.spec.record import Memory, Outcome, Picture, Record, Round, Sample
from vivace.spec.technique import (
    COMPONENTS,
    CallContext,
    Component,
    Effect,
    Machine,
    Stage,
    Target,
    Technique,
    knob,
)
from vivace.spec.trial import Trial
from vivace.spec.workload import Workload

__all__ = [
    "COMPONENTS",
    "CallContext",
    "Component",
    "Effect",
    "Environment",
    "Machine",
    "Memory",
    "Model",
    "Outcome",
    "Picture",
    "PictureFigures",
    "Recipe",
    "Record",
    "Round",
    "Sample",
    "Stage",
    "Target",
    "Technique",
    "TechniqueCall",
    "Trial",
    "Workload",
    "knob",
    "parse_recipe",
]
