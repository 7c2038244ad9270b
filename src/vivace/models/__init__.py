"""Models: the catalogue, finding one by name or folder, and loading its pipeline."""

from vivace.models.catalogue import CATALOGUE, Entry
from vivace.models.find import Found, find_model
from vivace.models.load import load_pipeline, load_tiny_vae

__all__ = ["CATALOGUE", "Entry", "Found", "find_model", "load_pipeline", "load_tiny_vae"]
