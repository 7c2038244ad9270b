"""Similar models: of the same architecture, or of the kind of an embedded model, whose images are judged."""

from __future__ import annotations

from dataclasses import dataclass

from vivace.errors import UnknownModel, Unsupported, UnusableModel, nearest
from vivace.machinery.families import family_of_pipeline
from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Embedded
from vivace.models.find import SYNTHETIC, find_model

FEW = 8
"""Most steps of a distilled model: skipping steps helps it as little as another model of few steps."""


@dataclass(frozen=True)
class Kin:
    """A model, with the models whose records apply to it.

    Attributes:
        name: without "synthetic:".
        pipeline: the class in diffusers; "" if unknown.
        steps: its usual number of steps; None if unknown.
        is_embedded: whether it is one of the small models that ship with vivace, or as small: full models' times say
            nothing about it.
    """

    name: str
    pipeline: str = ""
    steps: int | None = None
    is_embedded: bool = False

    def is_family(self, other: Kin) -> bool:
        """Whether both have the same architecture at full size."""
        return (
            self.name != other.name
            and bool(self.pipeline)
            and self.pipeline == other.pipeline
            and not self.is_embedded
            and not other.is_embedded
        )

    def is_kind_of(self, small: Kin) -> bool:
        """Whether an embedded model is of this model's kind: a UNet or a transformer, of many steps or few."""
        if not small.is_embedded or self.is_embedded or self.steps is None or small.steps is None:
            return False
        few = (self.steps < FEW) == (small.steps < FEW)
        return few and _is_transformer(self.pipeline) == _is_transformer(small.pipeline)


def _is_transformer(pipeline: str) -> bool:
    family = family_of_pipeline(pipeline)
    return family.is_transformer if family is not None else "Flux" in pipeline


def kin_of(model: str, recorded: frozenset[str] = frozenset()) -> Kin:
    """Return the kin of a model by its name, without downloading anything.

    Args:
        recorded: models that have records; they need not be found.

    Raises:
        UnknownModel: there is neither such a model nor a record of one.
        UnusableModel: it is not a text-to-image pipeline.
    """
    name = model.strip().removeprefix(SYNTHETIC)
    entry = CATALOGUE.get(name.lower())
    if entry is not None:
        is_embedded = isinstance(entry.origin, Embedded)
        return Kin(entry.name, entry.pipeline, entry.num_inference_steps, is_embedded)
    try:
        located = find_model(model, download=False)
    except (UnknownModel, Unsupported, UnusableModel):
        if name in recorded:
            return Kin(name)
        if "/" in name and not name.startswith((".", "/", "~")):
            return Kin(name)  # on the hub, and not downloaded: its architecture is unknown
        if _is_path(name):
            raise
        raise UnknownModel(
            f"no model '{name[:200]}'{nearest(name, CATALOGUE)} (in the catalogue: {', '.join(CATALOGUE)}; or give "
            "org/repo, a folder or a file)"
        ) from None
    if located.same_as is not None and located.model.name not in recorded:
        return kin_of(located.same_as)  # its records are of the same weights
    return Kin(
        located.model.name, located.pipeline, located.defaults.get("num_inference_steps"), located.is_small
    )


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".safetensors", ".gguf"))
