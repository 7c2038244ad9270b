"""Files from repositories of the Hugging Face hub, through its own client and cache; each failure in our words."""

from __future__ import annotations

import contextlib
import errno
import logging
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from vivace.errors import UnknownModel, Unsupported

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
        UnknownModel: there is no such repository or revision.
        Unsupported: no network, no permission, no room.
    """
    from huggingface_hub import snapshot_download

    with _explained(repo, revision), _bars(bars and sys.stderr.isatty()):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(files)))


def check_room(repo: str, folder: Path, files: Sequence[str]) -> None:
    """Raises Unsupported if the disk cannot take the files that `folder`, made by `fetch`, still lacks."""
    from huggingface_hub import snapshot_download

    with _explained(repo, folder.name), _bars(False):
        wanted = snapshot_download(repo, revision=folder.name, allow_patterns=list(files), dry_run=True)
    needed = sum(file.file_size or 0 for file in wanted if file.will_download)
    free = shutil.disk_usage(folder).free
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
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    log = logging.getLogger("huggingface_hub")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    except errors.HFValidationError as error:
        raise UnknownModel(f"no repository '{repo}': {error}") from error
    except errors.GatedRepoError as error:
        raise Unsupported(
            f"{repo} is gated: ask for access at {hub}/{repo}, then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UnknownModel(
            f"no folder '{repo}' here, and no repository of that name on {hub}; check the spelling, or log in with "
            "`hf auth login` or HF_TOKEN if it is private"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnknownModel(
            f"{repo} has no revision '{revision}'; give a branch, tag or commit of it, or none for the main one"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        # The client looked into its cache after the network had failed; the cause says how.
        raise Unsupported(_unreachable(repo, hub, error.__cause__ or error)) from error
    except _failures() as error:
        if isinstance(error, OSError) and error.errno in _DISK:
            raise Unsupported(
                f"{repo} cannot be stored: {error.filename or constants.HF_HUB_CACHE}: {error.strerror}; make room, or "
                "set HF_HOME to another folder"
            ) from error
        raise Unsupported(_unreachable(repo, hub, error)) from error
    finally:
        log.setLevel(level)


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
