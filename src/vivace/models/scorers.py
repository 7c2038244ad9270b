"""CLIP models that score images: embedded ones, local folders, and Hugging Face hub repositories."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import UnknownModel, Unsupported, nearest
from vivace.foreign.files import read_json, user_path
from vivace.models import hub
from vivace.models.bounds import ADAPTER, check_files, check_places
from vivace.models.files import fingerprint
from vivace.models.find import WEIGHTS
from vivace.models.headers import check_whole

_WEIGHTS = "model.safetensors"
# A CLIP model needs one file of each row; the second names are those of other transformers versions.
_NEEDED = (
    ("config.json",),
    ("preprocessor_config.json", "processor_config.json"),
    ("tokenizer.json", "vocab.json"),
    (_WEIGHTS,),
)
_SMALL = (
    *(name for names in _NEEDED for name in names if name != _WEIGHTS),
    *("tokenizer_config.json", "special_tokens_map.json", "merges.txt"),
)
# The only files that are downloaded: no pickles (.bin, .pt), no weights of other frameworks, no code.
_FILES = (*_SMALL, _WEIGHTS)
_REPOSITORY = re.compile(r"\w+(?:[.-]\w+)*/\w+(?:[.-]\w+)*", re.ASCII)
_REVISION = re.compile(r"\w[\w-]*(?:[./][\w-]+)*", re.ASCII)  # without "..": it is a file name in the cache
EMBEDDED = "embedded"
"""The name of whichever scorer ships with vivace."""
_KNOWN_GOOD = "openai/clip-vit-large-patch14"


@dataclass(frozen=True)
class FoundScorer:
    """A local CLIP model: its name, a fingerprint of its files, and their folder.

    `prompt_set` is the key in `vivace.models.prompts` of prompts that this model understands.
    """

    name: str
    revision: str
    folder: Path
    prompt_set: str

    @property
    def id(self) -> str:
        """What figures are kept under: another name or other files are another scorer."""
        return f"{self.name}@{self.revision}"


def find_scorer(name: str, *, download: bool = True) -> FoundScorer:
    """Find a CLIP model by the name of an embedded one, by its folder, or by its repository on the hub.

    Args:
        name: e.g. "tiny-clip" or "embedded", "path/to/clip", "openai/clip-vit-large-patch14", or the latter with "@"
            and a branch, tag or commit. Cached models need no network. Only configuration, tokenizer and safetensors
            are downloaded.
        download: download missing files; False uses only the cache.

    Raises:
        UnknownModel: there is no such scorer, or it is not a CLIP model in safetensors format.
        Unsupported: it cannot be downloaded: no network, no permission, no disk space.
    """
    embedded = _embedded()
    if name.strip().lower() in (EMBEDDED, *embedded):
        name = name.strip().lower() if name.strip().lower() in embedded else embedded[0]
        return _found(name, WEIGHTS / name, "tinyworld")
    folder = user_path(name)
    try:
        is_folder = folder.is_dir()
    except (OSError, ValueError):  # too long, or a NUL byte
        is_folder = False
    if is_folder:
        resolved = folder.resolve()
        _check(resolved, str(resolved))
        return _found(str(resolved), resolved, "real")
    repo, at, revision = name.strip().partition("@")
    if not _REPOSITORY.fullmatch(repo) or (at and not _REVISION.fullmatch(revision)):
        known = "".join(f"{scorer}, " for scorer in embedded)
        raise UnknownModel(
            f"no scorer '{name[:200]}'{nearest(name, embedded)} (give {known}the folder of a CLIP model, or a "
            f"repository of the Hugging Face hub such as {_KNOWN_GOOD})"
        )
    return _found(name.strip(), _on_the_hub(repo, revision or None, download), "real")


def _embedded() -> list[str]:
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json") if _is_clip(path.parent))


def _found(name: str, folder: Path, prompt_set: str) -> FoundScorer:
    # Only the relevant files: a folder in the hub's cache may hold others, downloaded by other programs.
    files = {file: folder / file for file in sorted(_FILES) if (folder / file).is_file()}
    return FoundScorer(name, fingerprint(files), folder, prompt_set)


def _is_clip(folder: Path) -> bool:
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    # "clip_text_model" is only a text encoder, as in a pipeline.
    return isinstance(config, dict) and config.get("model_type") == "clip"


def _missing(folder: Path) -> list[str]:
    """Return the required files that are missing."""
    return [names[0] for names in _NEEDED if not any((folder / name).is_file() for name in names)]


def _check(folder: Path, label: str) -> None:
    """Raise UnknownModel for anything but a complete CLIP model without code. `label` names it in messages."""
    check_places(folder, ())
    if (folder / "config.json").is_file() and not _is_clip(folder):
        raise UnknownModel(
            f'{label} is not a CLIP model: its config.json has no model_type "clip"; give one such as {_KNOWN_GOOD}'
        )
    if missing := _missing(folder):
        advice = f"give a CLIP model such as {_KNOWN_GOOD}"
        if missing == [_WEIGHTS]:
            advice = "vivace loads no pickles; give a revision or a model that has safetensors"
        raise UnknownModel(f"{label} has no {', no '.join(missing)}; {advice}")
    small = [name for name in (*_SMALL, ADAPTER) if (folder / name).is_file()]
    check_files(folder, small, [_WEIGHTS], label, UnknownModel)
    check_whole([folder / _WEIGHTS])


def _on_the_hub(repo: str, revision: str | None, download: bool) -> Path:
    """Return the folder in the hub's cache that holds the complete repository at that revision."""
    label = repo if revision is None else f"{repo}@{revision}"
    folder = hub.cached(repo, revision, _FILES)
    if folder is not None and _is_clip(folder) and not _missing(folder):
        _check(folder, label)
        return folder
    if not download:
        raise Unsupported(
            f"the scorer {label} is not in the local cache of the Hugging Face hub; download it while there is a "
            "network"
        )
    # Small files first: they tell whether the weights, often gigabytes, are worth downloading.
    folder = hub.fetch(repo, revision, _SMALL)
    if _is_clip(folder):
        hub.check_disk_space(repo, folder.name, _FILES)
        folder = hub.fetch(repo, folder.name, _FILES, bars=True)
    _check(folder, label)
    return folder
