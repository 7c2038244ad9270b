"""JSON of requests, read strictly: a duplicate name is an error."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

from starlette.requests import ClientDisconnect

from vivace.serve.http.responses import RequestError
from vivace.serve.queue.jobs import JobError

if TYPE_CHECKING:
    from starlette.requests import Request

_KIND = "application/json"
_LIKE_JSON = ("application/", "+json")
_MOST_DIGITS = 100


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body.

    Raises:
        RequestError: it is not a JSON object.
        JobError: the client went away.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != _KIND and not (kind.startswith(_LIKE_JSON[0]) and kind.endswith(_LIKE_JSON[1])):
        raise RequestError(
            None, f"send JSON, with the header Content-Type: {_KIND}; got {kind[:100] or 'none'}"
        )
    check_encoding(request)
    try:
        body = await request.body()
    except ClientDisconnect:
        raise JobError(499, "the client has gone") from None
    try:
        content = parsed_json(body)
    except json.JSONDecodeError as error:
        raise RequestError(None, f"the body is not JSON: {error}") from None
    except UnicodeDecodeError:
        raise RequestError(None, "the body is not JSON: its text is not UTF-8") from None
    except ValueError as error:
        raise RequestError(None, f"the body cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(None, 'the body is not a JSON object; give one, e.g. {"prompt": "a red circle"}')
    return content


def check_encoding(request: Request) -> None:
    """Raise RequestError if a body is said to be compressed: a small one may become a very large one."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(None, f"send the body as it is, without Content-Encoding: {encoding[:50]}")


def parsed_json(text: str | bytes) -> Any:
    """Parse a JSON text strictly.

    Raises:
        JSONDecodeError, UnicodeDecodeError: it is not JSON.
        ValueError: it is too deep, has a number that is too long, or gives a name twice.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{twice[:100]!r} is given twice; give it once")
    return content


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)
