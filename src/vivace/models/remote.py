"""A pipeline on the Hugging Face hub: what of it lies in this machine's cache, what is still to be fetched.

The cache comes first; with everything in it, the network is never asked. Small files (configuration, tokenizers) are
fetched at once, since they say what the model is; weights are gigabytes and wait until somebody wants to draw.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from vivace.errors import Unsupported, UnusableModel
from vivace.models import hub
from vivace.models.entry import Hub, Part
from vivace.models.repository import INDEX, Chosen, check_no_code, choose, read_index

_LORA = "lora"  # no component has this name


@dataclass(frozen=True)
class Download:
    """Files of a repository, by a commit or tag, that are not all in the cache."""

    repo: str
    revision: str
    files: tuple[str, ...]


@dataclass(frozen=True)
class Located:
    """A pipeline in the hub's cache, perhaps without all its weights.

    folder: holds model_index.json and the other small files, and the weights that are there.
    parts: components that other repositories give, as far as they are there.
    weights: the safetensors files to load, whether they are there or not.
    revision: the commits that it is made of, 12 digits of each.
    """

    folder: Path
    parts: dict[str, Path]
    lora: Path | None
    variant: str | None
    weights: tuple[Path, ...]
    downloads: tuple[Download, ...]
    revision: str


def locate(
    origin: Hub, *, download: bool = True, elsewhere: Collection[str] = (), config_only: bool = False
) -> Located:
    """Find a pipeline in the cache, or on the hub.

    Args:
        download: fetch small files that are missing; False looks at the cache alone.
        elsewhere: components that are taken from somewhere else.
        config_only: leave all weights out.

    Raises:
        UnusableModel: it is no text-to-image pipeline, has no safetensors, or brings code.
        Unsupported: it cannot be had here and now: no such repository, no network, no permission, no room.
    """
    called = origin.repo if origin.revision is None else f"{origin.repo}@{origin.revision}"
    folder = _with_index(origin, called, download)
    index = read_index(folder, called)

    def chosen_of(names: Iterable[str]) -> Chosen:
        return choose(
            index,
            names,
            called,
            variants=origin.variants,
            without=origin.without,
            elsewhere={*origin.parts, *elsewhere},
        )

    chosen = chosen_of(hub.names(origin.repo, folder, download=False))
    if chosen.lacks is not None and download:
        # Perhaps only here: what lies in the cache may be a part of what there is.
        chosen = chosen_of(hub.names(origin.repo, folder))
    if chosen.lacks is not None:
        raise UnusableModel(chosen.lacks)
    if not _all_there(folder, chosen.small):
        if not download:
            raise _not_cached(called)
        hub.fetch(origin.repo, folder.name, chosen.small)
    check_no_code(folder, chosen.small, called)
    wanted = () if config_only else chosen.weights
    others = {} if config_only else {k: part for k, part in _others(origin).items() if k not in elsewhere}
    there = {name: path for name, part in others.items() if (path := cached_part(part)) is not None}
    downloads = [] if _all_there(folder, wanted) else [Download(origin.repo, folder.name, wanted)]
    downloads += [Download(p.repo, p.revision, p.files) for name, p in others.items() if name not in there]
    weights = [folder / name for name in wanted]
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


def cached_part(part: Part) -> Path | None:
    """Its folder in the cache, or its one file; None if not all of it is there."""
    folder = hub.cached(part.repo, part.revision, part.files)
    if folder is None or not _all_there(folder, part.files):
        return None
    return folder / part.files[0] if len(part.files) == 1 else folder


def fetch_part(part: Part) -> Path:
    """`cached_part`, fetched if need be.

    Raises:
        Unsupported: see `vivace.models.hub.fetch`.
    """
    found = cached_part(part)
    if found is None:
        fetch([Download(part.repo, part.revision, part.files)])
        found = cached_part(part)
    if found is None:
        raise Unsupported(f"{part.repo} has no {', no '.join(part.files)} at {part.revision}; update vivace")
    return found


def fetch(downloads: Iterable[Download]) -> None:
    """Fetch files into the hub's cache, with bars if there is a terminal.

    Whatever was fetched whole before an interruption is kept.

    Raises:
        Unsupported: no network, no permission, no room.
    """
    for wanted in downloads:
        hub.check_room(wanted.repo, wanted.revision, wanted.files)
        hub.fetch(wanted.repo, wanted.revision, wanted.files, bars=True)


def _others(origin: Hub) -> dict[str, Part]:
    """What other repositories give, by component."""
    return origin.parts | ({_LORA: origin.lora} if origin.lora is not None else {})


def _weights_of(path: Path, part: Part) -> list[Path]:
    if path.is_file():
        return [path]
    return [path / name for name in part.files if name.endswith(".safetensors")]


def _with_index(origin: Hub, called: str, download: bool) -> Path:
    folder = hub.cached(origin.repo, origin.revision, [INDEX])
    if folder is not None and (folder / INDEX).is_file():
        return folder
    if not download:
        raise _not_cached(called)
    folder = hub.fetch(origin.repo, origin.revision, [INDEX])
    if not (folder / INDEX).is_file():
        raise UnusableModel(_no_index(called, hub.names(origin.repo, folder)))
    return folder


def _no_index(called: str, names: Iterable[str]) -> str:
    single = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    if single:
        return (
            f"{called} has no {INDEX}: it is no pipeline in diffusers' format. It has single files: fetch one "
            f"(`hf download {called.partition('@')[0]} {single[0]}`), and give its path"
        )
    return f"{called} has no {INDEX}: it is no pipeline in diffusers' format; give one that is"


def _not_cached(called: str) -> Unsupported:
    return Unsupported(
        f"{called} is not in this machine's cache of the hub; fetch it while there is a network"
    )


def _all_there(folder: Path, names: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in names)
