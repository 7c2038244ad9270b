"""Requests that send images: the form of POST /v1/images/edits, read, checked and fitted to a size."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from vivace.errors import UsageError
from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task
from vivace.foundation.untrusted.image_files import mask_in, picture_in
from vivace.models.sources import PixelLimits, fit
from vivace.models.tasks import names_of
from vivace.serve.http.requests import (
    EditRequest,
    RequestSource,
    check_encoding,
    check_model,
    requested_size,
)
from vivace.serve.http.responses import RequestError
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, JobPicture
from vivace.serve.settings import ModelState, ServeSettings

if TYPE_CHECKING:
    from PIL.Image import Image
    from starlette.requests import Request

_KIND = "multipart/form-data"
_MOST_PARTS = 40
_LARGEST_FIELD = 100_000
_CHARSET = re.compile(r";\s*charset\s*=\s*\"?([^\";]*)", re.IGNORECASE)
_UTF8 = ("utf-8", "utf8", "us-ascii")
logging.getLogger("python_multipart").setLevel(logging.ERROR)  # its warnings are of what clients send
IMAGE_NAMES = ("image", "image[]")
_TOLERATED_CUT = 0.01
_MOST_RATIO = 4
"""Largest ratio of the sides of an image that is drawn at its own proportions."""
_KEPT = "pixels outside of the mask are those of the image that was sent; keep_unmasked: false leaves them as drawn"
_READERS = ThreadPoolExecutor(1, thread_name_prefix="read-image")
"""Number of readers: an image of the largest size takes hundreds of megabytes while it is read."""


@dataclass(frozen=True)
class Uploads:
    images: tuple[bytes, ...]
    mask: bytes | None


async def read_form(request: Request) -> tuple[dict[str, str], Uploads]:
    """Return the text fields of a form, and its images; RequestError if it is no form, or its parts are of the wrong
    kind."""
    kind = request.headers.get("content-type", "")
    if not kind.lower().startswith(_KIND):
        raise RequestError("image", f"send a form ({_KIND}) with the image in it")
    charset = _CHARSET.search(kind)
    if charset is not None and charset[1].strip().lower() not in _UTF8:  # some take seconds to decode
        raise RequestError(None, f"the text of a form is UTF-8 here; its header says {charset[1][:50]!r}")
    check_encoding(request)
    limits = {"max_files": _MOST_PARTS, "max_fields": _MOST_PARTS, "max_part_size": _LARGEST_FIELD}
    parser = _WholeForm(request.headers, request.stream(), **limits)
    try:
        form = await parser.parse_whole()
    except MultiPartException as error:
        raise RequestError(None, f"the form cannot be read: {error.message}") from None
    except ClientDisconnect:
        raise JobError(499, "the client has gone") from None
    except OSError as error:
        raise JobError(500, f"the images that are sent cannot be stored: {error.strerror}") from None
    try:
        images = [await part.read() for name in IMAGE_NAMES for part in _files(form, name)]
        masks = [await part.read() for part in _files(form, "mask")]
        if len(masks) > 1:
            raise RequestError("mask", f"{len(masks)} masks are sent; send one")
        return _fields(form), Uploads(tuple(images), masks[0] if masks else None)
    finally:
        await form.close()


class _WholeForm(MultiPartParser):
    """Parses a form to its end, without which the last part is missing or cut off, and its text as UTF-8 alone."""

    _has_ended = False

    async def parse_whole(self) -> FormData:
        form = await self.parse()
        if not self._has_ended:
            for file in self._files_to_close_on_error:  # that of a part without its end is not in the form
                file.close()
            raise MultiPartException("its last boundary is missing, so that it may be cut off")
        return form

    def on_end(self) -> None:
        self._has_ended = True

    def on_part_end(self) -> None:
        part = self._current_part
        if part.file is None:
            try:
                part.data.decode()
            except UnicodeDecodeError:  # the parser would take it for Latin-1
                raise MultiPartException(f"the text of {part.field_name[:100]} is not UTF-8") from None
        super().on_part_end()


def _fields(form: FormData) -> dict[str, str]:
    fields: dict[str, str] = {}
    for name, value in form.multi_items():
        if name in (*IMAGE_NAMES, "mask"):
            continue
        if not isinstance(value, str):
            raise RequestError(
                name, f"{name[:100]} is sent as a file; only image, image[] and mask are files"
            )
        if name in fields:
            raise RequestError(name, f"{name[:100]} is given twice; give it once")
        fields[name] = value
    return fields


def _files(form: FormData, name: str) -> list[UploadFile]:
    parts = form.getlist(name)
    if any(isinstance(part, str) for part in parts):
        raise RequestError("image", f"{name} is text; send it as a file. URLs are not fetched")
    return [part for part in parts if isinstance(part, UploadFile)]


def task_for(uploads: Uploads, state: ModelState) -> Task:
    """Return the task of a request with these images; RequestError if it is not served."""
    edits = state.edits
    task: Task = "inpaint" if uploads.mask is not None else "edit" if "edit" in edits.tasks else "image"
    if task not in edits.tasks:
        field = "mask" if task == "inpaint" else "image"
        reason = edits.refused.get(task)
        served = ", ".join(sorted(edits.tasks)) or "none; it draws from prompts alone"
        raise RequestError(
            field,
            f"the task {task!r} is not served"
            + (f": {reason}" if reason else f"; of those with images this server does: {served}"),
        )
    if not uploads.images:
        raise RequestError("image", "no image is sent; add the file as image or image[]")
    if len(uploads.images) > edits.most_images:
        raise RequestError(
            "image",
            f"{len(uploads.images)} images are sent; {state.name} draws from at most {edits.most_images}",
        )
    return task


async def fitted(
    body: EditRequest, uploads: Uploads, settings: ServeSettings, state: ModelState
) -> RequestSource:
    """Read the images of a request, beside the event loop, and fit them to the size that is drawn; RequestError if one
    cannot be used."""
    check_model(body, settings, state)
    task = task_for(uploads, state)
    size = requested_size(body.size, settings, state)
    call: dict[str, Any] = {}
    strength = state.edits.strength if body.strength is None else body.strength
    if "strength" in state.edits.takes and strength is not None:
        call["strength"] = strength
    elif body.strength is not None:
        raise RequestError("strength", f"{state.name} has no strength; leave it out")
    loop = asyncio.get_running_loop()
    size, pictures, notes = await loop.run_in_executor(_READERS, _read, task, uploads, size, settings, state)
    return RequestSource(task, size, pictures, call, notes)


def _read(
    task: Task, uploads: Uploads, size: Size | None, settings: ServeSettings, state: ModelState
) -> tuple[Size, tuple[JobPicture, ...], tuple[str, ...]]:
    """Return the size that is drawn, the images fitted to it, and what was cut off or assumed."""
    notes: list[str] = []
    names = names_of("", task)
    numbers = ["the image", *(f"image {number + 2}" for number in range(len(uploads.images) - 1))]
    images = [
        _readable("image", lambda: picture_in(data, name, lambda note: notes.append(f"{name}: {note}")))  # noqa: B023 - called at once
        for name, data in zip(numbers, uploads.images, strict=True)
    ]
    size = size or nearest_size(Size(*images[0].size), settings, state)
    notes += [note for name, image in zip(numbers, images, strict=True) if (note := _note(name, image, size))]
    pictures = [_job_picture(names.image, image, size) for image in images]
    if uploads.mask is not None:
        data = uploads.mask
        mask = _readable("mask", lambda: mask_in(data, "mask"))
        if mask.size != images[0].size:
            raise RequestError(
                "mask",
                f"the mask has {mask.width}x{mask.height} pixels and the image {images[0].width}x{images[0].height}; "
                "send one of the image's size",
            )
        if mask.getextrema() == (0, 0):
            raise RequestError(
                "mask", "it marks nothing: make transparent what is to change, or paint it white on black"
            )
        pictures.append(_job_picture(names.mask, mask, size))
    return size, tuple(pictures), tuple(notes)


async def keep_unmasked(drawn: Drawn, job: ImageJob) -> Drawn:
    """Return an image whose pixels outside of its mask are those of the image that it was drawn from.

    The VAE changes all of them. At the border of a mask that was resized both are mixed.
    """
    return await asyncio.get_running_loop().run_in_executor(_READERS, _pasted, drawn, job)


def _pasted(drawn: Drawn, job: ImageJob) -> Drawn:
    from PIL import Image

    source, mask = (
        Image.frombytes(picture.mode, (picture.width, picture.height), picture.pixels)
        for picture in job.pictures
    )
    image = Image.frombytes("RGB", (drawn.width, drawn.height), drawn.pixels)
    if image.size != source.size:
        return drawn
    pasted = Image.composite(image, source, mask)
    return replace(drawn, pixels=pasted.tobytes(), notes=(*drawn.notes, _KEPT))


def nearest_size(sent: Size, settings: ServeSettings, state: ModelState) -> Size:
    """Return the size at which an image is drawn if the request names none.

    If any size is allowed, it is the image's own, reduced if it has more pixels than the model's own size; else the
    warmed size with the nearest proportions, and among these the nearest number of pixels.
    """
    if settings.any_size and max(sent) <= _MOST_RATIO * min(sent):
        largest = _MOST_RATIO * max(max(size) for size in state.speeds)
        height, width = PixelLimits(state.multiple, largest, state.size.height, state.size.width).size_of(
            sent, None, None
        )
        return Size(width, height)

    def distance(size: Size) -> tuple[float, float]:
        shapes = _log_ratio(size.width / size.height, sent.width / sent.height)
        return round(shapes, 3), _log_ratio(size.width * size.height, sent.width * sent.height)

    return min(state.speeds, key=distance)


def _log_ratio(a: float, b: float) -> float:
    return abs(math.log(a / b))


def _readable(field: str, read: Callable[[], Image]) -> Image:
    try:
        return read()
    except UsageError as error:
        raise RequestError(field, str(error)) from None


def _job_picture(argument: str, image: Image, size: Size) -> JobPicture:
    fitted_image = fit(image, size.height, size.width)
    return JobPicture(argument, fitted_image.mode, size.width, size.height, fitted_image.tobytes())


def _note(name: str, image: Image, size: Size) -> str:
    """Return a note on the part that fitting an image cuts off; empty if hardly any."""
    scale = max(size.width / image.width, size.height / image.height)
    cut = max(1 - size.width / (scale * image.width), 1 - size.height / (scale * image.height))
    if cut <= _TOLERATED_CUT:
        return ""
    where = "left and right" if size.width < scale * image.width - 0.5 else "top and bottom"
    return f"{name}: {image.width}x{image.height} pixels fitted to {size}, cutting {cut:.0%} off at {where}"
