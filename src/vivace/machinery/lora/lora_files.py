"""Locate a LoRA: a local file, a folder, or a file of a Hugging Face hub repository; and its identity.

In a recipe it is one text: a path, or `org/repo`, `org/repo/FILE.safetensors` or either with `@REVISION` for the hub.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from vivace.errors import Unsupported, UnusableModel
from vivace.foundation.untrusted.files import open_plain, read_object, reading, user_path
from vivace.models import hub
from vivace.models.checkpoints.headers import read_header

SUFFIX = ".safetensors"
USUAL = "pytorch_lora_weights.safetensors"
"""The name that diffusers gives a LoRA in a folder."""
PEFTS = "adapter_model.safetensors"
"""The name that PEFT gives an adapter in a folder."""
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DIGITS = 16
_BLOCK = 1 << 22  # bytes
_ON_HUB = re.compile(
    r"(?P<repo>\w[\w.-]*/\w[\w.-]*?)(?P<file>(?:/[\w .()+-]+)+\.safetensors)?(?:@(?P<revision>\w[\w./-]*))?",
    re.ASCII,
)
CONFIG = "adapter_config.json"
_KINDS = ("LORA", "LOHA", "LOKR")
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that subtract the initial matrices from the model's weights."""


# Source: peft, LoraConfig, LoHaConfig, LoKrConfig; diffusers, `lora_adapter_metadata`.
@dataclass(frozen=True)
class PeftSettings:
    """Settings with which one adapter was made: PEFT's names and values, and whether they are another file's, which may
    not belong to this one."""

    where: str
    values: Mapping[str, Any]
    is_beside: bool = False

    def problem(self) -> str | None:
        """Return why these settings cannot be applied to weights; None if they can."""
        kind = str(self.values.get("peft_type", "LORA")).upper()
        if kind not in _KINDS:
            return f"{self.where} says that it is {kind[:40]}; vivace adds {', '.join(_KINDS)}"
        if self.values.get("use_dora"):
            return f"{self.where} says use_dora: it is DoRA, which rescales the weights after adding"
        start = str(self.values.get("init_lora_weights", "")).lower()
        if start.startswith(_CHANGES_MODEL):
            return (
                f"{self.where} says init_lora_weights={start[:40]!r}, which takes a part out of the model's weights; "
                "convert it with PEFT: save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        if self.values.get("layer_replication"):
            return f"{self.where} says layer_replication: it is for a model with repeated layers"
        return None

    def scale(self, names: tuple[str, ...], rank: int) -> float | None:
        """Return alpha / rank of a layer, None without an alpha; ValueError for no number or another rank."""
        stated = _patterned(self.values.get("rank_pattern"), names, self.values.get("r"))
        if (
            self.is_beside
            and stated is not None
            and stated != rank
            and self.values.get("peft_type", "LORA") == "LORA"
        ):
            raise ValueError(f"says rank {stated:g} for {names[-1]}, which has rank {rank}")
        alpha = _patterned(
            self.values.get("alpha_pattern"), names, self.values.get("lora_alpha", self.values.get("alpha"))
        )
        by = rank if stated is None else stated
        if self.values.get("use_rslora"):
            return (by if alpha is None else alpha) / math.sqrt(by)
        return None if alpha is None else alpha / by


@dataclass(frozen=True)
class OnHub:
    """A file of a hub repository; `file` is "" if the repository is to have a single one."""

    repo: str
    file: str
    revision: str | None


def on_hub(path: str) -> OnHub | None:
    """Return the hub's repository and file that a text names; None if it can only be a local path."""
    match = _ON_HUB.fullmatch(path)
    if match is None or ".." in path:
        return None
    return OnHub(match["repo"], (match["file"] or "").lstrip("/"), match["revision"])


def short_name(path: str) -> str:
    """Return the name of a LoRA in tables: its file's without the suffix, or its folder's or repository's."""
    last = Path(path.partition("@")[0].replace("\\", "/"))
    return (
        last.parent.name
        if last.name in (USUAL, PEFTS) and last.parent.name
        else last.name.removesuffix(SUFFIX)
    )


def locate_lora(path: str) -> Path:
    """Return the local file, downloaded if it is on the hub; UnusableModel, or Unsupported where there is none."""
    file = user_path(path)
    if file.suffix.lower() in _PICKLES:
        raise UnusableModel(
            f"{path} is a pickle, which can run code when it is loaded; vivace loads {SUFFIX} only. Convert it where "
            "you trust it: safetensors.torch.save_file(torch.load(FILE, weights_only=True), NEW)"
        )
    try:
        is_folder, is_there = file.is_dir(), file.exists()
    except (OSError, ValueError):  # too long, or a NUL byte
        is_folder = is_there = False
    if is_folder:
        return file / _single([entry.name for entry in file.iterdir()], path, _folders_with_one(file))
    if is_there:
        if file.suffix.lower() != SUFFIX:
            raise UnusableModel(f"{path} is not a {SUFFIX} file; give a LoRA in that format")
        return file
    remote = on_hub(path)
    if remote is None:
        raise Unsupported(
            f"there is no LoRA '{path[:200]}'; give the path of a {SUFFIX} file, in quotes if it is not a plain word, "
            "or 'org/repo/FILE.safetensors' of the Hugging Face hub"
        )
    return _downloaded(remote, path)


def settings_for(file: Path, keys: Collection[str]) -> Path | None:
    """Return the JSON file beside a LoRA with the settings of its PEFT adapter; None if it has none."""
    config = file.with_name(CONFIG)
    if not config.is_file():
        return None
    others = [path for path in file.parent.iterdir() if path.suffix == SUFFIX and path.name != file.name]
    return config if _is_adapter(file, keys) or not others else None


def digest(file: Path) -> str:
    """Return the first digits of the sha256 of a LoRA and of PEFT's settings beside it."""
    with reading(file):
        files = [file]
        if file.with_name(CONFIG).is_file() and (config := settings_for(file, read_header(file))) is not None:
            files.append(config)
        stats = [path.stat() for path in files]
        return _digest(
            tuple(
                (str(path.resolve()), stat.st_mtime_ns, stat.st_size)
                for path, stat in zip(files, stats, strict=True)
            )
        )


@functools.lru_cache(maxsize=64)
def _digest(files: tuple[tuple[str, int, int], ...]) -> str:
    sha = hashlib.sha256()
    for file, _, _ in files:
        with open_plain(Path(file)) as content:
            while block := content.read(_BLOCK):
                sha.update(block)
    return sha.hexdigest()[:_DIGITS]


def _downloaded(remote: OnHub, path: str) -> Path:
    files = [remote.file] if remote.file else ["*" + SUFFIX]
    if remote.file:
        folder = hub.cached(remote.repo, remote.revision, files)
        if folder is not None and (folder / remote.file).is_file():
            return _with_settings(remote, folder / remote.file, remote.file)
    else:
        listing = hub.fetch(remote.repo, remote.revision, ["README.md"])
        files = [_single(hub.names(remote.repo, listing), path)]
    folder = hub.fetch(remote.repo, remote.revision, files, bars=True)
    if not (folder / files[0]).is_file():
        raise Unsupported(
            f"{remote.repo} has no {files[0]}; give one of its {SUFFIX} files: 'org/repo/FILE{SUFFIX}'"
        )
    return _with_settings(remote, folder / files[0], files[0])


def _with_settings(remote: OnHub, file: Path, name: str) -> Path:
    """Return a downloaded file; if it is PEFT's adapter, with the json with its settings beside it if there is one."""
    if file.with_name(CONFIG).is_file() or not _is_adapter(file, read_header(file)):
        return file
    config = PurePosixPath(name).with_name(CONFIG).as_posix()
    try:
        folder = hub.fetch(remote.repo, remote.revision, [name, config])
    except Unsupported:
        return file  # no network: alpha is assumed, and said to be
    return folder / name


def _is_adapter(file: Path, keys: Collection[str]) -> bool:
    """Whether a file is an adapter as PEFT saves it, without alpha."""
    return file.name == PEFTS or any(key.startswith("base_model.") for key in keys)


def _folders_with_one(folder: Path) -> list[str]:
    """Return the names of the folders in a folder that have a LoRA, as PEFT's scripts save them for each component."""
    return sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and any(entry.glob("*" + SUFFIX))
    )


