"""Find a model by catalogue name, architecture, hub repository, folder or file."""

from __future__ import annotations

import filecmp
import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vivace.architectures import ARCHITECTURES, CATALOGUE, pipeline_named
from vivace.architectures.components import Architecture, ComponentConfig
from vivace.architectures.entry import Embedded, Entry, Hub, StoredPart
from vivace.errors import UnknownModel, Unsupported, UnusableModel, nearest
from vivace.foundation.spec.saved import SavedModel
from vivace.foundation.spec.trial import Model
from vivace.foundation.untrusted.files import is_path, not_there, user_path
from vivace.models import hub
from vivace.models.bounds import check_files, check_places
from vivace.models.checkpoints.headers import check_whole, read_metadata
from vivace.models.checkpoints.metadata import note_of_few_steps, with_few_steps
from vivace.models.checkpoints.single_file import Contents, check_format, contents_of
from vivace.models.checkpoints.weight_scales import check_plain
from vivace.models.hub import ModelDownload
from vivace.models.model_files import exists_as, files_of, fingerprint
from vivace.models.repository import (
    INDEX,
    MODULAR_INDEX,
    call_of,
    choose,
    components_of,
    defaults_of,
    has_no_pipeline,
    read_config,
    read_index,
)
from vivace.models.saved_folder import (
    entry_of,
    read_defaults,
    read_saved,
)
from vivace.models.tasks import own_task

WEIGHTS = Path(__file__).parent / "weights"
SYNTHETIC = "synthetic:"
TINY_VAE = "tiny_vae"
"""Folder of the tiny VAE in a model's folder. diffusers ignores it, since the index does not name it."""
_SUFFIXES = (".safetensors", ".gguf", ".ckpt", ".pt", ".pth", ".bin", ".json")
"""Suffixes of model files, and of files that are mistaken for them."""
SMALL_BYTES = 200_000_000
_REPOSITORY = re.compile(r"\w+(?:[.-]+\w+)*/\w+(?:[.-]+\w+)*", re.ASCII)
_REVISION = re.compile(r"\w[\w-]*(?:[./][\w-]+)*", re.ASCII)  # without "..": it is a file name in the cache


