"""Operations of models, as counted by this project, and the precision that labels of rows name."""

from __future__ import annotations

import re

from vivace.architectures import FAMILIES
from vivace.architectures.family import PublishedModel
from vivace.architectures.others import OTHER_NAMES
from vivace.foundation.hardware import Chip
from vivace.foundation.spec.ceilings import Work

SKIPS_WORK = re.compile(
    r"cache|cutoff|steps?\(|steps:|skip|prune|token_?merg|tome|taylor|pyramid|guidance|distill|lcm|turbo|lightning|hyper"
    r"|parallel|tiny-",
    re.IGNORECASE,
)
"""Recipes and models that compute less than steps times a full step, or on several GPUs."""
FULL_PRECISION = re.compile(r"\b(?:fp16|bf16|float16|bfloat16|fp32|tf32|baseline|base)\b", re.IGNORECASE)
FOUR_BITS = re.compile(r"fp4|int4|nf4|svdq|w4a4|\b4[ -]?bit", re.IGNORECASE)
EIGHT_BITS = re.compile(r"fp8|float8|int8|fp4|int4|nf4|nvfp4|quant", re.IGNORECASE)


def flops_of(name: str) -> PublishedModel | None:
    """Return the model whose operations are counted, by one of its names."""
    counted = (model for family in FAMILIES for model in family.models if model.labels)
    return next((model for model in counted if re.search(model.labels, name.strip(), re.IGNORECASE)), None)


def names_model(text: str) -> bool:
    """Return whether a text has a model's name, one that is counted or another."""
    words = "|".join(re.sub(r"[ -]", "[ _-]?", family.name.rstrip("0123456789. ")) for family in FAMILIES)
    return bool(re.search(f"{words}|{OTHER_NAMES}", text, re.IGNORECASE))


def model_in(text: str) -> str:
    """Return the counted model that a heading names; "" for none, for several, and for one that skips work."""
    words = text.replace("`", " ").replace(",", " ").replace(":", " ").split()
    parts = [" ".join(words[start : start + length]) for length in (3, 2, 1) for start in range(len(words))]
    found = {model.title: part for part in reversed(parts) if (model := flops_of(part)) is not None}
    return "" if len(found) != 1 or SKIPS_WORK.search(text) else next(iter(found))


def least_seconds(work: Work, chip: Chip) -> float:
    """Return the shortest seconds of a call by a GPU's data sheet.

    Matmuls and convolutions in 4 and 8 bits run at the rates of these, all others at that of 16, which fp32 and TF32 do
    not reach either.
    """
    rates = {"fp8": chip.eight, "int8": chip.eight, "mxfp8": chip.eight, "nvfp4": chip.four}
    seconds = 0.0
    for part in work.components:
        kinds = (
            (part.gemm_flop, part.gemm),
            (part.conv_flop, part.conv),
            (part.attention_flop, part.attention),
        )
        for flop, precision in kinds:
            seconds += flop / 1e12 / rates.get(precision, chip.half)
    return seconds
