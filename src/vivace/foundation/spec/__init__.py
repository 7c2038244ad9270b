"""The data that vivace stores and passes between processes. Frozen, with a JSON round trip; imports no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vivace.foundation.spec.environment import Environment
    from vivace.foundation.spec.figures import FiguresKey, ImageFigures, NoiseFloor, QualityPass
    from vivace.foundation.spec.recipe_syntax import RecipeSpec, TechniqueCall, parse_recipe
    from vivace.foundation.spec.record import ImageRecord, Memory, Outcome, Record, Round, Sample
    from vivace.foundation.spec.trial import Model, Trial
    from vivace.foundation.spec.workload import Workload

__all__ = [
    "Environment",
    "FiguresKey",
    "ImageFigures",
    "ImageRecord",
    "Memory",
    "Model",
    "NoiseFloor",
    "Outcome",
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
_MODULES = {
    "Environment": "environment",
    "FiguresKey": "figures",
    "ImageFigures": "figures",
    "ImageRecord": "record",
    "Memory": "record",
    "Model": "trial",
    "NoiseFloor": "figures",
    "Outcome": "record",
    "QualityPass": "figures",
    "RecipeSpec": "recipe_syntax",
    "Record": "record",
    "Round": "record",
    "Sample": "record",
    "TechniqueCall": "recipe_syntax",
    "Trial": "trial",
    "Workload": "workload",
    "parse_recipe": "recipe_syntax",
}


def __getattr__(name: str) -> Any:
    """Import a name at its first use: pydantic prepares every class, which the command line's help does not need."""
    if name not in _MODULES:
        raise AttributeError(f"module 'vivace.foundation.spec' has no attribute {name!r}")
    return getattr(importlib.import_module(f"vivace.foundation.spec.{_MODULES[name]}"), name)
