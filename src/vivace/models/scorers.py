"""Models that score images: CLIP, and BLIP as a second witness; embedded, in folders, and on the Hugging Face hub."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import UnknownModel, Unsupported, nearest
from vivace.foundation.untrusted.files import is_path, not_there, read_json, user_path
from vivace.models import hub
from vivace.models.bounds import ADAPTER, check_files, check_places
from vivace.models.find import WEIGHTS
from vivace.models.headers import check_whole
from vivace.models.model_files import fingerprint

_WEIGHTS = "model.safetensors"
# A model needs one file of each row; the second names are those of other transformers versions.
_NEEDED = (
    ("config.json",),
    ("preprocessor_config.json", "processor_config.json"),
    ("tokenizer.json", "vocab.json", "vocab.txt"),
    (_WEIGHTS,),
)
_SMALL = (
    *(name for names in _NEEDED for name in names if name != _WEIGHTS),
    *("tokenizer_config.json", "special_tokens_map.json", "merges.txt"),
)
# The only files that are downloaded: no pickles (.bin, .pt), no weights of other frameworks, no code.
_FILES = (*_SMALL, _WEIGHTS)
_FUNCTION = re.compile(r"[A-Za-z_]\w+(?:\.\w+)*:[A-Za-z_]\w*", re.ASCII)  # longer than a drive of Windows
_REPOSITORY = re.compile(r"\w+(?:[.-]\w+)*/\w+(?:[.-]\w+)*", re.ASCII)
_REVISION = re.compile(r"\w[\w-]*(?:[./][\w-]+)*", re.ASCII)  # without "..": it is a file name in the cache
EMBEDDED = "embedded"
"""The name of whichever scorer ships with vivace."""


@dataclass(frozen=True)
class _Kind:
    """A kind of scorer: `model_type` in its config.json, its name in messages, and a good one."""

    model_type: str
    label: str
    known_good: str


# "clip_text_model" is only a text encoder, as in a pipeline.
_CLIP = _Kind("clip", "CLIP", "openai/clip-vit-large-patch14")
_BLIP = _Kind("blip", "BLIP", "Salesforce/blip-itm-base-coco@refs/pr/5")


@dataclass(frozen=True)
class LocatedScorer:
    """A local model that scores images: its name, a fingerprint of its files, and their folder.

    `prompt_set` is the key in `vivace.models.prompts` of prompts that this model understands. `witness` is a second
    model that scores the same images. `is_function`: it is "module:function" of the user's own, whose module lies in
    the folder.
    """

    name: str
    revision: str
    folder: Path
    prompt_set: str
    witness: LocatedScorer | None = None
    is_function: bool = False

    @property
    def id(self) -> str:
        """The key of its figures: other names or files make another scorer."""
        return f"{self.name}@{self.revision}" + (f" and {self.witness.id}" if self.witness else "")


def find_witness(name: str, *, download: bool = True) -> LocatedScorer:
    """Find a BLIP model for image-text matching by its folder, or by its repository on the hub.

    Args, Raises: see `find_scorer`.
    """
    return _find(name, _BLIP, download)


def find_scorer(name: str, *, download: bool = True) -> LocatedScorer:
    """Find a CLIP model by the name of an embedded one, by its folder, or by its repository on the hub.

    Args:
        name: e.g. "tiny-clip" or "embedded", "path/to/clip", "openai/clip-vit-large-patch14", or the latter with "@"
            and a branch, tag or commit. Cached models need no network. Only configuration, tokenizer and safetensors
            are downloaded. "module:function" is a function of the user's own.
        download: download missing files; False uses only the cache.

    Raises:
        UnknownModel: there is no such scorer, or it is not a CLIP model in safetensors format.
        Unsupported: it cannot be downloaded: no network, no permission, no disk space.
    """
    embedded = _embedded()
    if name.strip().lower() in (EMBEDDED, *embedded):
        name = name.strip().lower() if name.strip().lower() in embedded else embedded[0]
        return _found(name, WEIGHTS / name, "tinyworld")
    if _FUNCTION.fullmatch(name):
        return _find_function(name)
    return _find(name, _CLIP, download)


def _find_function(name: str) -> LocatedScorer:
    """Find the module of a function by Python's path or in the current folder. It is not imported yet."""
    module, _, function = name.partition(":")
    sys.path.append(os.getcwd())
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        spec = None
    finally:
        sys.path.pop()
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise UnknownModel(
            f"--scorer {name}: Python finds no module {module}; give module:function of a module that is installed, or "
            "lies in the current folder"
        )
    file = Path(spec.origin).resolve()
    if any((folder / "model_index.json").exists() for folder in file.parents) or list(
        file.parent.glob("*.safetensors")
    ):
        raise UnknownModel(
            f"--scorer {name}: {file} lies in a model's folder, whose code is never run; move it"
        )
    try:
        named = {getattr(node, "name", "") for node in ast.parse(file.read_bytes()).body}
    except SyntaxError as error:
        raise UnknownModel(f"--scorer {name}: {file} is not valid Python ({error})") from None
    if function not in named:
        raise UnknownModel(f"--scorer {name}: {file} defines no {function}{nearest(function, named)}")
    root = file.parents[module.count(".") + (file.name == "__init__.py")]
    revision = hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    return LocatedScorer(name, revision, root, "real", is_function=True)


