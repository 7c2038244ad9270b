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

from vivace.errors import UnknownModel, Unsupported, UsageError, nearest
from vivace.foundation.spec.limits import JudgeKind
from vivace.foundation.untrusted.files import is_path, not_there, read_json, user_path
from vivace.models import hub
from vivace.models.bounds import ADAPTER, check_files, check_places
from vivace.models.checkpoints.headers import check_whole
from vivace.models.find import WEIGHTS, repository_in
from vivace.models.model_files import exists_as, fingerprint

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
EMBEDDED = "embedded"
"""The name of whichever scorer ships with vivace."""
PICKSCORE = "yuvalkirstain/PickScore_v1"
_KINDS: dict[str, JudgeKind] = {"clip": "clip", "pickscore": "clip", "hpsv2": "clip", "blip": "blip"}
_NOT_LOADED = {
    "imagereward": "ImageReward is published as a pickle, which vivace does not load",
    "hpsv3": "HPSv3 is no CLIP model, and vivace does not know how to ask it",
}
_KNOWN_GOOD = {"clip": "openai/clip-vit-large-patch14", "blip": "Salesforce/blip-itm-base-coco@refs/pr/5"}


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


@dataclass(frozen=True)
class LocatedJudge:
    """A model that scores images, queried as a CLIP or as a BLIP for image-text matching."""

    kind: JudgeKind
    scorer: LocatedScorer


def find_witness(name: str, *, download: bool = True) -> LocatedScorer:
    """Find a BLIP model for image-text matching by its folder, or by its repository on the hub; see `find_scorer`."""
    return _find(name, "blip", download, [])


def find_scorer(name: str, *, download: bool = True) -> LocatedScorer:
    """Find a CLIP model by the name of an embedded one, by its folder, or by its repository on the hub.

    Args:
        name: e.g. "tiny-clip" or "embedded", "path/to/clip", "openai/clip-vit-large-patch14", or the latter with "@"
            and a branch, tag or commit. Cached models need no network. Only configuration, tokenizer and safetensors
            are downloaded. "module:function" is a function of the user's own.
        download: download missing files; False uses only the cache.
    """
    embedded = sorted(
        path.parent.name for path in WEIGHTS.glob("*/config.json") if _model_type(path.parent) == "clip"
    )
    plain = name.strip().lower()
    if plain in (EMBEDDED, *embedded):
        plain = plain if plain in embedded else embedded[0]
        return _scorer(plain, WEIGHTS / plain, "tinyworld")
    if _FUNCTION.fullmatch(name):
        return _find_function(name)
    return _find(name, "clip", download, embedded)


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


def find_judge(text: str, *, download: bool = True) -> LocatedJudge:
    """Find a model that scores images.

    Args:
        text: KIND:NAME or NAME, where NAME is an embedded scorer, a folder, or a repository of the hub. KIND is "clip",
            "blip", "pickscore" (NAME may be left out) or "hpsv2" (a conversion to transformers' format). A folder
            without KIND is what its config.json says, any other name is a CLIP's.
    """
    head, colon, name = text.strip().partition(":")
    word, kinds = head.lower(), "clip:NAME, blip:NAME, pickscore or hpsv2:NAME"
    if word in _NOT_LOADED:
        raise UsageError(f"--witness {text}: {_NOT_LOADED[word]}; give {kinds}")
    if not colon and word in _KINDS and not user_path(head).is_dir():
        colon = ":"  # the kind alone
    if not colon or len(head) == 1:  # a drive of Windows
        name, word = text.strip(), str(_model_type(user_path(text.strip())))
        word = word if word in _KINDS else "clip"
    if word not in _KINDS:
        raise UsageError(
            f"--witness {text}: no such kind '{head}'{nearest(word, list(_KINDS))}; give {kinds}"
        )
    name = name or (PICKSCORE if word == "pickscore" else "")
    if not name:
        raise UsageError(
            f"--witness {text}: nothing after '{head}:'; give a folder, or a repository of the hub"
        )
    find = find_witness if _KINDS[word] == "blip" else find_scorer
    return LocatedJudge(_KINDS[word], find(name, download=download))


def _find(name: str, kind: JudgeKind, download: bool, embedded: list[str]) -> LocatedScorer:
    if exists_as(name)[0]:
        resolved = user_path(name).resolve()
        _check(resolved, str(resolved), kind)
        return _scorer(str(resolved), resolved, "real")
    if is_path(name):
        raise UnknownModel(not_there(name))
    origin = repository_in(name)
    if origin is None:
        names = "".join(f"{scorer}, " for scorer in embedded)
        raise UnknownModel(
            f"no scorer '{name[:200]}'{nearest(name, embedded)} (give {names}the folder of a {kind.upper()} model, or "
            f"a repository of the Hugging Face hub such as {_KNOWN_GOOD[kind]})"
        )
    return _scorer(name.strip(), _on_the_hub(origin.repo, origin.revision, kind, download), "real")


def _scorer(name: str, folder: Path, prompt_set: str) -> LocatedScorer:
    # Only the relevant files: a folder in the hub's cache may hold others, downloaded by other programs.
    files = {file: folder / file for file in sorted(_FILES) if (folder / file).is_file()}
    return LocatedScorer(name, fingerprint(files), folder, prompt_set)


def _model_type(folder: Path) -> object:
    """Return the model type in a folder's config.json; None if there is none."""
    try:
        config = read_json(folder / "config.json")
    except (OSError, ValueError):
        return None
    return config.get("model_type") if isinstance(config, dict) else None


def _missing(folder: Path) -> list[str]:
    """Return the required files that are missing."""
    return [names[0] for names in _NEEDED if not any((folder / name).is_file() for name in names)]


def _check(folder: Path, label: str, kind: JudgeKind) -> None:
    """Raise UnknownModel for anything but a complete model without code. `label` is its name in messages."""
    check_places(folder, ())
    if (folder / "config.json").is_file() and _model_type(folder) != kind:
        raise UnknownModel(
            f'{label} is not a {kind.upper()} model: its config.json has no model_type "{kind}"; give one '
            f"such as {_KNOWN_GOOD[kind]}"
        )
    if missing := _missing(folder):
        advice = f"give a {kind.upper()} model such as {_KNOWN_GOOD[kind]}"
        if missing == [_WEIGHTS]:
            advice = "vivace loads no pickles; give a revision or a model that has safetensors"
        raise UnknownModel(f"{label} has no {', no '.join(missing)}; {advice}")
    small = [name for name in (*_SMALL, ADAPTER) if (folder / name).is_file()]
    check_files(folder, small, [_WEIGHTS], label, UnknownModel)
    check_whole([folder / _WEIGHTS])


def _on_the_hub(repo: str, revision: str | None, kind: JudgeKind, download: bool) -> Path:
    """Return the folder in the hub's cache that holds the complete repository at that revision."""
    label = repo if revision is None else f"{repo}@{revision}"
    folder = hub.cached(repo, revision, _FILES)
    if folder is None or _model_type(folder) != kind or _missing(folder):
        if not download:
            raise Unsupported(
                f"the scorer {label} is not in the local cache of the Hugging Face hub; download it while there is a "
                "network"
            )
        # Small files first: they tell whether the weights, often gigabytes, are worth downloading.
        folder = hub.fetch(repo, revision, _SMALL)
        if _model_type(folder) == kind:
            hub.check_disk_space(repo, folder.name, _FILES)
            folder = hub.fetch(repo, folder.name, _FILES, bars=True)
    _check(folder, label, kind)
    return folder
