"""Families of models: what vivace knows about an architecture, as data, one file each."""

from vivace.architectures.cogview4 import COGVIEW4
from vivace.architectures.family import Blocks, Doubled, Family
from vivace.architectures.flux import FLUX
from vivace.architectures.flux2 import FLUX2
from vivace.architectures.krea2 import KREA2
from vivace.architectures.qwen_image import QWEN_IMAGE
from vivace.architectures.qwen_image21 import QWEN_IMAGE21
from vivace.architectures.sana import SANA
from vivace.architectures.sd3 import SD3
from vivace.architectures.stable_diffusion import STABLE_DIFFUSION
from vivace.architectures.z_image import Z_IMAGE

__all__ = ["FAMILIES", "Blocks", "Doubled", "Family", "family_of", "family_of_pipeline"]

FAMILIES: tuple[Family, ...] = (
    STABLE_DIFFUSION,
    FLUX,
    SD3,
    SANA,
    Z_IMAGE,
    QWEN_IMAGE,
    QWEN_IMAGE21,
    FLUX2,
    COGVIEW4,
    KREA2,
)


def family_of(denoiser: object) -> Family | None:
    """Return the family of a denoiser, or None if it is of another architecture."""
    kind = type(denoiser).__name__
    return next((family for family in FAMILIES if family.denoiser == kind), None)


def family_of_pipeline(class_name: str) -> Family | None:
    """Return the family that a pipeline's class is of, or None."""
    return next((family for family in FAMILIES if class_name in family.pipelines), None)
