"""Export an embedded model as a folder in diffusers' format. Files are copied; nothing is loaded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures import CATALOGUE
from vivace.architectures.entry import Embedded
from vivace.errors import OutputError, UnknownModel, nearest
from vivace.foundation.untrusted.files import user_path
from vivace.models.find import TINY_VAE, LocatedModel, find_model
from vivace.models.model_files import component_class, num_bytes
from vivace.models.prompts import PROMPT_SETS
from vivace.models.saved_folder import NAME, text_of

_INDEX = "model_index.json"
_PRIVATE = (".vivace-", ".part")
"""Prefix and suffix of the names of folders that are being written."""


@dataclass(frozen=True)
class Exported:
    """A model as a folder that can be used without vivace."""

    located: LocatedModel
    folder: Path
    num_files: int
    num_bytes: int

    @property
    def python(self) -> tuple[str, str]:
        """Python lines that load the model and generate an image with the catalogue's settings. They follow `from
        diffusers import DiffusionPipeline`."""
        assert self.located.entry is not None
        arguments = self.located.defaults | self.located.call
        call = "".join(f", {name}={value:g}" for name, value in arguments.items())
        return (
            f"pipe = DiffusionPipeline.from_pretrained({str(self.folder)!r})",
            f"pipe({PROMPT_SETS[self.located.entry.prompt_set][0]!r}{call}).images[0].save('picture.png')",
        )


def export(name: str, destination: Path) -> Exported:
    """Write an embedded model as a folder. The export is atomic and never overwrites anything."""
    embedded = [entry.name for entry in CATALOGUE.values() if isinstance(entry.origin, Embedded)]
    if name.strip().lower() not in embedded:
        raise UnknownModel(
            f"no model '{name[:200]}' ships with vivace{nearest(name, embedded)} (embedded models: "
            f"{', '.join(embedded)}; download models of the Hugging Face hub with `hf download`)"
        )
    located = find_model(name)
    files = dict(located.files)
    if isinstance(located.tiny_vae, Path):
        files |= {f"{TINY_VAE}/{path.name}": path for path in located.tiny_vae.iterdir() if path.is_file()}
    try:
        with atomic_folder(user_path(destination)) as folder:
            for file, source in files.items():
                target = folder / file
                target.parent.mkdir(parents=True, exist_ok=True)
                # Without the mode: safetensors writes files that only their owner may read.
                shutil.copyfile(source, target)
            _write_index(located, folder / _INDEX)
            assert located.entry is not None
            (folder / NAME).write_text(text_of(located.entry), encoding="utf-8")
            written = num_bytes({file: folder / file for file in (*files, NAME)})
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise OutputError(
            f"{destination} cannot be written: {reason}; partial files were removed. {located.model.name} needs "
            f"{num_bytes(files) / 1e6:.1f} MB in a folder that you may write to"
        ) from error
    return Exported(located, destination, len(files) + 1, written)


def _write_index(located: LocatedModel, path: Path) -> None:
    """Write the classes of components that differ from the base model's."""
    index = json.loads(path.read_text(encoding="utf-8"))
    classes = {name: ["diffusers", component_class(path)] for name, path in located.components.items()}
    if index | classes != index:
        path.write_text(json.dumps(index | classes, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def left_behind(folder: Path) -> list[Path]:
    """Return the temporary folders in a folder, of processes that were killed or still write."""
    return sorted(folder.glob("*".join(_PRIVATE)))


@contextlib.contextmanager
def atomic_folder(destination: Path) -> Iterator[Path]:
    """Yield a temporary folder that is moved to `destination` at the end. After an error nothing is left."""
    for path in (destination, *destination.parents):
        if os.path.lexists(path) and not path.is_dir():
            raise OutputError(f"{path} is not a folder; give the name of a new one")
    is_there = destination.is_dir()
    if is_there and any(destination.iterdir()):
        if (left := left_behind(destination)) == list(destination.iterdir()):
            raise OutputError(
                f"{left[0]} was left by a process that was killed; delete it, or give a new folder"
            )
        raise OutputError(f"{destination} is not empty, and nothing in it was changed; give a new folder")
    made = [path for path in destination.parents if not path.exists()]
    private = None
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        # On the same disk, so that it can be renamed. An existing empty folder is filled, not replaced: it may be the
        # working directory of a process.
        parent = destination if is_there else destination.parent
        private = Path(tempfile.mkdtemp(prefix=_PRIVATE[0], suffix=_PRIVATE[1], dir=parent))
        folder = private / "model"  # the folder from mkdtemp is accessible to its owner only
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
    """Move everything, the index last: without it the folder is not taken for a pipeline."""
    moved: list[Path] = []
    try:
        for path in sorted(folder.iterdir(), key=lambda path: (path.name == _INDEX, path.name)):
            moved.append(destination / path.name)
            path.rename(moved[-1])
    except BaseException:
        for path in moved:
            path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)
        raise
