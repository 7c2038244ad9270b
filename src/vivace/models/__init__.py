"""Models: the catalogue, finding a model by name or path, loading its pipeline, and CLIP models for scoring."""

from vivace.models.architectures import ARCHITECTURES, Architecture
from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Embedded, Entry, Hub
from vivace.models.find import Found, find_model, obtain
from vivace.models.load import load_pipeline, load_tiny_vae
from vivace.models.scorers import FoundScorer, find_scorer

__all__ = [
    "ARCHITECTURES",
    "CATALOGUE",
    "Architecture",
    "Embedded",
    "Entry",
    "Found",
    "FoundScorer",
    "Hub",
    "find_model",
    "find_scorer",
    "load_pipeline",
    "load_tiny_vae",
    "obtain",
]
