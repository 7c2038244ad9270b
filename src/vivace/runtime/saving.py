"""Save a model with its recipe: its weights are quantised and merged once, not at every load."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import NoEffect, OutputError, Unsupported, UsageError
from vivace.foundation.spec.record import Record
from vivace.foundation.spec.saved import FORMAT, CallDefaults, SavedModel, SavedTechnique
from vivace.foundation.untrusted.files import reason, user_path, without_folders
from vivace.machinery.lora.lora_files import settings_for, short_name
from vivace.machinery.technique import Effect, Target, Technique
from vivace.measure.machine import check_works, this_machine
from vivace.measure.this_environment import environment
from vivace.models.checkpoints.headers import read_header
from vivace.models.export_embedded import atomic_folder, left_behind
from vivace.models.find import LocatedModel, obtain
from vivace.models.model_files import num_bytes
from vivace.models.saved_folder import NAME, digests, saved_files
from vivace.recipes.recipe import Recipe
from vivace.runtime.opening import session_of
from vivace.runtime.pipelines import LORAS, pipeline_for, precedes
from vivace.runtime.saved import write_pipeline
from vivace.runtime.session import Session
from vivace.techniques.lora import Lora

RECORDS = "records.jsonl"
"""File of measured records, of the baseline and of the recipe, one a line."""
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".ckpt", ".pt", ".msgpack", ".onnx", ".h5")


@dataclass(frozen=True)
class Saved:
    """A folder that was written.

    Attributes:
        source_bytes, num_bytes: of the weights that were read, and of the folder.
    """

    folder: Path
    model: SavedModel
    source_bytes: int
    num_bytes: int
    notes: tuple[str, ...]

    @property
    def later(self) -> tuple[str, ...]:
        """The techniques of the recipe that are applied when the folder is loaded."""
        stored = {technique.text for technique in self.model.stored}
        recipe = Recipe.from_spec(self.model.recipe)
        return tuple(technique.text for technique in recipe if technique.text not in stored)


def save(
    located: LocatedModel,
    recipe: Recipe,
    device: str,
    destination: Path,
    is_read: Callable[[], None] = lambda: None,
    proof: Sequence[Record] = (),
) -> Saved:
    """Load a model, apply the techniques that change its weights, and write all of it into a new folder.

    Args:
        device: torch's type of device that the weights are for: precision and layout depend on it.
        destination: a folder that does not exist yet, or an empty one.
        is_read: called once the model is loaded and the recipe applied.
        proof: records of the baseline and the recipe, to lie beside the weights.
    """
    check_source(located)
    check_works(device)
    located, recipe = obtain(located), recipe.pinned()
    stored = Recipe(tuple(technique for technique in recipe if technique.facts.is_stored))
    _check_order(recipe, stored, device)
    try:
        with atomic_folder(user_path(destination)) as folder:  # checked before the model is loaded
            session = session_with(located, stored, device)
            is_read()
            effects = {t.text: session.applied[t.label] for t in stored if t.label in session.applied}
            kept = recipe.without(*(t for t in stored if t.text not in effects))
            write_pipeline(session.pipe, located, folder)
            _without_paths(folder)
            public, names = without_places(kept, folder)
            if located.model.source in ("folder", "file"):
                names[located.model.name] = Path(located.model.name).name
            if proof:
                records = [without_folders(json.loads(record.model_dump_json()), names) for record in proof]
                lines = "".join(f"{json.dumps(record)}\n" for record in records)
                (folder / RECORDS).write_text(lines, encoding="utf-8")
            effects = {
                new.text: effects[old.text]
                for old, new in zip(kept, public, strict=True)
                if old.text in effects
            }
            described = json.loads(_described(located, public, effects, device, folder).model_dump_json())
            saved = SavedModel.model_validate(without_folders(described, names))
            (folder / NAME).write_text(saved.model_dump_json(indent=1) + "\n", encoding="utf-8")
            written = num_bytes({**saved_files(folder), NAME: folder / NAME})
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        if not isinstance(error, OSError) and "null byte" not in str(error):
            raise
        raise OutputError(
            f"{destination} cannot be written: {reason(error)}; partial files were removed"
        ) from error
    source = sum(path.stat().st_size for path in located.weights)
    session.warnings += [
        f"{left} was left by a process that was killed, or is still being written; delete it if nothing runs"
        for left in left_behind(user_path(destination).parent)
    ]
    return Saved(destination, saved, source, written, tuple(session.warnings))


def check_source(located: LocatedModel) -> None:
    if located.model.is_synthetic:
        raise UsageError(
            f"{located.model.name} has random weights, which are made faster than they are read; save a model "
            "with weights"
        )
    if located.saved is not None:
        raise UsageError(
            f"{located.model.name} is saved already, with {located.saved.recipe.text}; save {located.saved.model.name} "
            "with another recipe"
        )


def _check_order(recipe: Recipe, stored: Recipe, device: str) -> None:
    """Raise Unsupported if a technique that is applied at load time belongs before one that is saved."""
    texts = {technique.text for technique in stored}
    machine = Target.of_machine(this_machine(device))
    for technique in recipe:
        if technique.text in texts:
            continue
        if (later := precedes(technique, recipe, texts)) is not None:
            raise Unsupported(
                f"{technique.text} cannot be saved, and {later.text} is applied after it; leave out one of them"
            )
        if (why := technique.unsupported(machine)) is not None:
            raise Unsupported(f"{technique.name}: {why}")


def session_with(located: LocatedModel, stored: Recipe, device: str) -> Session:
    """Apply the techniques whose result is saved; those that change nothing are left out."""
    pipe = pipeline_for(located, stored, device, None, None)
    try:
        return session_of(pipe, located, stored, device)
    except NoEffect as error:
        if not error.already_so:
            raise
        session = session_of(pipe, located, Recipe(), device)
        session.warnings.append(str(error))
        return session


def _described(
    located: LocatedModel, recipe: Recipe, effects: Mapping[str, Effect], device: str, folder: Path
) -> SavedModel:
    return SavedModel(
        format=FORMAT,
        environment=environment(device),
        model=located.model,
        entry=None if located.entry is None else located.entry.name,
        defaults=CallDefaults(**located.defaults),
        call=located.call,
        is_small=located.is_small,
        recipe=recipe.spec,
        stored=tuple(
            _technique(technique, effects[technique.text])
            for technique in recipe
            if technique.text in effects
        ),
        sources=digests(_sources(located), in_pieces=False),
        files=digests(saved_files(folder), in_pieces=True),
    )


def without_places(recipe: Recipe, folder: Path | None = None) -> tuple[Recipe, dict[str, str]]:
    """Return a recipe in which LoRAs of this machine have names for their paths, and the names by path."""
    names: dict[str, str] = {}
    techniques: list[Technique] = []
    for technique in recipe:
        if isinstance(technique, Lora) and (file := technique.local_file) is not None:
            name = short_name(technique.path)
            name = f"{name}-{technique.sha256[:8]}" if f"{name}{file.suffix}" in names.values() else name
            names[technique.path] = f"{name}{file.suffix}"
            if folder is not None and not technique.facts.is_stored:
                names[technique.path] = f"{LORAS}/{name}/{name}{file.suffix}"
                (folder / LORAS / name).mkdir(parents=True)
                shutil.copyfile(file, folder / names[technique.path])
                if (settings := settings_for(file, read_header(file))) is not None:
                    shutil.copyfile(settings, folder / LORAS / name / settings.name)
            technique = technique.model_copy(update={"path": names[technique.path]})
        techniques.append(technique)
    return Recipe(tuple(techniques)), names


def _technique(technique: Technique, effect: Effect) -> SavedTechnique:
    wraps = (
        effect.step_end,
        effect.around,
        effect.forget,
        effect.finish,
        effect.close,
        *effect.contexts.values(),
    )
    assert not any(wraps), f"{technique.text} does more than weights can hold"
    return SavedTechnique(
        text=technique.text,
        changed=effect.changed,
        notes=effect.notes,
        defaults=effect.call,
        evidence={} if effect.evidence is None else dict(effect.evidence()),
    )


def _sources(located: LocatedModel) -> dict[str, Path]:
    """Return the files that a model was read from, by their names in it."""
    names = {path: name for name, path in located.files.items()}
    files = {name: path for name, path in located.files.items() if path.suffix not in _WEIGHTS}
    extra = [path for path in (located.checkpoint, located.lora) if path is not None]
    return files | {names.get(path, path.name): path for path in (*located.weights, *extra)}


def _without_paths(folder: Path) -> None:
    """Remove the source paths from configurations: folders of this machine."""
    for path in folder.rglob("*.json"):
        content = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(content, dict) and content.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
