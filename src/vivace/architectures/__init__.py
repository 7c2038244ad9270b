"""Families of models: the one place for everything that vivace knows of an architecture, one file each.

A family file describes all models with one denoiser as plain data, and imports no torch. It reads, from top to bottom:

1. The docstring: what is special about its blocks, how it is guided, and the source.
2. The few functions that need code: a block's modulated input, the grid of the tokens, gains of random weights.
3. Its networks, `of_diffusers(CLASS, ...)`: arguments in which the published config.json differs from the class's.
   Those that several families share are in `components`.
4. Its published models: `Entry` says how each is run and where its files are, `Architecture` what it is made of. Both
   together are a `PublishedModel`.
5. `NAME = Family(...)`, which says the rest, field by field (see `family`), and leaves out what is as usual.

A new one is one more name in FAMILIES below. Everything else asks this package: what a denoiser's family is
(`family_of`), what is known of a pipeline (`pipeline_named`), which models there are (`CATALOGUE`, `ARCHITECTURES`).
What no family describes is asked of diffusers' own interfaces, and what they do not tell is said to be unknown. No
other code names a class of diffusers, but the fused forms in `vivace.machinery.fused`.
"""

from vivace.architectures.chroma import CHROMA
from vivace.architectures.cogview4 import COGVIEW4
from vivace.architectures.components import Architecture
from vivace.architectures.entry import Embedded, Entry
from vivace.architectures.ernie_image import ERNIE_IMAGE
from vivace.architectures.family import BatchDoubling, Blocks, Family, Pipeline
from vivace.architectures.flux import FLUX
from vivace.architectures.flux2 import FLUX2
from vivace.architectures.ideogram4 import IDEOGRAM4
from vivace.architectures.krea2 import KREA2
from vivace.architectures.longcat_image import LONGCAT_IMAGE
from vivace.architectures.ovis_image import OVIS_IMAGE
from vivace.architectures.qwen_image import QWEN_IMAGE
from vivace.architectures.qwen_image21 import QWEN_IMAGE21
from vivace.architectures.sana import SANA
from vivace.architectures.sd3 import SD3
from vivace.architectures.stable_diffusion import STABLE_DIFFUSION
from vivace.architectures.z_image import Z_IMAGE
from vivace.plugins import added

__all__ = [
    "ARCHITECTURES",
    "CATALOGUE",
    "FAMILIES",
    "BatchDoubling",
    "Blocks",
    "Family",
    "Pipeline",
    "family_of",
    "family_of_model",
    "family_of_pipeline",
    "pipeline_doing",
    "pipeline_named",
]

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
    LONGCAT_IMAGE,
    CHROMA,
    ERNIE_IMAGE,
    IDEOGRAM4,
    OVIS_IMAGE,
)

FAMILIES += tuple(added("architectures", Family, frozenset(family.name for family in FAMILIES)))


def family_of(denoiser: object) -> Family | None:
    """Return the family of a denoiser, or None if no family describes it."""
    return _BY_DENOISER.get(type(denoiser).__name__)


def family_of_pipeline(class_name: str) -> Family | None:
    return next((family for family in FAMILIES for each in family.pipelines if each.name == class_name), None)


def pipeline_named(class_name: str) -> Pipeline | None:
    return next((each for family in FAMILIES for each in family.pipelines if each.name == class_name), None)


def pipeline_doing(class_name: str) -> Pipeline | None:
    """Return the published pipeline that is of a class, or one of whose other tasks is; None if no family has it."""
    every = [each for family in FAMILIES for each in family.pipelines]
    return next((each for each in every if class_name in (each.name, *each.tasks.values())), None)


def family_of_model(name: str) -> Family | None:
    return next((family for family in FAMILIES for model in family.models if model.entry.name == name), None)


_BY_DENOISER = {family.denoiser: family for family in FAMILIES}
_MODELS = [model for family in FAMILIES for model in family.models]
CATALOGUE: dict[str, Entry] = {
    model.entry.name: model.entry
    for model in sorted(_MODELS, key=lambda model: not isinstance(model.entry.origin, Embedded))
}
"""How each published model is run, and where its weights come from; those that ship with vivace first.

Revisions are pinned where they are known, so that a name always means the same weights; of transformers after FLUX.1
they are not. Sizes, steps, guidance and schedulers come from the model cards, diffusers' documentation or, where these
give none, the model's publishers; where a card gives several, a comment says which one is used. Sizes of downloads are
computed from the number of parameters, in the precision in which the weights are published.
"""
ARCHITECTURES: dict[str, Architecture] = {
    model.entry.name: model.architecture for model in _MODELS if model.architecture is not None
}
"""The networks of each model that is published at full size, by its name in the catalogue."""
