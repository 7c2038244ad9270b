"""Models: the catalogue, finding one by name or folder, loading its pipeline; the CLIP models that score pictures."""

from vivace.models.catalogue import CATALOGUE, Entry
from vivace.models.find import Found, find_model
from vivace.models.load import load_pipeline, load_tiny_vae
from vivace.models.scorers import FoundScorer, find_scorer

__all__ = [
    "CATALOGUE",
    "Entry",
    "Found",
    "FoundScorer",
    "find_model",
    "find_scorer",
    "load_pipeline",
    "load_tiny_vae",
]
