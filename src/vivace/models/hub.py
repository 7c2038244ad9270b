"""Files from repositories of the Hugging Face hub, through its own client and cache; each failure in our words."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vivace.errors import UnknownModel, Unsupported, VivaceError

_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EFBIG}


def cached(repo: str, revision: str | None, files: Sequence[str]) -> Path | None:
    """The folder of what was fetched before, by any program, so perhaps of a few files only; None if nothing was."""
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
    """Fetch those of the files that the repository has; a folder in the cache, named by the commit.

    Args:
        bars: show the client's progress bars if there is a terminal.

    Raises:
        UnknownModel: no repository can have that name.
        Unsupported: no such repository or revision, no network, no permission, no room.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision), _bars(bars and sys.stderr.isatty()):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))


def names(repo: str, folder: Path, *, download: bool = True) -> tuple[str, ...]:
    """The names of all files that the repository has at the commit that `folder`, made by `fetch`, is named for.

    Without a network, and without what the client noted of an earlier listing, those that lie in `folder`.

    Raises:
        Unsupported: see `fetch`.
    """
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


def check_room(repo: str, revision: str, files: Sequence[str]) -> None:
    """Raises Unsupported if the disk cannot take those of the files that are not in the cache yet."""
    from huggingface_hub import constants, snapshot_download

    with _explained(repo, revision), _bars(False):
        wanted = snapshot_download(repo, revision=revision, allow_patterns=list(files), dry_run=True)
        needed = sum(file.file_size or 0 for file in wanted if file.will_download)
        cache = Path(constants.HF_HUB_CACHE).expanduser().absolute()
        free = shutil.disk_usage(next(path for path in (cache, *cache.parents) if path.exists())).free
    if needed > free:
        raise Unsupported(
            f"{repo} needs {needed / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free where it goes; free some, or set "
            "HF_HOME to a folder on a larger disk"
        )


@contextlib.contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Without bars unless wanted: the client draws some of its own into files and pipes too."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """The client's many ways to fail, each as one of ours; its own log is silent meanwhile."""
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except _failures() as error:
        raise _explanation(repo, revision, error) from error
    finally:
        log.setLevel(level)


def _explanation(repo: str, revision: str | None, error: BaseException) -> VivaceError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.LocalEntryNotFoundError | errors.DryRunError) and error.__cause__:
        # The client looked into its cache after the network had failed; the cause says how.
        return _explanation(repo, revision, error.__cause__)
    if isinstance(error, errors.HFValidationError):
        return UnknownModel(f"no repository '{repo}': {error}")
    if isinstance(error, errors.GatedRepoError):
        return Unsupported(
            f"{repo} is gated: ask for access at {hub}/{repo}, then log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return Unsupported(
            f"no folder '{repo}' here, and no repository of that name on {hub}; check the spelling, or log in with "
            "`hf auth login` or HF_TOKEN if it is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return Unsupported(
            f"{repo} has no revision '{revision}'; give a branch, tag or commit of it, or none for the main one"
        )
    if isinstance(error, OSError) and error.errno in _DISK:
        return Unsupported(
            f"{repo} cannot be stored: {error.filename or constants.HF_HUB_CACHE}: {error.strerror}; make room, or "
            "set HF_HOME to another folder"
        )
    return Unsupported(_unreachable(repo, hub, error))


def _failures() -> tuple[type[Exception], ...]:
    """Refusals, a broken connection, a full disk, an answer that is not the hub's."""
    from huggingface_hub import errors

    # The base of errors of whichever HTTP library this version of the client uses.
    transport: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]
    not_understood = (ValueError, LookupError, TypeError, AttributeError, AssertionError)
    return (transport, OSError, RuntimeError, *not_understood)


def _unreachable(repo: str, hub: str, error: BaseException) -> str:
    from huggingface_hub import errors

    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{repo} is not in this machine's cache, and HF_HUB_OFFLINE forbids the network; unset it"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if status == 401:
            return f"{hub} does not accept your token; renew it with `hf auth login`, or correct HF_TOKEN"
        if status == 403:
            return f"{hub} forbids access to {repo}; give your token the right to read it"
        return f"{hub} answered {status} when asked for {repo}; try again later"
    said = str(error).strip().splitlines()
    return (
        f"{repo} could not be fetched from {hub} ({said[0] if said else type(error).__name__}); check the network and "
        "try again"
    )
