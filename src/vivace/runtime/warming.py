"""Compile a recipe ahead of its use, for one size or several, and import code compiled on another machine."""

from __future__ import annotations

import os
import platform
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import vivace
from vivace.machinery.compilation.compiled_code import TRITON_VARIABLE, VARIABLE, code_folder
from vivace.measure.machine import choose_device, this_machine
from vivace.models.find import LocatedModel
from vivace.recipes.recipe import Recipe
from vivace.runtime.opening import open_session
from vivace.runtime.warm_up import WarmedSize, draw_twice
from vivace.runtime.warming import CompiledFor, Manifest, pack, unpack

if TYPE_CHECKING:
    from vivace.foundation.spec.workload import Workload


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
    """Return the conditions that code compiled here depends on.

    Args:
        device: torch's type of device.
    """
    import torch

    machine = this_machine(device)
    libraries = {"torch": torch.__version__}
    if machine.is_gpu:
        import importlib.metadata

        for name in ("triton", "pytorch-triton-rocm", "pytorch-triton-xpu"):
            try:
                libraries["triton"] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
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
    """Load a model, apply a recipe and draw twice, so that the code of this workload is in the cache.

    If the recipe announces sizes, they take the place of the workload's.

    Args:
        device: "auto" or torch's type of device.
        packed: compile into an empty folder, and return its content as an artifact; the cache gets it too.
        on_loaded: called before the first call.

    Raises:
        Unsupported: the recipe does not work here, or `packed` and nothing was compiled.
    """
    chosen = choose_device(device)
    with _folder(packed) as folder:
        drawn = _draw(located, recipe, workload, chosen, on_loaded)
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
    """Put an artifact's code into this machine's cache; return the number of new files.

    Raises:
        UnusableModel, Unsupported, OutputError: see `vivace.runtime.warming.unpack`.
    """
    return unpack(path, code_folder(), compiled_for(choose_device(device)))


def _draw(
    located: LocatedModel, recipe: Recipe, workload: Workload, device: str, on_loaded: Callable[[], None]
) -> Warmed:
    defaults = workload.model_dump(include={"height", "width", "num_inference_steps", "guidance_scale"})
    session = open_session(located, recipe, device, defaults, workload.prompts)
    on_loaded()
    return Warmed(draw_twice(session, workload.calls()[0]))


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
