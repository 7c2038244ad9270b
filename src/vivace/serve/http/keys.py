"""The keys that requests bear: a line of a file for each, read again when the file changes."""

from __future__ import annotations

import hmac
import logging
from dataclasses import dataclass, field
from pathlib import Path

from vivace.errors import UsageError
from vivace.foundation.untrusted.files import read_text, reading, user_path

LOG = logging.getLogger("vivace.serve")
_LEAST = 8
"""Characters of a key. Shorter ones are found by trying."""
_LARGEST_FILE = 100_000


@dataclass
class Keys:
    """Keys and the names of those who have them.

    Attributes:
        names: of the owners, by their key.
        path: of the file; None for keys that stay as they are.
    """

    names: dict[str, str]
    path: Path | None = None
    _stamp: tuple[int, ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, path: Path, option: str = "--api-key-file") -> Keys:
        """Read a file of one key a line, each after a name or alone; "# ..." is a comment.

        Raises:
            UsageError: it cannot be read, has no key, or one that is too short, twice there or not of one word.
        """
        path = user_path(str(path))
        with reading(f"{option} {path}", UsageError):
            stamp = _stamp_of(path)
            names = _parsed(read_text(path, _LARGEST_FILE), f"{option} {path}")
        return cls(names, path, stamp)

    def owner_of(self, given: bytes) -> str | None:
        """Return the name of the owner of a key, in a time that does not tell how much of it is right; else None."""
        self._read_again()
        owner = None
        for key, name in self.names.items():
            if hmac.compare_digest(given, key.encode()):
                owner = name
        return owner

    def _read_again(self) -> None:
        if self.path is None:
            return
        stamp = _stamp_of(self.path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            read = Keys.read(self.path)
        except UsageError as error:
            LOG.error("%s; the keys that were read before stay", error)
            return
        self.names, self._stamp = read.names, read._stamp
        LOG.info("%d keys are read from %s", len(self.names), self.path)


def _stamp_of(path: Path) -> tuple[int, ...]:
    try:
        status = path.stat()
    except OSError:
        return ()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _parsed(text: str, where: str) -> dict[str, str]:
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) > 2:
            raise UsageError(f"{where}: line {number} has {len(words)} words; give KEY, or NAME KEY")
        key = words[-1]
        if not key.isascii() or not key.isprintable():
            raise UsageError(f"{where}: the key on line {number} is not plain ASCII")
        if len(key) < _LEAST:
            raise UsageError(
                f"{where}: the key on line {number} has {len(key)} characters; give {_LEAST} or more"
            )
        if key in names:
            raise UsageError(f"{where}: the key on line {number} is there twice")
        names[key] = words[0] if len(words) == 2 else f"key {len(names) + 1}"
    if not names:
        raise UsageError(f"{where}: there is no key in it; write one a line")
    return names
