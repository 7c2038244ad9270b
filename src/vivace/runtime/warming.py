"""Compile a recipe ahead of its use, for one size or several, and import code compiled on another machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal

from pydantic import Field

import vivace
from vivace.errors import OutputError, Unsupported, UnusableModel
from vivace.foundation.spec.base import Spec
from vivace.foundation.untrusted.destinations import write_new
from vivace.foundation.untrusted.files import reading
from vivace.machinery.compilation.compiled_code import TRITON_VARIABLE, VARIABLE, code_folder
from vivace.measure.machine import choose_device, this_machine
from vivace.models.find import LocatedModel
from vivace.recipes.recipe import Recipe
from vivace.runtime.opening import open_session
from vivace.runtime.session import WarmedSize

if TYPE_CHECKING:
    from vivace.foundation.spec.workload import Workload

MANIFEST = "vivace.json"
_FORMAT = 1
_MOST_FILES, _MOST_BYTES, _MOST_MANIFEST_BYTES = 100_000, 8 * 10**9, 10**7
_EARLIEST = (1980, 1, 1, 0, 0, 0)  # of a zip; fixed, so that the same code gives the same file
_UNUSED = (".lock", ".tmp", ".part")


class CompiledFor(Spec):
    """The conditions that compiled code depends on besides its source.

    Attributes:
        platform: system, architecture and Python, e.g. "Linux x86_64, Python 3.12".
        device: the GPU's name, or the CPU's, whose instructions the code uses.
        libraries: versions by name: torch, triton, cuda.
        folder: where PyTorch is installed: code for CPUs is looked up with its paths; "" on GPUs, where it is not.
    """

    platform: str
    device: str
    libraries: dict[str, str]
    folder: str = ""

    def differences(self, other: CompiledFor) -> list[str]:
        """Describe the differences between what the code needs and what this machine has."""
        parts: list[tuple[str, ...]] = [
            ("platform", "for", self.platform, other.platform),
            ("device", "for", self.device, other.device),
            ("PyTorch's folder", "for", self.folder, other.folder),
        ]
        for name in sorted({*self.libraries, *other.libraries}):
            parts.append((name, "with", *(each.libraries.get(name, "none") for each in (self, other))))
        return [
            f"{name}: compiled {how} {compiled}, here is {here}"
            for name, how, compiled, here in parts
            if compiled != here
        ]


class Manifest(Spec):
    """The content of an artifact. `files` are SHA-256 by path below the cache folder; `first_call_s` is the cold
    one."""

    format: Literal[1]
    vivace: str
    model: str
    recipe: str
    workload: str
    compiled_for: CompiledFor
    first_call_s: float
    files: dict[str, str] = Field(max_length=_MOST_FILES)


def pack(folder: Path, manifest: Manifest) -> bytes:
    """Return the artifact of a cache folder; `manifest.files` is filled in."""
    contents = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.suffix not in _UNUSED
    }
    if not contents:
        raise Unsupported("nothing was compiled: the recipe has no technique that compiles; add compile")
    files = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    listed = manifest.model_copy(update={"files": files})
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in {MANIFEST: listed.model_dump_json(indent=1).encode(), **contents}.items():
            info = zipfile.ZipInfo(name, _EARLIEST)
            info.compress_type = zipfile.ZIP_DEFLATED
            file.writestr(info, content)
    return buffer.getvalue()


def unpack(path: Path, folder: Path, here: CompiledFor) -> int:
    """Put an artifact's files into a cache folder; return the number of new files. Existing files are kept."""
    if not path.is_file():
        raise UnusableModel(f"there is no file {path}; `vivace warm MODEL --recipe R -o FILE` makes one")
    with (
        reading(path, problem="is not compiled code that vivace packed, or is damaged"),
        zipfile.ZipFile(path) as file,
    ):
        entries = file.infolist()
        if len(entries) > _MOST_FILES + 1 or sum(entry.file_size for entry in entries) > _MOST_BYTES:
            raise ValueError("it is larger than compiled code can be")
        manifest = _manifest(file)
        if differences := manifest.compiled_for.differences(here):
            raise Unsupported(
                f"{path} does not fit this environment ({'; '.join(differences)}); make one here: "
                f"vivace warm {manifest.model} --recipe {manifest.recipe!r} -o {path.name}"
            )
        contents = {name: file.read(name) for name in manifest.files}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != manifest.files[name]:
                raise ValueError(f"{name} is not what the manifest says")
    for name in contents:
        try:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror}; set VIVACE_CACHE") from error
    return sum(write_new(folder / name, content) for name, content in contents.items())


