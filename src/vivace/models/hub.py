"""Files and pipelines on the Hugging Face hub, through its client and cache. If everything is cached, the network is
not used. Small files, which identify the model, are downloaded at once, weights only when images are to be
generated."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vivace.architectures.entry import Hub, StoredPart
from vivace.errors import UnknownModel, Unsupported, UnusableModel, VivaceError
from vivace.foundation.untrusted.files import user_path
from vivace.foundation.untrusted.streams import unchecked
from vivace.models.bounds import check_files
from vivace.models.repository import INDEX, MODULAR_INDEX, choose, has_no_pipeline, read_index

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG}
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


def cached(repo: str, revision: str | None, files: Sequence[str]) -> Path | None:
    """Return the cached snapshot folder, which may hold only some of the files; None if nothing is cached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _explained(repo, revision):
        try:
            folder = snapshot_download(
                repo, revision=revision, allow_patterns=list(files), local_files_only=True
            )
        except LocalEntryNotFoundError:
            return None
    return Path(folder)


def fetch(repo: str, revision: str | None, files: Sequence[str], *, bars: bool = False) -> Path:
    """Download those of the files that the repository has; return the cache folder, named by the commit."""
    from huggingface_hub import snapshot_download

    with _explained(repo, revision), _bars(bars and sys.stderr.isatty()):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))


