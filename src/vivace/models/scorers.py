"""CLIP models that score pictures: embedded ones, local folders, and repositories of the Hugging Face hub."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import UnknownModel, Unsupported, nearest
from vivace.models import hub
from vivace.models.files import fingerprint
from vivace.models.find import WEIGHTS

_WEIGHTS = "model.safetensors"
# Without one of each row a CLIP model does not load; the second names are another age's of transformers.
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
# All that is ever fetched: no pickles (.bin, .pt), no other framework's weights, no code.
_FILES = (*_SMALL, _WEIGHTS)
_REPOSITORY = re.compile(r"\w+(?:[.-]\w+)*/\w+(?:[.-]\w+)*", re.ASCII)
_REVISION = re.compile(r"\w[\w-]*(?:[./][\w-]+)*", re.ASCII)  # never "..": it names a file in the cache
_KNOWN_GOOD = "openai/clip-vit-large-patch14"


@dataclass(frozen=True)
class FoundScorer:
    """A CLIP model that is on this machine: its name, a fingerprint of its files, and their folder.

    `prompt_set` is the key in `vivace.models.prompts` of prompts such as this model understands.
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
    """A CLIP model by the name of an embedded one, by its folder, or by its repository on the hub.

    Args:
        name: e.g. "tiny-clip", "path/to/clip", "openai/clip-vit-large-patch14", or that with "@" and a branch, tag
            or commit. What is cached needs no network; what is fetched is configuration, tokenizer and safetensors.
        download: fetch what is missing; False looks at the cache alone.

    Raises:
        UnknownModel: there is no such scorer, or what is there is no CLIP model in safetensors.
        Unsupported: it cannot be had here and now: no network, no permission, no room.
    """
    embedded = _embedded()
    if name.strip().lower() in embedded:
        name = name.strip().lower()
        return _found(name, WEIGHTS / name, "tinyworld")
    folder = Path(name).expanduser()
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
    # Only the files that count: a folder in the hub's cache may hold others, fetched by other programs.
    files = {file: folder / file for file in sorted(_FILES) if (folder / file).is_file()}
    return FoundScorer(name, fingerprint(files), folder, prompt_set)


def _is_clip(folder: Path) -> bool:
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError):
        return False
    # "clip_text_model" is half a CLIP: a pipeline's text encoder.
    return isinstance(config, dict) and config.get("model_type") == "clip"


def _missing(folder: Path) -> list[str]:
    """Files without which a CLIP model does not load."""
    return [names[0] for names in _NEEDED if not any((folder / name).is_file() for name in names)]


def _check(folder: Path, called: str) -> None:
    """Raises UnknownModel for what is no whole CLIP model; `called` is what the user knows it by."""
    if (folder / "config.json").is_file() and not _is_clip(folder):
        raise UnknownModel(
            f'{called} is not a CLIP model: its config.json has no model_type "clip"; give one such as {_KNOWN_GOOD}'
        )
    if missing := _missing(folder):
        advice = f"give a CLIP model such as {_KNOWN_GOOD}"
        if missing == [_WEIGHTS]:
            advice = "vivace loads no pickles; give a revision or a model that has safetensors"
        raise UnknownModel(f"{called} has no {', no '.join(missing)}; {advice}")


def _on_the_hub(repo: str, revision: str | None, download: bool) -> Path:
    """The folder in the hub's cache that holds the repository at that revision, complete."""
    called = repo if revision is None else f"{repo}@{revision}"
    folder = hub.cached(repo, revision, _FILES)
    if folder is not None and _is_clip(folder) and not _missing(folder):
        return folder
    if not download:
        raise Unsupported(
            f"the scorer {called} is not in this machine's cache of the hub; fetch it while there is a network"
        )
    # The small files first: they tell whether the weights, often gigabytes, are worth fetching.
    folder = hub.fetch(repo, revision, _SMALL)
    if _is_clip(folder):
        hub.check_room(repo, folder.name, _FILES)
        folder = hub.fetch(repo, folder.name, _FILES, bars=True)
    _check(folder, called)
    return folder