def _manifest(file: zipfile.ZipFile) -> Manifest:
    info = file.getinfo(MANIFEST)
    if info.file_size > _MOST_MANIFEST_BYTES:
        raise ValueError("its manifest is too large")
    fields = json.loads(file.read(info))
    if isinstance(fields, dict) and fields.get("format") not in (_FORMAT, None):
        raise ValueError(f"it has format {fields['format']}, which another version of vivace wrote")
    manifest = Manifest.model_validate(fields)
    for name in manifest.files:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or "\\" in name or ":" in name:
            raise ValueError(f"it names a file outside of the cache folder ({name!r})")
    return manifest


@dataclass(frozen=True)
class Warmed:
    """The result of warming: for each size, the smallest first, and the artifact's content on request."""

    sizes: tuple[WarmedSize, ...]
    artifact: bytes | None = None

    @property
    def first_call_s(self) -> float:
        """Seconds of all first calls together."""
        return sum(warmed.first_call_s for warmed in self.sizes)

    @property
    def graphs(self) -> int:
        """Number of graphs that were compiled."""
        return sum(warmed.graphs + warmed.graphs_later for warmed in self.sizes)

    @property
    def from_cache(self) -> int:
        """Number of graphs that the cache had already."""
        return sum(warmed.from_cache for warmed in self.sizes)


def compiled_for(device: str) -> CompiledFor:
    """Return the conditions that code compiled here depends on."""
    import torch

    machine = this_machine(device)
    libraries = {"torch": torch.__version__}
    if machine.is_gpu:
        for name in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu"):
            with suppress(PackageNotFoundError):
                libraries["triton"] = version(name)
    return CompiledFor(
        platform=(
            f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"
        ),
        device=machine.device_name,
        libraries=libraries,
        folder="" if machine.is_gpu else str(Path(torch.__file__).parent),
    )


def warm(
    located: LocatedModel,
    recipe: Recipe,
    workload: Workload,
    device: str,
    *,
    packed: bool = False,
    on_loaded: Callable[[], None] = lambda: None,
) -> Warmed:
    """Load a model, apply a recipe and draw twice, so that the code of this workload is in the cache. If the recipe
    announces sizes, they take the place of the workload's."""
    chosen = choose_device(device)
    with _folder(packed) as folder:
        defaults = workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"})
        session = open_session(located, recipe, chosen, defaults, workload.prompts)
        on_loaded()
        drawn = Warmed(session.draw_twice(workload.calls()[0]))
        if folder is None:
            return drawn
        manifest = Manifest(
            format=1,
            vivace=vivace.__version__,
            model=located.model.name,
            recipe=recipe.text,
            workload=(
                f"{', '.join(str(warmed.size) for warmed in drawn.sizes)}, batch {workload.batch}, "
                f"{workload.num_inference_steps} steps, guidance {workload.guidance_scale:g}"
            ),
            compiled_for=compiled_for(chosen),
            first_call_s=round(drawn.first_call_s, 3),
            files={},
        )
        artifact = pack(folder, manifest)
    with tempfile.TemporaryDirectory(prefix="vivace-") as scratch:
        path = Path(scratch) / "artifact"
        path.write_bytes(artifact)
        unpack(path, code_folder(), manifest.compiled_for)
    return Warmed(drawn.sizes, artifact)


def bring(path: Path, device: str) -> int:
    """Put an artifact's code into this machine's cache; return the number of new files."""
    return unpack(path, code_folder(), compiled_for(choose_device(device)))


@contextmanager
def _folder(is_new: bool) -> Iterator[Path | None]:
    """Let compilers write into a new, empty folder; None: into the usual one."""
    if not is_new:
        yield None
        return
    before = {name: os.environ.get(name) for name in (VARIABLE, TRITON_VARIABLE)}
    with tempfile.TemporaryDirectory(prefix="vivace-") as folder:
        os.environ |= {VARIABLE: folder, TRITON_VARIABLE: str(Path(folder) / "triton")}
        try:
            yield Path(folder)
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
