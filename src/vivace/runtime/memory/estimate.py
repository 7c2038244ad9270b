"""Estimate the memory of recipes that save memory, from the prediction of the published model.

`vivace.runtime.memory.predict` runs a recipe on a pipeline without weights, which takes seconds. Which of a dozen
recipes fit a card follows, to a few percent, from one such prediction: the bytes of each component by its precision,
where each stage of a call keeps them, and what a stage needs beside them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vivace.machinery.technique import DENOISERS, TEXT_ENCODERS
from vivace.runtime.memory.footprints import Quantised, network, shipped
from vivace.runtime.memory.predict import ComponentBytes, Prediction

Scheme = Literal["int8", "fp8", "nf4"]
Offloading = Literal["model", "group"]
_UNKNOWN: dict[Scheme, tuple[float, float]] = {"int8": (0.6, 0.03), "fp8": (0.6, 0.03), "nf4": (0.4, 0.05)}
"""For a network that the catalogue lacks: its quantised bytes, and its further needs while it computes, as shares of
its original bytes. Most networks need less."""
_LARGEST_LAYER = 0.03
"""Bytes of a network's largest layer, as a share of all, and at least those of an embedding."""
_EMBEDDING_BYTES = 3e8
_MARGIN = 1.01
_FP8_BESIDE = 0.02
"""Extra memory of a denoiser's layers in fp8 over int8, as a share of its bytes: their quantised inputs."""
_STAGES = {"denoiser": "denoiser", "vae": "vae", "vae encoder": "vae", "text encoders": "text"}


@dataclass(frozen=True)
class Saving:
    """A recipe that saves memory, in its parts.

    Attributes:
        recipe: canonical.
        denoiser, encoder: how the denoiser and the largest text encoder are quantised.
        offloading: where weights are kept while they are not needed.
        vae_share: of the VAE's activations that are left.
    """

    recipe: str
    denoiser: Scheme | None = None
    encoder: Scheme | None = None
    offloading: Offloading | None = None
    vae_share: float = 1.0


@dataclass(frozen=True)
class Need:
    """Estimated bytes on a GPU, as in a `Prediction`.

    Attributes:
        held_bytes: of all weights, wherever they are kept.
        denoiser_bytes: of the denoiser's weights.
    """

    peak_bytes: int
    loading_bytes: int
    held_bytes: int
    denoiser_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Bytes that must be free on the GPU."""
        return max(self.peak_bytes, self.loading_bytes)


def largest_encoder(prediction: Prediction) -> str | None:
    """Return the name of the text encoder with the most bytes: T5, or a language model; None if there is none."""
    encoders = [part for part in prediction.components if part.name in TEXT_ENCODERS]
    return max(encoders, key=lambda part: part.num_bytes).name if encoders else None


def need_of(saving: Saving, published: Prediction) -> Need:
    """Return the memory that a recipe needs.

    Args:
        published: the prediction of the model without a recipe, at the same size.
    """
    encoder = largest_encoder(published)
    held: dict[str, float] = {"denoiser": 0.0, "vae": 0.0, "text": 0.0, "other": 0.0}
    largest_text = 0.0
    beside_of = {"denoiser": 0.0, "text": 0.0}
    loading_beside = 0.0
    for part in published.components:
        kind, scheme = _kind(part), None
        if kind == "denoiser":
            scheme = saving.denoiser
        elif part.name == encoder:
            scheme = saving.encoder
        num_bytes = float(part.num_bytes)
        if scheme is not None:
            after = _quantised(part, scheme)
            num_bytes *= after.share
            more = _FP8_BESIDE * part.num_bytes if scheme == "fp8" else 0.0
            beside_of[kind] = max(beside_of[kind], after.beside_bytes + more)
            loading_beside = max(loading_beside, after.loading_bytes)
        held[kind] += num_bytes
        largest_text = max(largest_text, num_bytes if kind == "text" else 0.0)
    everything = sum(held.values())
    resident = {
        None: dict.fromkeys(held, everything),
        "model": held | {"text": largest_text},
        "group": {kind: min(num_bytes, _layer(num_bytes)) for kind, num_bytes in held.items()}
        | {"vae": held["vae"]},
    }[saving.offloading]
    peaks = [resident["denoiser"] if saving.offloading == "model" else 0.0]
    for stage, peak in published.stages.items():
        kind = _STAGES.get(stage, "other")
        beside = max(0.0, peak - published.model_bytes)
        if kind == "vae":
            beside *= saving.vae_share
        elif kind in ("denoiser", "text"):
            beside += beside_of[kind]
        peaks.append(resident[kind] + beside)
    is_changed = saving.denoiser is not None or saving.encoder is not None or saving.offloading is not None
    margin = _MARGIN if is_changed else 1.0
    loading = everything if saving.offloading is None else 0.0
    if is_changed:  # layer by layer, from host memory
        loading += max(loading_beside, _layer(max(part.num_bytes for part in published.components)))
    return Need(
        peak_bytes=round(margin * max(peaks)),
        loading_bytes=round(margin * loading),
        held_bytes=round(everything),
        denoiser_bytes=round(held["denoiser"]),
    )


def _quantised(part: ComponentBytes, scheme: Scheme) -> Quantised:
    """Return a network with its Linear layers quantised. fp8 takes as much as int8."""
    by_scheme = shipped().quantised.get(network(part))
    if by_scheme is not None:
        return by_scheme["int8" if scheme == "fp8" else scheme]
    share, beside = _UNKNOWN[scheme]
    layer = round(_layer(part.num_bytes))
    return Quantised(share=share, beside_bytes=round(beside * part.num_bytes), loading_bytes=layer)


def _kind(part: ComponentBytes) -> str:
    if part.name in DENOISERS:
        return "denoiser"
    return "vae" if part.name == "vae" else "text" if part.name in TEXT_ENCODERS else "other"


def _layer(num_bytes: float) -> float:
    return max(_LARGEST_LAYER * num_bytes, min(_EMBEDDING_BYTES, num_bytes))
