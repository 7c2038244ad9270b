"""The seven nouns, as frozen data with a JSON round trip. Nothing here imports torch."""

from vivace.spec.environment import Environment
from vivace.spec.figures import FiguresKey, NoiseFloor, PictureFigures, QualityPass
from vivace.spec.model import Model
from vivace.spec.recipe import Recipe, TechniqueCall, parse_recipe
from vivace.spec.record import Memory, Outcome, Picture, Record, Round, Sample
from vivace.spec.script import Script
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
    "FiguresKey",
    "Machine",
    "Memory",
    "Model",
    "NoiseFloor",
    "Outcome",
    "Picture",
    "PictureFigures",
    "QualityPass",
    "Recipe",
    "Record",
    "Round",
    "Sample",
    "Script",
    "Stage",
    "Target",
    "Technique",
    "TechniqueCall",
    "Trial",
    "Workload",
    "knob",
    "parse_recipe",
]
