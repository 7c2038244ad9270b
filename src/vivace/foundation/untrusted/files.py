"""Read files that others wrote: regular files only, of bounded size, opened once.

The functions raise OSError, or ValueError in words that follow "FILE cannot be read: ".
`reading` turns both into vivace's errors.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from vivace.errors import UnusableModel, VivaceError, nearest

MAX_JSON_BYTES = 32_000_000
"""Most bytes of JSON. Configurations and indices of published models have less than 3 MB."""
MAX_DEPTH = 64
"""Most nested brackets in JSON; published configurations have less than 7."""
MAX_DIGITS = 40
"""Most digits of an integer in JSON. Tokenizers without a limit are published with 31: int(1e30)."""

_FOLDERS = re.compile(r"""(?<![\w:/.~\\+-])(?:~?/|[A-Za-z]:[/\\])(?:[^\s'",;()/\\]+[/\\])+""")
"""The folders of an absolute path in a text."""
_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_plain(path: Path, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading. A pipe or device is refused without waiting for it.

    Args:
        limit: the most bytes that it may have.

    Raises:
        OSError, ValueError: it cannot be opened, is something else, or is larger.
    """
    # Without O_NONBLOCK, opening a named pipe waits for a writer.
    flags = (
        os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    )
    handle = os.open(path, flags)
    try:
        status = os.fstat(handle)
        for is_kind, name in _KINDS:
            if is_kind(status.st_mode):
                raise ValueError(f"it is {name}, not a regular file")
        if limit is not None and status.st_size > limit:
            raise ValueError(f"it has {status.st_size:,} bytes; at most {limit:,} are read")
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path, limit: int) -> bytes:
    """Return the content of a regular file of at most `limit` bytes."""
    with open_plain(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:  # it has grown since, or is in a file system that does not tell sizes
        raise ValueError(f"it has more than {limit:,} bytes")
    return content


def read_text(path: Path, limit: int) -> str:
    """Return the content of a UTF-8 file, without a byte order mark."""
    try:
        return read_bytes(path, limit).decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text") from None


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """Return the value in a JSON file; see `parse_json`."""
    return parse_json(read_text(path, limit))


def read_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Return the JSON object in a file; see `parse_json`."""
    content = read_json(path, limit)
    if not isinstance(content, dict):
        raise ValueError(f"it holds a JSON {_kind(content)}, not an object")
    return content


def parse_json(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse JSON of bounded depth and with numbers of bounded length.

    Args:
        unique: refuse a key that an object has twice; libraries disagree on which value then holds.

    Raises:
        ValueError: it is not such JSON.
    """
    try:
        content = json.loads(text, parse_int=_integer, object_pairs_hook=_unique if unique else None)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from None
    except UnicodeDecodeError:
        raise ValueError("it is not JSON (not UTF-8 text)") from None
    except RecursionError:
        raise ValueError(f"its brackets nest deeper than {MAX_DEPTH}") from None
    if any(depth >= MAX_DEPTH for depth in _depths(content)):
        raise ValueError(f"its brackets nest deeper than {MAX_DEPTH}")
    return content


def user_path(name: str | Path) -> Path:
    """Return the path with `~` replaced by the home folder; unchanged if there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError:
        return Path(name)


def is_path(name: str, suffixes: Collection[str] = ()) -> bool:
    """Return whether a name can only be a path, not a catalogue name or `org/repo` of a hub.

    Args:
        suffixes: of files, lower case, that are no part of other names.
    """
    text = name.strip()
    repository, at, _ = text.partition("@")
    if at and re.fullmatch(r"[\w.-]*\w/[\w.-]+", repository):
        text = repository  # a revision may have slashes of its own: org/repo@refs/pr/7
    parts = re.split(r"[/\\]", text)
    starts_as_path = len(parts) > 1 and parts[0] in ("", ".", "..", "~")
    return starts_as_path or len(parts) > 2 or "\\" in text or Path(text).suffix.lower() in suffixes


def not_there(name: str) -> str:
    """Describe a missing file or folder, and what exists instead, as far as that can be determined."""
    path = user_path(name.strip())
    path_text = name[:200]
    try:
        if not path.parent.is_dir():
            first = next(above for above in reversed(path.parents) if not above.is_dir())
            return (
                f"{path_text}: there is no such file or folder; there is no folder {str(first)[:200]} either"
            )
        beside = [other.name for other in itertools.islice(path.parent.iterdir(), 1000)]
    except (OSError, ValueError):  # not readable, too long, or a NUL byte
        beside = []
    if path.name in beside:
        return f"{path_text} is {_other_kind(path)}, not a file or a folder"
    return f"{path_text}: there is no such file or folder{nearest(path.name, beside)}"


def _other_kind(path: Path) -> str:
    """Name the kind of a directory entry that is neither a regular file nor a folder."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return "a link that leads nowhere" if path.is_symlink() else "not readable"
    return next((what for is_kind, what in _KINDS if is_kind(mode)), "of another kind")


def without_folders(value: Any, names: Mapping[str, str]) -> Any:
    """Return plain data (as of JSON) for others, whose texts name no folder of this machine.

    Args:
        names: the new names of paths that are known; any other absolute path becomes its last part.
    """
    if isinstance(value, dict):
        return {without_folders(key, names): without_folders(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(each, names) for each in value]
    if not isinstance(value, str):
        return value
    for path in sorted(names, key=len, reverse=True):
        value = value.replace(path, names[path])
    if Path(value).is_absolute() and len(Path(value).parts) > 1:
        return Path(value).name
    return _FOLDERS.sub("", value)


def is_below(path: Path, folder: Path) -> bool:
    """Return whether a path, with all links followed, is inside a folder.

    A snapshot in the Hugging Face hub's cache consists of links to the blobs beside it, which count as inside.
    """
    root = folder.resolve()
    if root.parent.name == "snapshots":
        root = root.parent.parent
    return path.resolve().is_relative_to(root)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"it has the key {twice[:80]!r} twice")
    return unique


def _depths(content: Any) -> Iterator[int]:
    left = [(content, 0)]
    while left:
        value, depth = left.pop()
        yield depth
        if depth < MAX_DEPTH:
            inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
            left += [(value, depth + 1) for value in inner if isinstance(value, dict | list)]


def _kind(content: Any) -> str:
    if isinstance(content, list):
        return "list"
    return "null" if content is None else "text" if isinstance(content, str) else "number or boolean"


_MAX_REASON = 300  # characters
# Their text alone does not say what happened.
_BARE = (LookupError, AssertionError, StopIteration, ZeroDivisionError, AttributeError, NameError)


def reading(
    what: object,
    error: type[VivaceError] = UnusableModel,
    advice: str = "",
    *,
    problem: str = "cannot be read",
) -> AbstractContextManager[None, None]:
    """Raise every failure inside the context as `error`: "WHAT cannot be read: REASON; ADVICE".

    The reason is the last line of the library's message. vivace's own errors and running out of memory, which is not
    the file's fault, stay as they are.

    Args:
        what: the file or model that is read.
        problem: replaces "cannot be read"; may be empty.
    """
    return _ReadErrors(f"{what} {problem}".rstrip(), error, advice)


@dataclass(frozen=True)
class _ReadErrors(AbstractContextManager[None, None]):
    problem: str
    error: type[VivaceError]
    advice: str

    def __exit__(self, kind: object, cause: BaseException | None, trace: object) -> None:
        if (
            cause is None
            or isinstance(cause, VivaceError)
            or is_out_of_memory(cause)
            or not _is_failure(cause)
        ):
            return
        advice = f"; {self.advice}" if self.advice else ""
        raise self.error(f"{self.problem}: {reason(cause)}{advice}") from cause


def reason(error: BaseException) -> str:
    """Return the last line of an exception's message, and its class where the message alone says little."""
    if isinstance(error, OSError) and error.strerror and error.errno is not None:
        return error.strerror
    if isinstance(error, RecursionError):
        return "it nests too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    last = lines[-1] if len(lines[-1]) <= _MAX_REASON else f"{lines[-1][:_MAX_REASON]} …"
    return f"{type(error).__name__}: {last}" if isinstance(error, _BARE) else last


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the CPU or a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "out of memory" in str(error).lower()
    )


def _is_failure(error: BaseException) -> bool:
    # A panic of the tokenizers' Rust code is no Exception.
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def cache_folder() -> Path:
    """Return $VIVACE_CACHE, else `vivace` in the user's cache folder."""
    own = os.environ.get("VIVACE_CACHE")
    if own:
        return user_path(own)
    return user_path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "vivace"
