"""Similar models: of the same architecture, or of the kind of an embedded model, whose images are judged."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures import ARCHITECTURES, CATALOGUE, family_of_pipeline
from vivace.architectures.entry import Embedded
from vivace.errors import UnknownModel, Unsupported, UnusableModel, nearest
from vivace.evidence.tables import EvidenceTable
from vivace.foundation.untrusted.files import read_object, reading
from vivace.models.checkpoints.gguf_file import SUFFIX
from vivace.models.checkpoints.single_file import contents_of
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.models.repository import INDEX
from vivace.runtime.memory.predict import Prediction
from vivace.runtime.memory.remembered import footprints

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
        alike: the catalogue's model whose architecture a file or a folder has; "" for models of the catalogue.
        is_gguf: its denoiser's layers are dequantised in each call, which records of plain weights say nothing about.
    """

    name: str
    pipeline: str = ""
    steps: int | None = None
    is_embedded: bool = False
    alike: str = ""
    is_gguf: bool = False

    @property
    def architecture(self) -> str:
        """The name of the architecture in the catalogue."""
        return self.alike or self.name

    @property
    def published(self) -> Prediction | None:
        """The memory and operations of the model without a recipe; None if unknown."""
        if self.is_embedded or self.is_gguf:
            return None
        known = footprints().get(self.architecture)
        return known if known is None or not self.alike else known.model_copy(update={"model": self.name})

    def adopt(self, table: EvidenceTable) -> EvidenceTable:
        """Return a table of the catalogue's model with this architecture as one of this model; others as they are."""
        if not self.alike or self.is_gguf or table.model != self.alike or table.kind == "own":
            return table
        return table.model_copy(update={"model": self.name, "of": self.alike, "random_weights": True})

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
        own, of_small = family_of_pipeline(self.pipeline), family_of_pipeline(small.pipeline)
        return (
            few and own is not None and of_small is not None and own.is_transformer == of_small.is_transformer
        )


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
    path = Path(model.strip())
    if path.suffix in (".safetensors", SUFFIX) and os.path.isfile(path):
        # Not located: its configuration may lie on the hub, and is that of the catalogue's model.
        contents = contents_of(path, is_configured=(path.parent / INDEX).is_file(), is_loaded=False)
        of = CATALOGUE.get(contents.entry)
        if of is not None:
            is_gguf = path.suffix == SUFFIX
            return Kin(
                str(path.resolve()), of.pipeline, of.num_inference_steps, alike=of.name, is_gguf=is_gguf
            )
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
    steps = located.defaults.get("num_inference_steps")
    alike = "" if located.is_small else _architecture_of(located)
    return Kin(located.model.name, located.pipeline, steps, located.is_small, alike)


def _architecture_of(located: LocatedModel) -> str:
    """Return the first model of the catalogue with a folder's pipeline and denoiser; "" if there is none."""
    for name, architecture in ARCHITECTURES.items():
        path = located.files.get(f"{architecture.denoiser}/config.json")
        if architecture.pipeline == located.pipeline and path is not None and located.saved is None:
            wanted = architecture.components[architecture.denoiser].config
            with reading(path):
                own = read_object(path)
            if all(own.get(key) == value for key, value in wanted.items()):
                return name
    return ""


def _is_path(name: str) -> bool:
    return name.startswith((".", "/", "~")) or name.endswith((".safetensors", ".gguf"))