@dataclass(frozen=True)
class LocatedModel:
    """A model that was found: its identity, its files, and its catalogue entry if it has one.

    folder: holds the model_index.json; None if there are no files.
    entry: for a single file, that of the model whose configuration it uses; for a folder, that of the embedded model
        that was exported to it, or whose weights it has.
    components: replacements for the folder's components, by name: a folder with a config.json, or a .safetensors file.
    checkpoint: a single file with all weights; `folder` then provides only configuration and tokenizers.
    variant: weight variant of the folder, as diffusers calls it ("fp16").
    downloads: files that must be downloaded first, which `obtain` does.
    missing: a message if weights are missing. Such a folder works for `vivace plan`, but not for inference.
    architecture: the model is built from this with random weights, instead of from files.
    same_as: the embedded model whose weights a folder has.
    make: makes the pipeline, where it is an object of this process.
    """

    model: Model
    folder: Path | None
    entry: Entry | None
    components: Mapping[str, Path] = field(default_factory=dict)
    checkpoint: Path | None = None
    lora: Path | None = None
    variant: str | None = None
    without: tuple[str, ...] = ()
    weights: tuple[Path, ...] = ()
    downloads: tuple[ModelDownload, ...] = ()
    missing: str | None = None
    architecture: Architecture | None = None
    contents: Contents | None = None
    same_as: str | None = None
    saved: SavedModel | None = None
    make: Callable[[], Any] | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for the user on assumptions about the model's files, and on unused parts."""
        if self.saved is not None:
            return (f"{Path(self.model.name).name} is {self.saved.model.name} with {self.saved.recipe.text}",)
        if self.contents is None:
            if self.entry is not None:
                return ()
            name = Path(self.model.name).name
            notes = [note_of_few_steps(name, self.defaults["num_inference_steps"])]
            if pipeline_named(self.pipeline) is None:
                notes.append(
                    f"vivace does not know {self.pipeline}s: steps, guidance and size are the defaults of diffusers, "
                    "not of this model; techniques that must know its blocks or its guidance are refused"
                )
            return tuple(f"{name}: {note}" for note in notes if note)
        file = self.checkpoint or self.weights[-1]
        return tuple(f"{file.name}: {note}" for note in self.contents.notes)

    @property
    def is_small(self) -> bool:
        """Whether its weights are of the size of the models that ship with vivace; False if they are not here yet."""
        if self.saved is not None:
            return self.saved.is_small
        return (
            bool(self.weights)
            and all(path.is_file() for path in self.weights)
            and (sum(path.stat().st_size for path in self.weights) < SMALL_BYTES)
        )

    @property
    def files(self) -> dict[str, Path]:
        """Every file of an embedded model or a folder, by its name in the model ("transformer/config.json")."""
        return {} if self.folder is None else files_of(self.folder, self.components.values())

    @property
    def tiny_vae(self) -> Path | StoredPart | ComponentConfig | None:
        """The tiny VAE for this model's latents: a folder, files on the hub, or an architecture to build."""
        if self.entry is None or self.model.source == "folder":
            assert self.folder is not None
            own = self.folder / TINY_VAE
            return own if (own / "config.json").is_file() else None
        if self.entry.origin.tiny_vae is None:
            return None
        if self.architecture is not None:
            return self.architecture.tiny_vae
        tiny = self.entry.origin.tiny_vae
        return WEIGHTS / tiny if isinstance(tiny, str) else tiny

    @property
    def pipeline(self) -> str:
        """The pipeline's class in diffusers."""
        if self.entry is not None:
            return self.entry.pipeline
        assert self.folder is not None
        return str(read_config(self.folder / INDEX)["_class_name"])

    @property
    def prompt_set(self) -> str:
        """The key in `vivace.models.prompts` of prompts that the model understands."""
        if self.entry is not None:
            return self.entry.prompt_set
        return "edit" if own_task(self.pipeline) == "edit" else "real"

    @property
    def defaults(self) -> dict[str, Any]:
        """The published defaults of the call: height, width, num_inference_steps, guidance_scale."""
        if self.saved is not None:
            return self.saved.defaults.model_dump()
        if self.entry is None:
            assert self.folder is not None
            return defaults_of(self.folder, self.pipeline)
        keys = ("height", "width", "num_inference_steps", "guidance_scale")
        return {key: getattr(self.entry, key) for key in keys}

    @property
    def call(self) -> dict[str, Any]:
        """Arguments that the call needs in addition to a workload's: max_sequence_length, clip_skip, ..., or none."""
        if self.saved is not None:
            return dict(self.saved.call)
        if self.entry is None:
            assert self.folder is not None
            return call_of(self.folder, self.pipeline)
        return self.entry.call


LIVE: dict[str, LocatedModel] = {}
"""Models that are objects of this process, by name, while they are measured."""


def find_model(name: str, *, download: bool = True) -> LocatedModel:
    """Find a model. For models on the hub at most the small files are downloaded.

    Args:
        name: a catalogue name; `synthetic:` and a catalogue name, for its architecture with random weights; `org/repo`,
            optionally with `@` and a branch, tag or commit; the path of a folder in diffusers' format; the path of a
            .safetensors or .gguf file of a model or its denoiser.
        download: False uses only the hub's cache.
    """
    if name in LIVE:
        return LIVE[name]
    text = name.strip()
    if text.lower().startswith(SYNTHETIC):
        return _synthetic(text[len(SYNTHETIC) :].strip().lower())
    entry = CATALOGUE.get(text.lower())
    if entry is not None:
        if isinstance(entry.origin, Embedded):
            return _embedded(entry, entry.origin)
        return _on_the_hub(entry.name, entry, entry.origin, download)
    is_folder, is_file = exists_as(name)
    if is_folder and text:
        return _in_folder(user_path(name))
    if is_file:
        return _in_file(user_path(name), download)
    if is_path(text, _SUFFIXES):
        raise UnknownModel(not_there(name))
    if (origin := repository_in(text)) is not None:
        return _on_the_hub(text, _published_as(origin.repo), origin, download)
    raise UnknownModel(
        f"no model '{name[:200]}'{nearest(name, CATALOGUE)} (in the catalogue: {', '.join(CATALOGUE)}; or give "
        "org/repo of the Hugging Face hub, a folder with a model_index.json, a .safetensors file, or synthetic:NAME "
        "for random weights)"
    )


def repository_in(name: str) -> Hub | None:
    """Return the repository that a name means, `org/repo` or `org/repo@revision`; None for another name."""
    repo, at, revision = name.strip().partition("@")
    if not _REPOSITORY.fullmatch(repo) or (at and not _REVISION.fullmatch(revision)):
        return None
    return Hub(repo=repo, revision=revision or None)


