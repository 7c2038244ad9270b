"""The time that a model's denoising steps take at least on a GPU, from counts and data sheets."""

from __future__ import annotations

from vivace.hardware import known_gpu
from vivace.lint.limits import flops_of
from vivace.models.catalogue import CATALOGUE
from vivace.spec.base import Spec


class ChipLimit(Spec):
    """The least seconds of an image at a model's own size, if every step is computed.

    Attributes:
        gpu: as the data sheet calls it.
        steps: the model's own number.
        step_flop: of one step, guidance included.
        half_s, eight_s: with all matmuls in 16 bits, and in 8.
    """

    gpu: str
    steps: int
    step_flop: int
    half_s: float
    eight_s: float


def chip_limit(model: str, gpu: str | None) -> ChipLimit | None:
    """Return the limit of a model of the catalogue; None if its count, or the GPU's data sheet, is not known."""
    entry = CATALOGUE.get(model)
    found, named = None if entry is None else flops_of(model), None if gpu is None else known_gpu(gpu)
    if entry is None or found is None or named is None or found.pixels != entry.height * entry.width:
        return None
    chip = named.chip
    tera = entry.num_inference_steps * found.step / 1e12
    return ChipLimit(
        gpu=chip.name,
        steps=entry.num_inference_steps,
        step_flop=found.step,
        half_s=tera / chip.half,
        eight_s=tera / chip.eight,
    )
