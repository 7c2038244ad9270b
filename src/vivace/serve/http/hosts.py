"""The names by which a server without a key answers: those of this machine.

Any site may let its own name resolve to 127.0.0.1, so that browsers treat its pages as of one origin with a server
there (DNS rebinding). It cannot change the Host header, which has that name.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterable, Mapping

_LOOPBACK = "localhost"
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^:\[\]/@\s]+)(?::\d{1,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"https?://(.+)", re.IGNORECASE)


def foreign_header(
    headers: Iterable[tuple[bytes, bytes]], allowed: Collection[str]
) -> tuple[str, str] | None:
    """Return the first Host or Origin that names another machine, with its header's name; None without one.

    Args:
        allowed: names besides this machine's own, in lower case.
    """
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
    return (
        match is not None
        and match[1].partition("/")[0] == headers.get(b"host", b"").decode("latin-1").strip()
    )


def name_of(host: str) -> str | None:
    """Return the name or address in a Host header, in lower case and without its port; None if there is none."""
    match = _HOST.fullmatch(host)
    return None if match is None else match[1].strip("[]").lower().removesuffix(".")


def is_loopback(name: str) -> bool:
    """Return whether a name or address is always this machine's own."""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == _LOOPBACK


def _is_own(host: str, allowed: Collection[str]) -> bool:
    name = name_of(host)
    return name is not None and (is_loopback(name) or name in allowed)