def obtain(located: LocatedModel) -> LocatedModel:
    """Download missing weights, and check that each file is complete according to its header."""
    if located.downloads:
        hub.fetch_all(located.downloads)
        located = find_model(located.model.name, download=False)
    if located.missing is not None:
        raise UnusableModel(located.missing)
    check_whole(located.weights)
    if located.contents is None and located.saved is None:
        for file in located.weights:
            check_plain(file)
    return located


def synthetic_names() -> list[str]:
    """Return the names that may follow `synthetic:`: catalogue models whose architecture is published."""
    return [name for name in CATALOGUE if name in ARCHITECTURES]


def _synthetic(name: str) -> LocatedModel:
    names = synthetic_names()
    if name not in names:
        problem = f"no architecture '{name[:200]}' for random weights{nearest(name, names)}"
        if name in CATALOGUE:
            problem = f"{name} ships with its weights, so there is no {SYNTHETIC}{name}; give '{name}'"
        raise UnknownModel(f"{problem} ({SYNTHETIC} takes one of {', '.join(names)})")
    architecture = ARCHITECTURES[name]
    revision = hashlib.sha256(architecture.model_dump_json().encode()).hexdigest()[:16]
    model = Model(name=SYNTHETIC + name, source="synthetic", revision=revision)
    return LocatedModel(model, None, CATALOGUE[name], architecture=architecture)


def _embedded(entry: Entry, origin: Embedded) -> LocatedModel:
    folder, components = _embedded_folders(origin)
    files = files_of(folder, components.values())
    model = Model(name=entry.name, source="embedded", revision=fingerprint(files))
    weights = tuple(path for path in files.values() if path.suffix == ".safetensors")
    return LocatedModel(model, folder, entry, components, weights=weights)


def _embedded_folders(origin: Embedded) -> tuple[Path, dict[str, Path]]:
    """Return the folder of an embedded model's pipeline, and those of components of its own, by name."""
    own, base = WEIGHTS / origin.folder, WEIGHTS / (origin.base or origin.folder)
    if (own / INDEX).exists():
        parts = [base / name for name in components_of(read_index(own, origin.folder))]
        return own, {part.name: part for part in parts if not (own / part.name).exists() and part.exists()}
    return base, {path.name: path for path in sorted(own.iterdir()) if path.is_dir()}


def _embedded_models_like(
    pipeline: str, files: Mapping[str, Path], weights: Collection[str]
) -> tuple[Entry | None, Entry | None]:
    """Return the embedded model that has a folder's weights, and one that has its denoiser's configuration."""
    same = alike = None
    for entry in CATALOGUE.values():
        if isinstance(entry.origin, Embedded) and entry.pipeline == pipeline:
            folder, components = _embedded_folders(entry.origin)
            own = files_of(folder, components.values())
            stored = {name for name, path in own.items() if path.suffix == ".safetensors"}
            config = "unet/config.json" if "unet/config.json" in own else "transformer/config.json"
            if stored == {*weights} and all(filecmp.cmp(own[n], files[n], shallow=False) for n in stored):
                same = same or entry
            if config in files and _is_configured_like(files[config], own[config]):
                alike = alike or entry
    return same, alike


def _is_configured_like(file: Path, other: Path) -> bool:
    mine, theirs = read_config(file), read_config(other)
    return all(key in mine and mine[key] == value for key, value in theirs.items() if not key.startswith("_"))


def _published_as(repo: str) -> Entry | None:
    """Return the catalogue's entry of a repository, with the intended settings of its model; None if it has none."""
    for entry in CATALOGUE.values():
        origin = entry.origin
        if isinstance(origin, Hub) and origin.repo == repo and not origin.parts and origin.lora is None:
            return entry
    return None


def _on_the_hub(name: str, entry: Entry | None, origin: Hub, download: bool) -> LocatedModel:
    located = hub.locate(origin, download=download)
    return LocatedModel(
        model=Model(name=name, source="hub", revision=located.revision),
        folder=located.folder,
        entry=entry,
        components=located.parts,
        lora=located.lora,
        variant=located.variant,
        without=origin.without,
        weights=located.weights,
        downloads=located.downloads,
    )


