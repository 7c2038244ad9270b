"""Forms of requests, read strictly: a form that is cut off is an error, and so is text that is not UTF-8."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from vivace.serve.http.json_body import check_encoding
from vivace.serve.http.requests import RequestError
from vivace.serve.queue.jobs import JobError

if TYPE_CHECKING:
    from starlette.datastructures import FormData
    from starlette.requests import Request

_KIND = "multipart/form-data"
_MOST_PARTS = 40
_LARGEST_FIELD = 100_000
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\";]*)", re.IGNORECASE)
_UTF8 = ("utf-8", "utf8", "us-ascii")
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are of what clients send


async def read_parts(request: Request) -> FormData:
    """Return the parts of a form, which is to be closed.

    Raises:
        RequestError: it is no form, is damaged, or too many parts.
        JobError: the client went away, or the disk is full.
    """
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith(_KIND):
        raise RequestError("image", f"send a form ({_KIND}) with the image in it")
    charset = _CHARSET.search(kind)
    if charset is not None and charset[1].strip().lower() not in _UTF8:  # some take seconds to decode
        raise RequestError(None, f"the text of a form is UTF-8 here; its header says {charset[1][:50]!r}")
    check_encoding(request)
    parser = _WholeForm(
        request.headers,
        request.stream(),
        max_files=_MOST_PARTS,
        max_fields=_MOST_PARTS,
        max_part_size=_LARGEST_FIELD,
    )
    try:
        return await parser.parse_whole()
    except MultiPartException as error:
        raise RequestError(None, f"the form cannot be read: {error.message}") from None
    except ClientDisconnect:
        raise JobError(499, "the client has gone") from None
    except OSError as error:
        raise JobError(500, f"the images that are sent cannot be stored: {error.strerror}") from None


class _WholeForm(MultiPartParser):
    """Parses a form to its end: without it the last part is missing or cut off."""

    _has_ended = False
    _foreign: str | None = None
    """The first field whose text is not UTF-8; the parser would take it for Latin-1."""

    async def parse_whole(self) -> FormData:
        form = await self.parse()
        if not self._has_ended or self._foreign is not None:
            for file in self._files_to_close_on_error:  # that of a part without its end is not in the form
                file.close()
            raise MultiPartException(
                "its last boundary is missing, so that it may be cut off"
                if self._foreign is None
                else f"the text of {self._foreign[:100]} is not UTF-8"
            )
        return form

    def on_end(self) -> None:
        self._has_ended = True

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None and self._foreign is None and not _is_text(part.data):
            self._foreign = part.field_name
        super().on_part_end()


def _is_text(data: bytes | bytearray) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
