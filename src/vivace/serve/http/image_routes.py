"""The routes that draw: POST /v1/images/generations and /edits, and the images that an answer names by URL."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.exceptions import HTTPException

from vivace.serve.http.edit_form import fitted, keep_unmasked, read_form
from vivace.serve.http.openapi import FILE, IMAGES, form_of_edits
from vivace.serve.http.request_checks import FILES
from vivace.serve.http.requests import (
    EditRequest,
    GenerationRequest,
    ImageBody,
    RequestSource,
    accepted_format,
    jobs_of,
    read_object,
)
from vivace.serve.http.responses import (
    KEEP_ALIVE,
    KEPT_S,
    NO_USAGE,
    EncodedImage,
    KeptImages,
    RequestError,
    dumped,
    encode,
    error_body,
    event_text,
    server_timing,
    with_image,
    with_list,
)
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError
from vivace.serve.queue.pool import ReplicaPool
from vivace.serve.settings import ModelState, ServeSettings

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

LOG = logging.getLogger("vivace.serve")
_LOOK_S = 0.2
"""Seconds between checks whether the client of a waiting handler has gone."""
_KEEP_ALIVE_S = 15.0
_NOT_KEPT = (
    "no such image: each is kept for an hour, until 256 MB of newer ones are, or until the server ends"
)


def add_images(app: FastAPI) -> None:
    """Add the routes to an application, whose state has the pool."""

    router = APIRouter(route_class=_StrictRoute)

    @router.post("/v1/images/generations", response_model=None, responses=IMAGES)
    async def generations(request: Request, body: GenerationRequest) -> Response:
        """Draw images from a prompt."""
        return await _answer(request, body, _state_of(request), RequestSource())

    app.include_router(router)

    @app.post("/v1/images/edits", response_model=None, responses=IMAGES, openapi_extra=form_of_edits())
    async def edits(request: Request) -> Response:
        """Draw images from a prompt and images: image-to-image, inpainting with a mask, or editing."""
        state = _state_of(request)
        fields, uploads = await read_form(request)
        try:
            body = EditRequest.model_validate(fields)
        except ValidationError as error:
            raise RequestValidationError(error.errors()) from None
        # before images are read, which takes longer than refusing them
        request.app.state.pool.check_room(body.n, request.state.owner)
        source = await fitted(body, uploads, request.app.state.settings, state)
        return await _answer(request, body, state, source)

    @app.get(f"{FILES}{{name}}", response_model=None, responses=FILE)
    async def files(name: str, request: Request) -> Response:
        """An image by the URL that an answer named, for an hour."""
        encoded = request.app.state.kept.get(name)
        if encoded is None:
            return JSONResponse(error_body(404, _NOT_KEPT), 404)
        return Response(encoded.data, media_type=encoded.mime)


class _StrictRequest(Request):
    """A request whose JSON has been read."""

    content: dict[str, Any]

    async def json(self) -> Any:
        return self.content


class _StrictRoute(APIRoute):
    """A route whose JSON is read by `read_object`, once the model is loaded."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_and_handle(request: Request) -> Response:
            _state_of(request)
            strict = _StrictRequest(request.scope, request.receive)
            strict.content = await read_object(strict)
            return await handle(strict)

        return read_and_handle


def _state_of(request: Request) -> ModelState:
    pool: ReplicaPool = request.app.state.pool
    if pool.problem is not None:
        raise JobError(503, f"the model cannot be used: {pool.problem}")
    if pool.state is None:
        raise HTTPException(503, "the model is being loaded; see /readyz", {"Retry-After": "5"})
    return pool.state


async def _answer(request: Request, body: ImageBody, state: ModelState, source: RequestSource) -> Response:
    settings: ServeSettings = request.app.state.settings
    if request.query_params:
        name = next(iter(request.query_params))[:100]
        raise RequestError(name, f"{name} is in the URL, whose parameters are not read; send it in the body")
    accepted = accepted_format(request.headers.get("accept", ""), body)
    jobs = jobs_of(body, settings, state, source, request.state.owner)
    if settings.logs_prompts:
        LOG.info("%s: %r", jobs[0].id, body.prompt)
    if body.stream:
        return await _streamed(request, body, jobs, source)
    await request.app.state.pool.submit(jobs)
    in_json = accepted is None and body.response_format != "url"

    async def encoded_image(job: ImageJob) -> tuple[Drawn, EncodedImage]:
        image = await _drawn(request, body, job)
        format_ = accepted or body.output_format
        return image, await encode(image, format_, body.output_compression, b64=in_json)

    images, encoded = zip(*await _all_of(request, jobs, encoded_image), strict=True)
    for each in encoded:
        request.app.state.metrics.observe_encoding(each.seconds)
    phases = _phases(jobs, images) | {"encode": sum(each.seconds for each in encoded)}
    headers = {"Server-Timing": server_timing(phases)}
    if accepted is not None:
        return Response(encoded[0].data, media_type=encoded[0].mime, headers=headers)
    notes = tuple(dict.fromkeys([*source.notes, *(note for image in images for note in image.notes)]))
    content = {
        "created": int(time.time()),
        "output_format": body.output_format,
        "size": str(jobs[0].size),
    } | ({"notes": list(notes)} if notes else {})
    data = [
        _entry(request, image, each, body.response_format)
        for image, each in zip(images, encoded, strict=True)
    ]
    return Response(with_list(content, "data", data), media_type="application/json", headers=headers)


