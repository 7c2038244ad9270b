"""A whole pipeline as a saved folder: components, and the rest in diffusers' format."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from vivace.architectures.components import Component, Library
from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import read_object
from vivace.foundation.untrusted.reading import reading
from vivace.models.find import LocatedModel
from vivace.models.folder_defaults import NAME
from vivace.models.model_files import files_of
from vivace.models.quiet import quiet
from vivace.models.repository import INDEX, components_of, read_index
from vivace.models.saved_folder import check_contents
from vivace.models.synthetic import on_meta
from vivace.runtime.saved.component_files import ComponentFiles, check_component, fill, write_component

Rebuild = Callable[[Any], None]
"""Puts the modules that techniques left into a pipeline of skeletons."""
_CONFIG = "config.json"


def write_pipeline(pipe: Any, located: LocatedModel, folder: Path) -> None:
    """Write a pipeline into an empty folder, except `vivace.json`.

    Args:
        located: what it was loaded from, whose tokenizers are copied.

    Raises:
        Unsupported: a tensor is of a class that no file is set up for.
    """
    with quiet():
        _write_pipeline(pipe, located, folder)


def _write_pipeline(pipe: Any, located: LocatedModel, folder: Path) -> None:
    import torch

    pipe.save_config(str(folder))
    for name in components_of(read_object(folder / INDEX)):
        part = getattr(pipe, name)
        if part is None:
            continue
        target = folder / name
        if isinstance(part, torch.nn.Module):
            target.mkdir()
            _write_configuration(part, target)
            write_component(part, target, _skeleton(target, _kind_of(name, type(part))))
        elif hasattr(part, "save_pretrained"):
            part.save_pretrained(str(target))
            # Libraries write tokenizers in their own newest form, and may read that differently.
            own = {n: p for n, p in located.files.items() if n.startswith(f"{name}/")}
            if "scheduler" not in name and own:
                shutil.rmtree(target)
                target.mkdir()
                for own_name, path in own.items():
                    copy = folder / own_name
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copy)


def read_pipeline(located: LocatedModel, rebuild: Rebuild, device: str) -> Any:
    """Check a saved folder as a whole, then build its pipeline on a device, in evaluation mode.

    Args:
        device: torch's type of device; "meta" for shapes and dtypes alone, for which only headers are read.

    Raises:
        UnusableModel: names the first file, and the key in it, that is not what was saved.
    """
    import diffusers

    assert located.saved is not None
    assert located.folder is not None
    folder = located.folder
    if device != "meta":
        check_contents(folder, located.saved)
    with quiet():
        skeletons = _skeletons(folder)
        rebuild(SimpleNamespace(**skeletons, components=skeletons))
        checked: dict[str, ComponentFiles] = {
            name: check_component(folder / name, skeleton) for name, skeleton in skeletons.items()
        }
        for name, files in checked.items():
            fill(skeletons[name], files, device)
        with reading(located.model.name, problem=f"does not load as a {located.pipeline}"):
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                str(folder), local_files_only=True, use_safetensors=True, **skeletons
            )
    for part in skeletons.values():
        part.eval().requires_grad_(False)
    if getattr(pipe, "watermark", None) is not None:
        pipe.watermark = None  # SDXL adds a watermark if the watermarking library happens to be installed
    pipe.set_progress_bar_config(disable=True)
    return pipe


def saved_files(folder: Path) -> dict[str, Path]:
    """Return the files of a saved folder that `vivace.json` lists."""
    return {name: path for name, path in files_of(folder).items() if name != NAME}


def _write_configuration(module: Any, folder: Path) -> None:
    if hasattr(module, "save_config"):
        module.save_config(str(folder))
    else:
        module.config.save_pretrained(str(folder))


def _kind_of(name: str, kind: Any) -> Any:
    """Check that a saved folder can name a network's class, and return it.

    Raises:
        Unsupported: it is not a public class of diffusers or transformers.
    """
    if _public(kind.__module__.partition(".")[0], kind.__name__) is not kind:
        raise Unsupported(
            f"the {name} cannot be saved: {kind.__name__} is not a public class of diffusers or transformers; load "
            "the model without it"
        )
    return kind


def _public(library: str, name: str) -> Any:
    if library not in ("diffusers", "transformers"):
        return None
    return getattr(importlib.import_module(library), name, None)


def _skeletons(folder: Path) -> dict[str, Any]:
    """Return every network of a saved pipeline without values."""
    import torch

    made: dict[str, Any] = {}
    for name, (library, class_name) in components_of(read_index(folder, str(folder))).items():
        kind = _public(library, class_name)
        if not isinstance(kind, type):
            raise UnusableModel(
                f"{folder / INDEX}: the key {name!r} names {class_name[:80]!r} of {library[:80]!r}, which saved "
                "models do not have"
            )
        if issubclass(kind, torch.nn.Module):
            with reading(folder / name / _CONFIG, problem=f"does not make a {class_name}"):
                made[name] = _skeleton(folder / name, kind)
    return made


def _skeleton(folder: Path, kind: Any) -> Any:
    """Return a network built from its configuration, with its parameters on the meta device."""
    config = read_object(folder / _CONFIG)
    library: Library = "transformers" if kind.__module__.startswith("transformers.") else "diffusers"
    if library == "diffusers":
        config = kind.extract_init_dict(config)[0]
    return on_meta(Component(library=library, class_name=kind.__name__, config=config))