def _find(name: str, kind: _Kind, download: bool) -> LocatedScorer:
    embedded = _embedded() if kind is _CLIP else []
    folder = user_path(name)
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):  # too long, or a NUL byte
        is_folder = False
    if is_folder:
        resolved = folder.resolve()
        _check(resolved, str(resolved), kind)
        return _found(str(resolved), resolved, "real")
    if is_path(name):
        raise UnknownModel(not_there(name))
    repo, at, revision = name.strip().partition("@")
    if not _REPOSITORY.fullmatch(repo) or (at and not _REVISION.fullmatch(revision)):
        names = "".join(f"{scorer}, " for scorer in embedded)
        raise UnknownModel(
            f"no scorer '{name[:200]}'{nearest(name, embedded)} (give {names}the folder of a {kind.label} model, or a "
            f"repository of the Hugging Face hub such as {kind.known_good})"
        )
    return _found(name.strip(), _on_the_hub(repo, revision or None, kind, download), "real")


def _embedded() -> list[str]:
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json") if _is(path.parent, _CLIP))


def _found(name: str, folder: Path, prompt_set: str) -> LocatedScorer:
    # Only the relevant files: a folder in the hub's cache may hold others, downloaded by other programs.
    files = {file: folder / file for file in sorted(_FILES) if (folder / file).is_file()}
    return LocatedScorer(name, fingerprint(files), folder, prompt_set)


def _is(folder: Path, kind: _Kind) -> bool:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("model_type") == kind.model_type


def _missing(folder: Path) -> list[str]:
    """Return the required files that are missing."""
    return [names[0] for names in _NEEDED if not any((folder / name).is_file() for name in names)]


def _check(folder: Path, label: str, kind: _Kind) -> None:
    """Raise UnknownModel for anything but a complete model without code. `label` is its name in messages."""
    check_places(folder, ())
    if (folder / "config.json").is_file() and not _is(folder, kind):
        raise UnknownModel(
            f'{label} is not a {kind.label} model: its config.json has no model_type "{kind.model_type}"; give one '
            f"such as {kind.known_good}"
        )
    if missing := _missing(folder):
        advice = f"give a {kind.label} model such as {kind.known_good}"
        if missing == [_WEIGHTS]:
            advice = "vivace loads no pickles; give a revision or a model that has safetensors"
        raise UnknownModel(f"{label} has no {', no '.join(missing)}; {advice}")
    small = [name for name in (*_SMALL, ADAPTER) if (folder / name).is_file()]
    check_files(folder, small, [_WEIGHTS], label, UnknownModel)
    check_whole([folder / _WEIGHTS])


def _on_the_hub(repo: str, revision: str | None, kind: _Kind, download: bool) -> Path:
    """Return the folder in the hub's cache that holds the complete repository at that revision."""
    label = repo if revision is None else f"{repo}@{revision}"
    folder = hub.cached(repo, revision, _FILES)
    if folder is not None and _is(folder, kind) and not _missing(folder):
        _check(folder, label, kind)
        return folder
    if not download:
        raise Unsupported(
            f"the scorer {label} is not in the local cache of the Hugging Face hub; download it while there is a "
            "network"
        )
    # Small files first: they tell whether the weights, often gigabytes, are worth downloading.
    folder = hub.fetch(repo, revision, _SMALL)
    if _is(folder, kind):
        hub.check_disk_space(repo, folder.name, _FILES)
        folder = hub.fetch(repo, folder.name, _FILES, bars=True)
    _check(folder, label, kind)
    return folder
