"""A pipeline on the Hugging Face hub: which of its files are cached, and which must be downloaded.

The cache comes first; if everything is cached, the network is not used. Small files (configuration, tokenizers) are
downloaded at once, since they identify the model. Weights are downloaded only when images are to be generated.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures.entry import Hub, StoredPart
from vivace.errors import Unsupported, UnusableModel
from vivace.models import hub
from vivace.models.bounds import check_files
from vivace.models.repository import INDEX, MODULAR_INDEX, Chosen, choose, has_no_pipeline, read_index

_LORA = "lora"  # no component has this name


@dataclass(frozen=True)
class ModelDownload:
    """Files of a repository at a commit or tag, not all cached yet."""

    repo: str
    revision: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Located:
    """A pipeline in the hub's cache, possibly without all its weights.

    folder: holds model_index.json, the other small files, and the cached weights.
    parts: cached components from other repositories.
    weights: the safetensors files to load, cached or not.
    revision: the first 12 digits of the commit of each repository.
    """

    folder: Path
    parts: dict[str, Path]
    lora: Path | None
    variant: str | None
    weights: tuple[Path, ...]
    downloads: tuple[ModelDownload, ...]
    revision: str


def locate(
    origin: Hub, *, download: bool = True, elsewhere: Collection[str] = (), config_only: bool = False
) -> Located:
    """Find a pipeline in the cache, or on the hub.

    Args:
        download: download missing small files; False uses only the cache.
        elsewhere: components that are taken from somewhere else.
        config_only: leave all weights out.

    Raises:
        UnusableModel: it is not a text-to-image pipeline, has no safetensors, or contains code.
        Unsupported: it cannot be downloaded: no such repository, no network, no permission, no disk space.
    """
    label = origin.repo if origin.revision is None else f"{origin.repo}@{origin.revision}"
    folder = _with_index(origin, label, download)
    index = read_index(folder, label)

    def chosen_of(names: Iterable[str]) -> Chosen:
        return choose(
            index,
            names,
            label,
            variants=origin.variants,
            without=origin.without,
            elsewhere={*origin.parts, *elsewhere},
        )

    chosen = chosen_of(hub.names(origin.repo, folder, download=False))
    if chosen.missing is not None and download:
        # The cache may hold only some of the repository's files.
        chosen = chosen_of(hub.names(origin.repo, folder))
    if chosen.missing is not None:
        raise UnusableModel(chosen.missing)
    if not _all_there(folder, chosen.small):
        if not download:
            raise _not_cached(label)
        hub.fetch(origin.repo, folder.name, chosen.small)
    check_files(folder, chosen.small, chosen.weights, label)
    weight_files = () if config_only else chosen.weights
    others = {} if config_only else {k: part for k, part in _others(origin).items() if k not in elsewhere}
    there = {name: path for name, part in others.items() if (path := cached_part(part)) is not None}
    downloads = (
        [] if _all_there(folder, weight_files) else [ModelDownload(origin.repo, folder.name, weight_files)]
    )
    downloads += [
        ModelDownload(p.repo, p.revision, p.files) for name, p in others.items() if name not in there
    ]
    weights = [folder / name for name in weight_files]
    weights += [file for name, path in there.items() for file in _weights_of(path, others[name])]
    commits = [folder.name, *(part.revision for part in others.values())]
    return Located(
        folder=folder,
        lora=there.pop(_LORA, None),
        parts=there,
        variant=chosen.variant,
        weights=tuple(weights),
        downloads=tuple(downloads),
        revision="+".join(commit[:12] for commit in commits),
    )


def cached_part(part: StoredPart) -> Path | None:
    """Return its folder in the cache, or its single file; None if it is not completely cached."""
    folder = hub.cached(part.repo, part.revision, part.files)
    if folder is None or not _all_there(folder, part.files):
        return None
    return folder / part.files[0] if len(part.files) == 1 else folder


def fetch_part(part: StoredPart) -> Path:
    """Return `cached_part`, downloaded if necessary.

    Raises:
        Unsupported: see `vivace.models.hub.fetch`.
    """
    path = cached_part(part)
    if path is None:
        fetch([ModelDownload(part.repo, part.revision, part.files)])
        path = cached_part(part)
    if path is None:
        raise Unsupported(f"{part.repo} has no {' or '.join(part.files)} at {part.revision}; update vivace")
    return path


def fetch(downloads: Iterable[ModelDownload]) -> None:
    """Download files into the hub's cache, with progress bars if there is a terminal.

    After an interruption, complete files are kept.

    Raises:
        Unsupported: no network, no permission, no disk space.
    """
    for download in downloads:
        hub.check_disk_space(download.repo, download.revision, download.files)
        hub.fetch(download.repo, download.revision, download.files, bars=True)


def _others(origin: Hub) -> dict[str, StoredPart]:
    """Return the parts that come from other repositories, by component."""
    return origin.parts | ({_LORA: origin.lora} if origin.lora is not None else {})


def _weights_of(path: Path, part: StoredPart) -> list[Path]:
    if path.is_file():
        return [path]
    return [path / name for name in part.files if name.endswith(".safetensors")]


def _with_index(origin: Hub, label: str, download: bool) -> Path:
    folder = hub.cached(origin.repo, origin.revision, [INDEX])
    if folder is not None and (folder / INDEX).is_file():
        return folder
    if not download:
        raise _not_cached(label)
    folder = hub.fetch(origin.repo, origin.revision, [INDEX])
    if not (folder / INDEX).is_file():
        raise UnusableModel(_no_index(label, hub.names(origin.repo, folder)))
    return folder


def _no_index(label: str, names: Collection[str]) -> str:
    if MODULAR_INDEX in names:
        return has_no_pipeline(label)
    single = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if single:
        return (
            f"{label} has no {INDEX}, so it is not a pipeline in diffusers' format. It has single files: download one "
            f"(`hf download {label.partition('@')[0]} {single[0]}`), and give its path"
        )
    return f"{label} has no {INDEX}, so it is not a pipeline in diffusers' format; give one that is"


def _not_cached(label: str) -> Unsupported:
    return Unsupported(
        f"{label} is not in the local cache of the Hugging Face hub; download it while there is a network"
    )


def _all_there(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)
