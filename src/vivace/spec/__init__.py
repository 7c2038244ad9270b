"""The data that vivace stores and passes between processes. Frozen, with a JSON round trip; imports no torch."""

from vivace.spec.environment import Environment
from vivace.spec.figures import FiguresKey, NoiseFloor, PictureFigures, QualityPass
from vivace.spec.model import Model
from vivace.spec.recipe import RecipeSpec, TechniqueCall, parse_recipe
from vivace.spec.record import Memory, Outcome, Picture, Record, Round, Sample
from vivace.spec.trial import Trial
from vivace.spec.workload import Workload

__all__ = [
    "Environment",
    "FiguresKey",
    "Memory",
    "Model",
    "NoiseFloor",
    "Outcome",
    "Picture",
    "PictureFigures",
    "QualityPass",
    "RecipeSpec",
    "Record",
    "Round",
    "Sample",
    "TechniqueCall",
    "Trial",
    "Workload",
    "parse_recipe",
]
