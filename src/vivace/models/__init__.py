"""Models: the catalogue, finding a model by name or path, loading its pipeline, and CLIP models for scoring."""

from vivace.architectures import ARCHITECTURES, CATALOGUE
from vivace.architectures.components import Architecture
from vivace.architectures.entry import Embedded, Entry, Hub
from vivace.models.find import LocatedModel, find_model, obtain
from vivace.models.load import load_pipeline, load_tiny_vae
from vivace.models.scorers import LocatedScorer, find_scorer

__all__ = [
    "ARCHITECTURES",
    "CATALOGUE",
    "Architecture",
    "Embedded",
    "Entry",
    "Hub",
    "LocatedModel",
    "LocatedScorer",
    "find_model",
    "find_scorer",
    "load_pipeline",
    "load_tiny_vae",
    "obtain",
]