async def _drawn(request: Request, body: ImageBody, job: ImageJob) -> Drawn:
    image: Drawn = await request.app.state.pool.wait(job)
    if job.task == "inpaint" and isinstance(body, EditRequest) and body.keep_unmasked:
        return await keep_unmasked(image, job)
    return image


def _entry(request: Request, image: Drawn, encoded: EncodedImage, format_: str | None) -> bytes:
    """Return what the list of an answer has of an image, as JSON: its base64 and its URL where the request names no
    format, since clients that name none read the one or the other."""
    fields: dict[str, Any] = {"seed": image.seed}
    if format_ != "b64_json":
        kept: KeptImages = request.app.state.kept
        settings: ServeSettings = request.app.state.settings
        place = settings.public_url or str(request.base_url)
        fields["url"] = f"{place.rstrip('/')}{FILES}{kept.keep(encoded)}"
        fields["expires_at"] = int(time.time() + KEPT_S)
    return dumped(fields) if format_ == "url" else with_image(fields, encoded.b64)


async def _all_of(
    request: Request,
    jobs: list[ImageJob],
    encoded_image: Callable[[ImageJob], Coroutine[Any, Any, tuple[Drawn, EncodedImage]]],
) -> list[tuple[Drawn, EncodedImage]]:
    """Wait for all jobs, each of which is encoded as soon as it is drawn; end them if one fails or the client goes."""
    waiting = asyncio.gather(*(encoded_image(job) for job in jobs))
    try:
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=_LOOK_S)
            if not waiting.done() and await request.is_disconnected():
                raise JobError(499, "the client has gone")
        return await waiting
    except BaseException:
        waiting.cancel()
        with contextlib.suppress(BaseException):
            await waiting
        raise
    finally:
        for job in jobs:
            request.app.state.pool.cancel(job)


async def _streamed(
    request: Request, body: ImageBody, jobs: list[ImageJob], source: RequestSource
) -> Response:
    """Return a stream of partial images and the finished ones. An image that fails ends it, and the other images."""
    kind = "generation" if source.task == "text" else "edit"
    pool: ReplicaPool = request.app.state.pool
    queue: asyncio.Queue[tuple[ImageJob, Drawn | JobError, int | None]] = asyncio.Queue()
    for job in jobs:
        job.on_partial = lambda step, drawn, job=job: queue.put_nowait((job, drawn, step))
    await pool.submit(jobs)

    async def finish(job: ImageJob) -> None:
        try:
            queue.put_nowait((job, await _drawn(request, body, job), None))
        except JobError as error:
            queue.put_nowait((job, error, None))

    async def events() -> AsyncIterator[bytes]:
        left, numbers = len(jobs), Counter[str]()
        while left:
            try:
                job, result, step = await asyncio.wait_for(queue.get(), _KEEP_ALIVE_S)
            except TimeoutError:
                yield KEEP_ALIVE
                continue
            left -= step is None
            if isinstance(result, JobError):
                yield event_text("error", error_body(result.status, str(result)))
                return
            encoded = await encode(result, body.output_format, body.output_compression, job.size, b64=True)
            fields = {
                "created_at": int(time.time()),
                "size": str(job.size),
                "output_format": body.output_format,
                "seed": job.seed,
            }
            if step is not None:
                fields |= {
                    "partial_image_index": numbers[job.id],
                    "step": step,
                    "num_inference_steps": job.steps,
                }
                numbers[job.id] += 1
                yield event_text(f"image_{kind}.partial_image", fields, encoded.b64)
            else:
                fields |= {"seconds": round(sum(result.phases.values()), 3), "usage": NO_USAGE}
                if source.notes or result.notes:
                    fields["notes"] = [*source.notes, *result.notes]
                yield event_text(f"image_{kind}.completed", fields, encoded.b64)

    tasks = [asyncio.create_task(finish(job)) for job in jobs]

    def end() -> None:
        for job in jobs:
            pool.cancel(job)
        for task in tasks:
            task.cancel()

    return _Events(events(), end)


class _Events(StreamingResponse):
    """A stream of events. `end` is called when it has ended, also where the client goes away before the first event."""

    def __init__(self, events: AsyncIterator[bytes], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def _phases(jobs: list[ImageJob], images: Sequence[Drawn]) -> dict[str, float]:
    """Return the seconds of a request by phase: the longest wait, and the sums of the rest."""
    waits = [job.began_at - job.accepted_at for job in jobs if job.began_at is not None]
    phases = {"queue": max(waits, default=0.0)}
    for name in images[0].phases:
        phases[name] = math.fsum(image.phases.get(name, 0.0) for image in images)
    return phases
