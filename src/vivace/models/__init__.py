"""Models: the catalogue, finding one wherever it is, loading its pipeline; the CLIP models that score pictures."""

from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Embedded, Entry, Hub
from vivace.models.find import Found, find_model, obtain
from vivace.models.load import load_pipeline, load_tiny_vae
from vivace.models.scorers import FoundScorer, find_scorer

__all__ = [
    "CATALOGUE",
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