def names(repo: str, folder: Path, *, download: bool = True) -> tuple[str, ...]:
    """Return the names of all files of the repository at the commit of `folder`, which `fetch` returned. Without
    `download` and without a cached listing, these are the files in `folder`."""
    from huggingface_hub import HfApi, get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
    from huggingface_hub.hf_api import RepoFile

    with contextlib.suppress(CachedRepoTreeNotFoundError):
        return tuple(file.path for file in get_cached_repo_tree(repo, revision=folder.name))
    if not download:
        return tuple(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    with _explained(repo, folder.name):
        tree = HfApi().list_repo_tree(repo, revision=folder.name, recursive=True)
        return tuple(file.path for file in tree if isinstance(file, RepoFile))


def check_disk_space(repo: str, revision: str, files: Sequence[str]) -> None:
    """Raise Unsupported if there is not enough disk space for the files that are not cached yet."""
    from huggingface_hub import constants, snapshot_download

    with _explained(repo, revision), _bars(False):
        snapshot = snapshot_download(repo, revision=revision, allow_patterns=list(files), dry_run=True)
        needed = sum(file.file_size or 0 for file in snapshot if file.will_download)
        cache = user_path(constants.HF_HUB_CACHE).absolute()
        free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if needed > free:
        raise Unsupported(
            f"{repo} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free in {cache}; free disk space, or set "
            "HF_HOME to a folder on a larger disk"
        )


def fetch_all(downloads: Iterable[ModelDownload]) -> None:
    """Download files into the hub's cache, with progress bars if there is a terminal."""
    for download in downloads:
        check_disk_space(download.repo, download.revision, download.files)
        fetch(download.repo, download.revision, download.files, bars=True)


def locate(
    origin: Hub, *, download: bool = True, elsewhere: Collection[str] = (), config_only: bool = False
) -> Located:
    """Find a pipeline in the cache, or on the hub.

    Args:
        download: download missing small files; False uses only the cache.
        elsewhere: components that are taken from somewhere else.
        config_only: leave all weights out.
    """
    label = origin.repo if origin.revision is None else f"{origin.repo}@{origin.revision}"
    folder = cached(origin.repo, origin.revision, [INDEX])
    if folder is None or not _all_there(folder, [INDEX]):
        if not download:
            raise _not_cached(label)
        folder = fetch(origin.repo, origin.revision, [INDEX])
        if not _all_there(folder, [INDEX]):
            raise UnusableModel(_no_index(label, names(origin.repo, folder)))
    index = read_index(folder, label)
    for may_ask in (False, True) if download else (False,):
        # The cache may hold only some of the repository's files.
        chosen = choose(
            index,
            names(origin.repo, folder, download=may_ask),
            label,
            variants=origin.variants,
            without=origin.without,
            elsewhere={*origin.parts, *elsewhere},
        )
        if chosen.missing is None:
            break
    if chosen.missing is not None:
        raise UnusableModel(chosen.missing)
    if not _all_there(folder, chosen.small):
        if not download:
            raise _not_cached(label)
        fetch(origin.repo, folder.name, chosen.small)
    check_files(folder, chosen.small, chosen.weights, label)
    if config_only:
        return Located(folder, {}, None, chosen.variant, (), (), folder.name[:12])
    others = origin.parts | ({_LORA: origin.lora} if origin.lora is not None else {})
    others = {name: part for name, part in others.items() if name not in elsewhere}
    there = {name: path for name, part in others.items() if (path := cached_part(part)) is not None}
    needed = [] if _all_there(folder, chosen.weights) else [(origin.repo, folder.name, chosen.weights)]
    needed += [(p.repo, p.revision, p.files) for name, p in others.items() if name not in there]
    weights = [folder / name for name in chosen.weights]
    for name, path in there.items():
        inside = [path / file for file in others[name].files if file.endswith(".safetensors")]
        weights += [path] if path.is_file() else inside
    commits = [folder.name, *(part.revision for part in others.values())]
    return Located(
        folder=folder,
        lora=there.pop(_LORA, None),
        parts=there,
        variant=chosen.variant,
        weights=tuple(weights),
        downloads=tuple(ModelDownload(*each) for each in needed),
        revision="+".join(commit[:12] for commit in commits),
    )


def cached_part(part: StoredPart) -> Path | None:
    """Return its folder in the cache, or its single file; None if it is not completely cached."""
    folder = cached(part.repo, part.revision, part.files)
    if folder is None or not _all_there(folder, part.files):
        return None
    return folder / part.files[0] if len(part.files) == 1 else folder


def fetch_part(part: StoredPart) -> Path:
    """Return `cached_part`, downloaded if necessary."""
    path = cached_part(part)
    if path is None:
        fetch_all([ModelDownload(part.repo, part.revision, part.files)])
        path = cached_part(part)
    if path is None:
        raise Unsupported(f"{part.repo} has no {' or '.join(part.files)} at {part.revision}; update vivace")
    return path


def _no_index(label: str, files: Collection[str]) -> str:
    if MODULAR_INDEX in files:
        return has_no_pipeline(label)
    single = sorted(name for name in files if "/" not in name and name.endswith(".safetensors"))
    advice = "give one that is"
    if single:
        advice = f"download its file `hf download {label.partition('@')[0]} {single[0]}`, and give its path"
    return f"{label} has no {INDEX}, so it is not a pipeline in diffusers' format; {advice}"


def _not_cached(label: str) -> Unsupported:
    return Unsupported(
        f"{label} is not in the local cache of the Hugging Face hub; download it while there is a network"
    )


def _all_there(folder: Path, files: Iterable[str]) -> bool:
    return all((folder / name).is_file() for name in files)


@contextlib.contextmanager
def _bars(visible: bool) -> Iterator[None]:
    """Hide the client's progress bars unless wanted: it also prints them to files and pipes."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if visible:
        with contextlib.redirect_stderr(unchecked(sys.stderr)):  # bars move the cursor
            yield
        return
    were_disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not were_disabled:
            enable_progress_bars()


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the client's failures into vivace's errors, and silence its log meanwhile."""
    from huggingface_hub import errors

    # The base class of errors of the HTTP library that this version of the client uses; and of invalid answers.
    transport: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    invalid = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except (transport, OSError, RuntimeError, *invalid) as error:
        raise _translated(repo, revision, error) from error
    finally:
        log.setLevel(level)


def _translated(repo: str, revision: str | None, error: BaseException) -> VivaceError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError | errors.DryRunError) and error.__cause__:
        # The client fell back to its cache after the network had failed; the cause is the real error.
        return _translated(repo, revision, error.__cause__)
    if isinstance(error, errors.HFValidationError):
        return UnknownModel(f"no repository '{repo}': {error}")
    texts = {
        errors.GatedRepoError: f"{repo} is gated: ask for access at {hub}/{repo}, then log in with `hf auth login` or "
        "set HF_TOKEN",
        errors.RepositoryNotFoundError: f"there is no folder '{repo}', and no repository of that name on {hub}; check "
        "the spelling, or log in with `hf auth login` or HF_TOKEN if it is private",
        errors.RevisionNotFoundError: f"{repo} has no revision '{revision}'; give one of its branches, tags or "
        "commits, or none for the main branch",
        errors.OfflineModeIsEnabled: f"{repo} is not in the local cache, and HF_HUB_OFFLINE forbids the network; "
        "unset it",
    }
    for kind, text in texts.items():
        if isinstance(error, kind):
            return Unsupported(text)
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        said = {
            401: f"{hub} rejects your token; renew it with `hf auth login`, or correct HF_TOKEN",
            403: f"{hub} forbids access to {repo}; give your token read access to it",
        }
        return Unsupported(
            said.get(status, f"{hub} answered {status} when asked for {repo}; try again later")
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return Unsupported(
            f"{repo} cannot be stored: {error.filename or constants.HF_HUB_CACHE}: {error.strerror}; free disk space, "
            "or set HF_HOME to another folder"
        )
    lines = str(error).strip().splitlines()
    return Unsupported(
        f"{repo} could not be downloaded from {hub} ({lines[0] if lines else type(error).__name__}); check the network "
        "and try again"
    )
