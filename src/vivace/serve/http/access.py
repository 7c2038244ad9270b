"""Who may draw: keys, and without them the names by which this machine is asked.

Any site may let its own name resolve to 127.0.0.1, so that browsers treat its pages as of one origin with a server
there (DNS rebinding). It cannot change the Host header, which has that name.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from vivace.errors import UsageError
from vivace.foundation.untrusted.files import read_text, reading, user_path

LOG = logging.getLogger("vivace.serve")
_LEAST = 8
"""Characters of a key. Shorter ones are found by trying."""
_LARGEST_FILE = 100_000
_LOOPBACK = "localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(.+)", re.IGNORECASE)


class Keys:
    """Keys and the names of those who have them, in `names`. A file of them is read again when it changes."""

    def __init__(self, names: dict[str, str], path: Path | None = None, stamp: tuple[int, ...] = ()) -> None:
        self.names = names
        self._path, self._stamp = path, stamp

    @classmethod
    def read(cls, path: str | Path) -> Keys:
        """Read a file of one key a line, each after a name or alone; "# ..." is a comment. UsageError if it cannot be
        used."""
        path = user_path(str(path))
        with reading(str(path), UsageError):
            stamp = _stamp_of(path)
            names = _parsed(read_text(path, _LARGEST_FILE), str(path))
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
        if self._path is None or (stamp := _stamp_of(self._path)) == self._stamp:
            return
        self._stamp = stamp
        try:
            read = Keys.read(self._path)
        except UsageError as error:
            LOG.error("%s; the keys that were read before stay", error)
            return
        self.names, self._stamp = read.names, read._stamp
        LOG.info("%d keys are read from %s", len(self.names), self._path)


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


def foreign_header(
    headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str]
) -> tuple[str, str] | None:
    """Return the first Host or Origin that names another machine, and no allowed one, after its header's name."""
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"host" and not _is_own(text, allowed):
            return "Host", text
        if name == b"origin":
            match = _ORIGIN.fullmatch(text)
            if match is None or not _is_own(match[1], allowed):
                return "Origin", text
    return None


def is_of_page(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether a request comes from this server's own page, as far as its headers tell: a browser sends the page
    in Origin or Referer, and other clients send neither."""
    page = headers.get(b"origin") or headers.get(b"referer")
    if page is None:
        return True
    match = _ORIGIN.fullmatch(page.decode("latin-1").strip())
    host = headers.get(b"host", b"").decode("latin-1").strip()
    return match is not None and match[1].partition("/")[0] == host


def host_name(host: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without its port; None if there is none."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == _LOOPBACK


def _is_own(host: str, allowed: Collection[str]) -> bool:
    name = host_name(host)
    return name is not None and (is_loopback(name) or name in allowed)
