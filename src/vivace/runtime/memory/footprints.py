"""Memory and operations of the catalogue's published models, predicted once and shipped.

`python -m benchmarks.footprints` writes the file. With it `vivace recommend` knows what fits a GPU without building a
model.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field

from vivace.foundation.spec.base import Spec
from vivace.runtime.memory.predict import ComponentBytes, Prediction

FILE = Path(__file__).with_name("footprints.json")
Scheme = Literal["int8", "nf4"]


class Quantised(Spec):
    """A network with its Linear layers quantised.

    Attributes:
        share: of its bytes that are left; embeddings, convolutions and norms stay.
        beside_bytes: what it needs more than before while it computes: the dequantised weights of a layer.
        loading_bytes: what quantising it needs beside all weights: its largest layer.
    """

    share: float
    beside_bytes: int
    loading_bytes: int


class Footprints(Spec):
    """Predictions of the catalogue's models, each at its own size, and of their networks quantised, by `network`."""

    models: dict[str, Prediction] = Field(default_factory=dict)
    quantised: dict[str, dict[Scheme, Quantised]] = Field(default_factory=dict)


@cache
def shipped() -> Footprints:
    """Return the predictions that ship with vivace."""
    return Footprints.model_validate_json(FILE.read_bytes())


def footprints() -> dict[str, Prediction]:
    """Return the predictions of the models of the catalogue, by name."""
    return shipped().models


def network(part: ComponentBytes) -> str:
    """Return the identity of a network: its class and its number of parameters."""
    return f"{part.class_name} {part.num_parameters}"