def _in_folder(path: Path) -> LocatedModel:
    folder = path.resolve()
    if not (folder / INDEX).is_file():
        if (folder / MODULAR_INDEX).is_file():
            raise UnusableModel(
                has_no_pipeline(str(path), read_config(folder / MODULAR_INDEX).get("_class_name"))
            )
        raise UnusableModel(
            f"{path} has no {INDEX}; give the folder that pipe.save_pretrained(...) wrote, or the path of a file "
            "that holds a whole model"
        )
    check_places(folder, ())
    files = files_of(folder)
    index = read_index(folder, str(path))
    check_places(folder, (*components_of(index), TINY_VAE))
    saved = read_saved(folder)
    # The weights of a saved folder have names and shapes of its own.
    chosen = choose(index, files, str(path), elsewhere=components_of(index) if saved is not None else ())
    check_files(folder, chosen.small, chosen.weights, str(path))
    tiny = [name for name in files if name.startswith(f"{TINY_VAE}/") and name.endswith(".json")]
    check_files(folder, tiny, (), str(path))
    model = Model(name=str(folder), source="folder", revision=fingerprint(files))
    weights = tuple(files[name] for name in chosen.weights)
    pipeline = str(index["_class_name"])
    if saved is not None:
        weights = tuple(file for name, file in files.items() if name.endswith(".safetensors"))
        entry = entry_of(folder, saved, pipeline)
        return LocatedModel(model, folder, entry, weights=weights, saved=saved)
    same, alike = _embedded_models_like(pipeline, files, chosen.weights)
    return LocatedModel(
        model,
        folder,
        read_defaults(folder, pipeline) or same or alike,
        variant=chosen.variant,
        weights=weights,
        missing=chosen.missing,
        same_as=None if same is None else same.name,
    )


def _in_file(path: Path, download: bool) -> LocatedModel:
    file = path.resolve()
    check_format(path)
    contents = contents_of(file, is_configured=(file.parent / INDEX).is_file())
    model = Model(name=str(file), source="file", revision=fingerprint({file.name: file}))
    if contents.needs_configuration:
        return _with_configuration(model, file, contents)
    entry = CATALOGUE[contents.entry]
    origin = entry.origin
    assert isinstance(origin, Hub)
    if contents.prediction.sampler is not None:
        entry = entry.model_copy(update={"scheduler": contents.prediction.sampler})
    entry, note = with_few_steps(entry, file.stem, read_metadata(file))
    if note:
        contents = replace(contents, notes=(*contents.notes, note))
    if contents.component is not None:
        # All other components come from the catalogue model.
        located = hub.locate(origin, download=download, elsewhere=(contents.component,))
        return LocatedModel(
            model=model,
            folder=located.folder,
            entry=entry,
            components={contents.component: file},
            variant=located.variant,
            without=origin.without,
            weights=(*located.weights, file),
            downloads=located.downloads,
            contents=contents,
        )
    folder = file.parent
    if not (folder / INDEX).is_file():
        try:
            folder = hub.locate(origin, download=download, config_only=True).folder
        except Unsupported as error:
            raise Unsupported(
                f"{path} holds only weights; its configuration and tokenizers (a few MB) come from {entry.name}, "
                f"but {error}. Or put the file into a folder that has them and a {INDEX}"
            ) from error
    return LocatedModel(
        model,
        folder,
        entry,
        # A denoiser that diffusers cannot read as it is, is read by itself.
        components={} if contents.is_plain else {contents.denoiser_name: file},
        checkpoint=file,
        without=origin.without,
        weights=(file,),
        contents=contents,
    )


def _with_configuration(model: Model, file: Path, contents: Contents) -> LocatedModel:
    """Find a file of SD 2, whose configuration must lie beside it, since it has the prediction type."""
    folder = file.parent
    kind = read_index(folder, str(folder))["_class_name"]
    scheduler = folder / "scheduler" / "scheduler_config.json"
    predicts = str(read_config(scheduler).get("prediction_type", "epsilon"))
    if kind != CATALOGUE["sd15"].pipeline or (contents.prediction.is_v and predicts != "v_prediction"):
        raise UnusableModel(
            f"{file} is an SD 2 model ({contents.prediction.note or 'unmarked'}), but {folder} configures a {kind} "
            f"that predicts {predicts[:40]}; correct {scheduler}"
        )
    note = f"read as a model that predicts {predicts[:40]}, as {scheduler} says"
    contents = replace(contents, notes=(*contents.notes, note))
    without = ("safety_checker", "feature_extractor")
    return LocatedModel(
        model, folder, None, checkpoint=file, without=without, weights=(file,), contents=contents
    )
