"""What is known of a model without loading it: its architecture, the models whose records apply to it, its download."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures import ARCHITECTURES, CATALOGUE, family_of_pipeline
from vivace.architectures.entry import Embedded, Entry, Hub
from vivace.errors import UnknownModel, Unsupported, UnusableModel, VivaceError, nearest
from vivace.evidence.tables import EvidenceTable
from vivace.foundation.untrusted.files import read_object, reading
from vivace.machinery.technique import DENOISERS
from vivace.models.checkpoints.gguf_file import SUFFIX, read_gguf_header
from vivace.models.checkpoints.headers import read_header
from vivace.models.checkpoints.single_file import Contents, contents_of
from vivace.models.find import SYNTHETIC, LocatedModel, find_model
from vivace.models.repository import INDEX
from vivace.runtime.memory.predict import Prediction, with_gguf
from vivace.runtime.memory.remembered import footprints

FEW = 8
"""Most steps of a distilled model: skipping steps helps it as little as another model of few steps."""


@dataclass(frozen=True)
class Kin:
    """A model, with the models whose records apply to it.

    Attributes:
        is_embedded: whether it is one of the small models that ship with vivace, or as small: full models' times say
            nothing about it.
        alike: the catalogue's model whose architecture a file or a folder has; "" for models of the catalogue.
        gguf_bytes: of a GGUF file, whose layers are dequantised in each call: records of plain weights do not apply.
        is_fp8: whether its file has the denoiser in fp8.
    """

    name: str
    pipeline: str = ""
    steps: int | None = None
    is_embedded: bool = False
    alike: str = ""
    gguf_bytes: int | None = None
    is_fp8: bool = False

    @property
    def is_gguf(self) -> bool:
        return self.gguf_bytes is not None

    @property
    def architecture(self) -> str:
        """The name of the architecture in the catalogue."""
        return self.alike or self.name

    @property
    def published(self) -> Prediction | None:
        """The memory and operations of the model without a recipe; None if unknown."""
        known = None if self.is_embedded else footprints().get(self.architecture)
        if known is None or not self.alike:
            return known
        own = known.model_copy(update={"model": self.name})
        return own if self.gguf_bytes is None else with_gguf(own, self.gguf_bytes)

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
        own, of_small = family_of_pipeline(self.pipeline), family_of_pipeline(small.pipeline)
        is_alike = own is not None and of_small is not None and own.is_transformer == of_small.is_transformer
        return is_alike and (self.steps < FEW) == (small.steps < FEW)


def kin_of(model: str, recorded: frozenset[str] = frozenset()) -> Kin:
    """Return the kin of a model by its name, without downloading anything."""
    name = model.strip().removeprefix(SYNTHETIC)
    entry = CATALOGUE.get(name.lower())
    if entry is not None:
        is_embedded = isinstance(entry.origin, Embedded)
        return Kin(entry.name, entry.pipeline, entry.num_inference_steps, is_embedded)
    if (contents := _contents(model)) is not None and (of := CATALOGUE.get(contents.entry)) is not None:
        return _of_file(Path(model.strip()), contents, of)
    try:
        located = find_model(model, download=False)
    except (UnknownModel, Unsupported, UnusableModel):
        is_path = name.startswith((".", "/", "~")) or name.endswith((".safetensors", SUFFIX))
        if name in recorded or ("/" in name and not name.startswith((".", "/", "~"))):
            return Kin(name)  # of a repository that was not downloaded the architecture is unknown
        if is_path:
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


def _contents(model: str) -> Contents | None:
    """Return what a single file has, by its header; None if it is no such file.

    It is not located: its configuration may lie on the hub, and is that of the catalogue's model.
    """
    path = Path(model.strip())
    if path.suffix not in (".safetensors", SUFFIX) or not os.path.isfile(path):
        return None
    return contents_of(path, is_configured=(path.parent / INDEX).is_file(), is_loaded=False)


def _of_file(path: Path, contents: Contents, of: Entry) -> Kin:
    own = Kin(str(path.resolve()), of.pipeline, of.num_inference_steps, alike=of.name)
    if path.suffix == SUFFIX:
        ends = [about["data_offsets"] for about in read_gguf_header(path, is_whole=False).values()]
        return Kin(**(vars(own) | {"gguf_bytes": sum(end - start for start, end in ends)}))
    header = read_header(path)
    is_fp8 = any(header[name]["dtype"].startswith("F8") for name in contents.denoiser)
    return Kin(**(vars(own) | {"is_fp8": is_fp8}))


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


@dataclass(frozen=True)
class Download:
    """What is fetched before a model's first image.

    Attributes:
        num_bytes: 0 if all is here; None if unknown.
        is_gated: whether access must be asked for there.
        part: what of the model it is; "" for all.
    """

    num_bytes: int | None = 0
    repo: str = ""
    is_gated: bool = False
    part: str = ""


def download_of(model: str) -> Download:
    """Return what must be downloaded for a model that `kin_of` knows; the hub is not asked."""
    name = model.strip()
    contents = _contents(name)
    entry = CATALOGUE.get(name.lower() if contents is None else contents.entry)
    origin = None if entry is None else entry.origin
    if name.lower().startswith(SYNTHETIC) or os.path.isdir(name) or isinstance(origin, Embedded):
        return Download()
    try:
        if not find_model(name, download=False).downloads:
            return Download()
    except VivaceError:
        pass  # not even its configuration is here
    if entry is None or not isinstance(origin, Hub):
        return Download(None, name)
    num_bytes, part = origin.download_bytes, ""
    if contents is not None and contents.component is None:
        num_bytes, part = None, "a few MB"
    elif contents is not None and num_bytes is not None:
        own = footprints().get(entry.name)
        num_bytes -= 0 if own is None else sum(c.num_bytes for c in own.components if c.name in DENOISERS)
        part = f"all but its {contents.component}"
    return Download(num_bytes, origin.repo, entry.gated, part)
