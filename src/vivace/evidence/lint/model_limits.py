"""Operations of models, as counted by this project, and the precision that labels of rows name."""

from __future__ import annotations

import re
from dataclasses import dataclass

from vivace.foundation.hardware import Chip
from vivace.foundation.spec.ceilings import Work


@dataclass(frozen=True)
class ModelFlops:
    """FLOP of one denoiser step for one image, guidance included, at the model's own size.

    From results/model-flops.json, counted on shapes (benchmarks/model_flops.py). Of models that edit, the source's
    tokens are in it.
    """

    name: str
    pattern: str
    step: int
    pixels: int


# Names that others contain come first.
MODEL_FLOPS = (
    ModelFlops("FLUX.2 [dev]", r"flux[ ._-]?2.*dev", 282_599_551_401_984, 1024 * 1024),
    ModelFlops("FLUX.2 [klein] 4B", r"klein.*4b", 34_820_178_051_072, 1024 * 1024),
    ModelFlops("FLUX.2 [klein] 9B", r"klein.*9b", 75_514_721_075_200, 1024 * 1024),
    ModelFlops("FLUX.1 Kontext [dev]", r"kontext", 165_458_361_188_352, 1024 * 1024),
    ModelFlops("Qwen-Image-Edit-2511", r"qwen[ _-]?image[ _-]?edit.*2511", 332_542_281_990_144, 1024 * 1024),
    ModelFlops("Qwen-Image-Edit-2509", r"qwen[ _-]?image[ _-]?edit.*2509", 332_528_651_550_720, 1024 * 1024),
    ModelFlops("Qwen-Image-Edit", r"qwen[ _-]?image[ _-]?edit(?!.*25\d\d)", 395_390_816_501_760, 1024 * 1024),
    ModelFlops("Qwen-Image-2512", r"qwen[ _-]?image[ _-]?2512", 136_353_835_204_608, 1024 * 1024),
    ModelFlops("Qwen-Image 2.1", r"qwen[ _-]?image[ _-]?2\.1(?!.*turbo)", 66_003_600_356_147, 1024 * 1024),
    ModelFlops("Qwen-Image", r"qwen[ _-]?image(?!.*(?:edit|layered|25\d\d|2\.1))", 136_353_835_204_608, 1024 * 1024),
    ModelFlops("CogView4", r"cogview[ _-]?4", 108_245_923_397_632, 1024 * 1024),
    ModelFlops("Krea 2 Turbo", r"krea[ _-]?2.*turbo", 128_987_188_690_944, 1024 * 1024),
    ModelFlops("Krea 2 Raw", r"krea[ _-]?2.*raw", 257_974_377_381_888, 1024 * 1024),
    ModelFlops("Z-Image-Turbo", r"z[ _-]?image[ _-]?turbo", 55_120_597_221_376, 1024 * 1024),
    ModelFlops("SD 3.5 Large", r"(?:sd|diffusion)[ -]?3\.?5[ -]?large(?!.*turbo)", 62_242_229_815_296, 1024 * 1024),
    ModelFlops("SD 3.5 Medium", r"(?:sd|diffusion)[ -]?3\.?5[ -]?medium", 22_499_147_415_552, 1024 * 1024),
    ModelFlops("Sana-Sprint 1.6B", r"sana[ _-]?sprint.*1\.?6", 2_966_672_343_040, 1024 * 1024),
    ModelFlops("Sana 1.6B", r"sana(?!.*sprint).*1\.?6", 5_933_322_321_920, 1024 * 1024),
    ModelFlops("FLUX.1 [schnell]", r"flux.*schnell", 69_466_626_981_888, 1024 * 1024),
    ModelFlops("FLUX.1 [dev]", r"flux.*dev", 74_384_653_418_496, 1024 * 1024),
    ModelFlops("SDXL", r"^(?:synthetic:)?(?:stabilityai/)?(?:stable[ -]diffusion[ -])?(?:sd[ -]?)?xl(?:[ -]base)?$",
               13_522_472_796_160, 1024 * 1024),
    ModelFlops("SD 1.5", r"\bsd[ -]?1\.?5\b|stable-diffusion-v1-5", 1_606_546_882_560, 512 * 512),
)  # fmt: skip
SKIPS_WORK = re.compile(
    r"cache|cutoff|steps?\(|steps:|skip|prune|token_?merg|tome|taylor|pyramid|guidance|distill|lcm|turbo|lightning|hyper"
    r"|parallel|tiny-",
    re.IGNORECASE,
)
"""Recipes and models that compute less than steps times a full step, or on several GPUs."""
_MODEL = re.compile(
    r"flux|\bsd(?![a-z])|xl\b|diffusion|qwen|sana|z[ _-]?image|pixart|hunyuan|lumina|kolors|klein|krea|cogview|chroma"
    r"|hidream|pony|playground|kandinsky|\bwan\b",
    re.IGNORECASE,
)
FULL_PRECISION = re.compile(r"\b(?:fp16|bf16|float16|bfloat16|fp32|tf32|baseline|base)\b", re.IGNORECASE)
FOUR_BITS = re.compile(r"fp4|int4|nf4|svdq|w4a4|\b4[ -]?bit", re.IGNORECASE)
EIGHT_BITS = re.compile(r"fp8|float8|int8|fp4|int4|nf4|nvfp4|quant", re.IGNORECASE)


def flops_of(model: str) -> ModelFlops | None:
    """Return the counted operations of a model."""
    return next(
        (
            model_flops
            for model_flops in MODEL_FLOPS
            if re.search(model_flops.pattern, model.strip(), re.IGNORECASE)
        ),
        None,
    )


def names_model(text: str) -> bool:
    """Return whether a text has a model's name, one that is counted or another."""
    return bool(_MODEL.search(text))


def model_in(text: str) -> str:
    """Return the counted model that a heading names; "" for none, for several, and for one that skips work."""
    words = text.replace("`", " ").replace(",", " ").replace(":", " ").split()
    parts = [" ".join(words[start : start + length]) for length in (3, 2, 1) for start in range(len(words))]
    found = {flops.name: part for part in reversed(parts) if (flops := flops_of(part)) is not None}
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
