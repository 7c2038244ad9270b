"""The routes: the OpenAI images API, health, metrics, and a page to draw with."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from vivace.serve.checks import Checks
from vivace.serve.jobs import Drawn, ImageJob, JobError
from vivace.serve.metrics import Metrics
from vivace.serve.pool import ReplicaPool
from vivace.serve.requests import GenerationRequest, RequestError, jobs_of
from vivace.serve.responses import MIME, KeptImages, encode, error_body, event_text, server_timing
from vivace.serve.settings import ServeSettings
from vivace.serve.waiting import QueueFull

LOG = logging.getLogger("vivace.serve")
_LOOK_S = 0.2
"""How often a waiting handler looks whether its client has gone."""


def create_app(
    settings: ServeSettings,
    make_pool: Callable[..., Any] = ReplicaPool,
    on_problem: Callable[[], None] = lambda: None,
) -> FastAPI:
    """Return the application; its lifespan starts and ends the workers.

    Args:
        make_pool: makes what draws: a `ReplicaPool`, or a `RayPool` in its place.
        on_problem: called once no worker will ever draw; `app.state.problem` says why.
    """
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool = make_pool(settings, metrics.observe)
        metrics.watch(pool)
        app.state.pool = pool
        pool.start()
        watching = asyncio.create_task(_watch(app, pool, on_problem))
        try:
            yield
        finally:
            watching.cancel()
            await pool.stop()

    app = FastAPI(title="vivace", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.settings, app.state.metrics, app.state.kept = settings, metrics, KeptImages()
    app.state.problem = None
    app.add_middleware(Checks, api_key=settings.api_key)
    _add_errors(app)
    _add_health(app)
    _add_images(app)
    return app


async def _watch(app: FastAPI, pool: ReplicaPool, on_problem: Callable[[], None]) -> None:
    while pool.problem is None:
        await asyncio.sleep(_LOOK_S)
    app.state.problem = pool.problem
    on_problem()


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{place}: {first['msg']}" if place else str(first["msg"])
        if first["type"] == "extra_forbidden":
            message = (
                f"{place} is not a parameter here; there are: {', '.join(GenerationRequest.model_fields)}"
            )
        return JSONResponse(error_body(400, message, place or None), 400)

    @app.exception_handler(RequestError)
    async def refused(request: Request, error: RequestError) -> JSONResponse:
        return JSONResponse(error_body(400, str(error), error.field), 400)

    @app.exception_handler(QueueFull)
    async def full(request: Request, error: QueueFull) -> JSONResponse:
        return JSONResponse(
            error_body(429, str(error)), 429, {"Retry-After": str(max(1, error.retry_after_s))}
        )

    @app.exception_handler(JobError)
    async def failed(request: Request, error: JobError) -> JSONResponse:
        return JSONResponse(error_body(error.status, str(error)), error.status)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        return JSONResponse(
            error_body(error.status_code, str(error.detail)), error.status_code, error.headers
        )


def _add_health(app: FastAPI) -> None:
    @app.get("/livez")
    async def livez() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz(request: Request) -> JSONResponse:
        """Whether an image would be drawn now, and what each worker does."""
        pool: ReplicaPool = request.app.state.pool
        workers = [
            {"worker": replica.number, "phase": replica.phase.value, "doing": replica.doing}
            for replica in pool.replicas
        ]
        body: dict[str, Any] = {"status": "ready" if pool.is_ready else "not ready", "workers": workers}
        if pool.problem is not None:
            body["problem"] = pool.problem
        return JSONResponse(body, 200 if pool.is_ready else 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/dashboard.json")
    async def dashboard() -> Response:
        """A dashboard for Grafana, of the metrics."""
        text = resources.files("vivace.serve").joinpath("templates", "dashboard.json").read_text("utf-8")
        return Response(text, media_type="application/json")

    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """The model that is served, its recipe, sizes and LoRAs."""
        pool: ReplicaPool = request.app.state.pool
        settings: ServeSettings = request.app.state.settings
        entry: dict[str, Any] = {
            "id": settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "vivace",
            "recipe": settings.recipe,
            "recipe_from": settings.why,
            "loras": sorted(settings.loras),
        }
        if pool.state is not None:
            entry |= {
                "sizes": [str(size) for size in sorted(pool.state.speeds)],
                "size": str(pool.state.size),
                "num_inference_steps": pool.state.steps,
                "partial_images": pool.state.has_partials,
                "expected_seconds": round(pool.state.predicted_s(pool.state.size, pool.state.steps), 3),
            }
        return {"object": "list", "data": [entry]}

    @app.get("/", response_class=HTMLResponse)
    async def page() -> HTMLResponse:
        """A page to draw with."""
        text = resources.files("vivace.serve").joinpath("templates", "page.html").read_text("utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})


_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)


def _add_images(app: FastAPI) -> None:
    @app.post("/v1/images/generations", response_model=None)
    async def generations(body: GenerationRequest, request: Request) -> Response:
        """Draw images."""
        pool, settings = request.app.state.pool, request.app.state.settings
        if pool.problem is not None:
            raise JobError(503, f"the model cannot be used: {pool.problem}")
        if pool.state is None:
            return JSONResponse(
                error_body(503, "the model is being loaded; see /readyz"), 503, {"Retry-After": "5"}
            )
        jobs = jobs_of(body, settings, pool.state)
        if settings.logs_prompts:
            LOG.info("%s: %r", jobs[0].id, body.prompt)
        if body.stream:
            return await _streamed(request, body, jobs)
        await pool.submit(jobs)
        images = await _drawn(request, jobs)
        encoded = [await encode(image, body.output_format, body.output_compression) for image in images]
        for each in encoded:
            request.app.state.metrics.observe_encoding(each.seconds)
        headers = {
            "Server-Timing": server_timing(
                _phases(jobs, images) | {"encode": sum(each.seconds for each in encoded)}
            )
        }
        accepted = request.headers.get("accept", "").split(",")[0].strip()
        if accepted in MIME.values() and len(encoded) == 1:
            if accepted != encoded[0].mime:
                format_ = next(name for name, mime in MIME.items() if mime == accepted)
                encoded = [await encode(images[0], format_, body.output_compression)]
            return Response(encoded[0].data, media_type=encoded[0].mime, headers=headers)
        kept: KeptImages = request.app.state.kept
        data = [
            {"seed": image.seed, "b64_json": each.b64}
            if body.response_format == "b64_json"
            else {"seed": image.seed, "url": f"{request.base_url}v1/images/files/{kept.keep(each)}"}
            for image, each in zip(images, encoded, strict=True)
        ]
        content = {
            "created": int(time.time()),
            "data": data,
            "output_format": body.output_format,
            "size": str(jobs[0].size),
        }
        return JSONResponse(content, headers=headers)

    @app.get("/v1/images/files/{name}")
    async def files(name: str, request: Request) -> Response:
        """An image by the URL that an answer named, for an hour."""
        encoded = request.app.state.kept.get(name)
        if encoded is None:
            return JSONResponse(error_body(404, "no such image, or its hour has passed"), 404)
        return Response(encoded.data, media_type=encoded.mime)


async def _drawn(request: Request, jobs: list[ImageJob]) -> list[Drawn]:
    """Wait for all jobs; end them if one fails or the client goes away.

    Raises:
        JobError: one ended without an image.
    """
    pool: ReplicaPool = request.app.state.pool
    waiting = asyncio.gather(*(pool.wait(job) for job in jobs))
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
            pool.cancel(job)


async def _streamed(request: Request, body: GenerationRequest, jobs: list[ImageJob]) -> Response:
    """Return a stream of partial images and the finished ones."""
    pool: ReplicaPool = request.app.state.pool
    queue: asyncio.Queue[tuple[ImageJob, Drawn | JobError, int | None]] = asyncio.Queue()
    for job in jobs:
        job.on_partial = lambda step, drawn, job=job: queue.put_nowait((job, drawn, step))
    await pool.submit(jobs)

    async def finish(job: ImageJob) -> None:
        try:
            queue.put_nowait((job, await pool.wait(job), None))
        except JobError as error:
            queue.put_nowait((job, error, None))

    async def events() -> AsyncIterator[str]:
        tasks = [asyncio.create_task(finish(job)) for job in jobs]
        left, number = len(jobs), 0
        try:
            while left:
                job, result, step = await queue.get()
                left -= step is None
                if isinstance(result, JobError):
                    yield event_text("error", error_body(result.status, str(result)))
                    continue
                encoded = await encode(result, body.output_format, body.output_compression, job.size)
                fields = {
                    "b64_json": encoded.b64,
                    "created_at": int(time.time()),
                    "size": str(job.size),
                    "output_format": body.output_format,
                    "seed": job.seed,
                }
                if step is not None:
                    fields |= {"partial_image_index": number, "step": step, "num_inference_steps": job.steps}
                    number += 1
                    yield event_text("image_generation.partial_image", fields)
                else:
                    fields["seconds"] = round(sum(result.phases.values()), 3)
                    yield event_text("image_generation.completed", fields)
        finally:  # also where the client goes away
            for job in jobs:
                pool.cancel(job)
            for task in tasks:
                task.cancel()

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _phases(jobs: list[ImageJob], images: list[Drawn]) -> dict[str, float]:
    """Return the seconds of a request by phase: the longest wait, and the sums of the rest."""
    waits = [job.began_at - job.accepted_at for job in jobs if job.began_at is not None]
    phases = {"queue": max(waits, default=0.0)}
    for name in images[0].phases:
        phases[name] = math.fsum(image.phases.get(name, 0.0) for image in images)
    return phases
