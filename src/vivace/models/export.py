"""Write an embedded model as one folder in diffusers' own format. Files are copied; nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import OutputError, UnknownModel, nearest
from vivace.models.catalogue import CATALOGUE
from vivace.models.entry import Embedded
from vivace.models.files import component_class, num_bytes
from vivace.models.find import Found, find_model

_INDEX = "model_index.json"


@dataclass(frozen=True)
class Exported:
    """A model as a folder that needs no vivace."""

    found: Found
    folder: Path
    num_files: int
    num_bytes: int

    @property
    def python(self) -> tuple[str, str]:
        """After `from diffusers import DiffusionPipeline`: load it, and draw as the catalogue says."""
        assert self.found.entry is not None
        arguments = self.found.defaults | self.found.call
        call = "".join(f", {name}={value:g}" for name, value in arguments.items())
        return (
            f"pipe = DiffusionPipeline.from_pretrained({str(self.folder)!r})",
            f"pipe({self.found.entry.prompts[0]!r}{call}).images[0].save('picture.png')",
        )


def export(name: str, destination: Path) -> Exported:
    """Write an embedded model as a folder, whole or not at all, never over anything that is there.

    Args:
        name: a catalogue name.
        destination: a folder that does not exist yet, or an empty one.

    Raises:
        UnknownModel: no model of that name ships with vivace.
        OutputError: the folder has something in it, or cannot be written.
    """
    embedded = [entry.name for entry in CATALOGUE.values() if isinstance(entry.origin, Embedded)]
    if name.strip().lower() not in embedded:
        raise UnknownModel(
            f"no model '{name[:200]}' ships with vivace{nearest(name, embedded)} (there are {', '.join(embedded)}; "
            "what lies on the Hugging Face hub `hf download` copies into a folder)"
        )
    found = find_model(name)
    files = found.files
    try:
        with _whole(destination.expanduser()) as folder:
            for file, source in files.items():
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                # Without their modes: safetensors writes files that only their owner may read.
                shutil.copyfile(source, target)
            _write_index(found, folder / _INDEX)
            written = num_bytes({file: folder / file for file in files})
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(
            f"{destination} cannot be written: {reason}; nothing of it is left. {found.model.name} wants "
            f"{num_bytes(files) / 1e6:.1f} MB in a folder that you may write to"
        ) from error
    return Exported(found, destination, len(files), written)


def _write_index(found: Found, path: Path) -> None:
    """Name the classes of the model's own components where they are not the base's."""
    index = json.loads(path.read_text())
    classes = {name: ["diffusers", component_class(path)] for name, path in found.components.items()}
    if index | classes != index:
        path.write_text(json.dumps(index | classes, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def _whole(destination: Path) -> Iterator[Path]:
    """A folder to fill, whose content is at `destination` once the block has ended; after an error nothing is."""
    for path in (destination, *destination.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise OutputError(f"{path} is no folder; give the name of a new one")
    is_there = destination.is_dir()
    if is_there and any(destination.iterdir()):
        raise OutputError(f"{destination} is not empty, and nothing in it was changed; give a new folder")
    made = [path for path in destination.parents if not path.exists()]
    private = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk, so that it can be renamed. An empty folder is filled, not replaced: somebody may be in it.
        beside = destination if is_there else destination.parent
        private = Path(tempfile.mkdtemp(prefix=".vivace-", suffix=".part", dir=beside))
        folder = private / "model"  # mkdtemp's own folder is for its owner alone
        folder.mkdir()
        yield folder
        if is_there:
            _move_into(folder, destination)
        else:
            folder.rename(destination)
    except BaseException:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        with contextlib.suppress(OSError):
            for path in made:
                path.rmdir()
        raise
    shutil.rmtree(private, ignore_errors=True)


def _move_into(folder: Path, destination: Path) -> None:
    """The index last: without it nothing takes the folder for a pipeline."""
    moved: list[Path] = []
    try:
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == _INDEX, path.name)):
            moved.append(destination / path.name)
            path.rename(moved[-1])
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        raise