def _single(names: list[str] | tuple[str, ...], path: str, folders: Sequence[str] = ()) -> str:
    files = sorted(name for name in names if name.endswith(SUFFIX))
    usual = next((name for name in (USUAL, PEFTS) if name in files), None)
    if usual is not None:
        return usual
    if len(files) == 1:
        return files[0]
    listed_files = ", ".join(files[:8]) + (", ..." if len(files) > 8 else "")
    what = f"has {len(files)} files in {SUFFIX} format ({listed_files})" if files else f"has no {SUFFIX} file"
    if folders and not files:
        raise UnusableModel(
            f"{path} {what} itself; its folders {', '.join(folders)} do: give them, each as a LoRA"
        )
    raise UnusableModel(f"{path} {what}; give one file")


def read_settings(config: Path) -> PeftSettings:
    with reading(config, advice="give the adapter as PEFT saved it"):
        values = read_object(config)
    return PeftSettings(config.name, values, is_beside=True)


def settings_of_header(metadata: Any, attribute: str) -> PeftSettings | None:
    """Return the settings that diffusers wrote into a file's header for one component; None if there are none."""
    start = f"{attribute}."
    values = {
        key.removeprefix(start): value
        for key, value in (metadata.items() if isinstance(metadata, dict) else ())
        if key.startswith(start)
    }
    return PeftSettings("its header", values) if values else None


def _patterned(patterns: Any, names: tuple[str, ...], default: Any) -> float | None:
    """Return PEFT's value for a layer: that of the first pattern that its name ends with, else the default."""
    value = default
    if isinstance(patterns, dict):
        for pattern, own in patterns.items():
            if any(re.fullmatch(rf"(.*\.)?({pattern})", name) for name in names):
                value = own
                break
    if value is None:
        return None
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"has {value!r} where a number is expected")
    return number
