"""The routes: the OpenAI images API, health, metrics, and a page to draw with."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from vivace.serve.http.edit_form import IMAGE_NAMES
from vivace.serve.http.image_routes import add_images
from vivace.serve.http.metrics import Metrics, dashboard
from vivace.serve.http.openapi import ERRORS, Alive, Health, ModelList, ServedModel
from vivace.serve.http.request_checks import Checks
from vivace.serve.http.requests import EditRequest, GenerationRequest, unfit_loras
from vivace.serve.http.responses import KeptImages, RequestError, error_body
from vivace.serve.queue.jobs import JobError
from vivace.serve.queue.pool import ReplicaPool, WorkerSource
from vivace.serve.queue.replica import Phase, Replica
from vivace.serve.settings import ServeSettings

_LOOK_S = 0.2
"""Seconds between checks whether a worker can still draw."""


def create_app(
    settings: ServeSettings, workers: WorkerSource, on_problem: Callable[[], None] = lambda: None
) -> FastAPI:
    """Return the application, whose lifespan starts and ends the workers; `on_problem` is called once none will ever
    draw."""
    metrics = Metrics()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        pool = ReplicaPool(settings, metrics.observe, workers)
        metrics.watch(pool)
        app.state.pool = pool
        pool.start()
        watching = asyncio.create_task(_watch(app, pool, on_problem))
        try:
            yield
        finally:
            watching.cancel()
            await pool.stop()

    app = FastAPI(
        title="vivace",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        responses=ERRORS,
    )
    app.state.settings, app.state.metrics, app.state.kept = settings, metrics, KeptImages()
    app.state.problem = None
    app.add_middleware(
        Checks,
        keys=settings.api_keys,
        hosts=settings.hosts,
        origins=settings.origins,
        observe=metrics.observe_answer,
    )
    if settings.origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID"],
            expose_headers=["X-Request-ID", "Retry-After", "Server-Timing"],
        )
    _add_errors(app)
    _add_health(app)
    _add_models(app)
    add_images(app)
    return app


async def _watch(app: FastAPI, pool: ReplicaPool, on_problem: Callable[[], None]) -> None:
    while pool.problem is None:
        await asyncio.sleep(_LOOK_S)
        app.state.kept.remove_old()
    app.state.problem = pool.problem
    on_problem()


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"] if part != "body")
        message = f"{place[:200]}: {first['msg']}" if place else str(first["msg"])
        code = None
        if first["type"] == "extra_forbidden" and "." not in place:
            code = "unknown_parameter"
            message = f"{place[:100]} is not a parameter here; there are: {_parameters(request)}"
        elif first["type"] == "missing":
            code = "missing_required_parameter"
        return JSONResponse(error_body(400, message, place[:200] or None, code), 400)

    @app.exception_handler(JobError)
    async def refused(request: Request, error: JobError) -> JSONResponse:
        body = error_body(error.status, str(error), error.field, error.code)
        return JSONResponse(body, error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path[:100]} here; /openapi.json says what there is"
        elif error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "other methods")
            message = f"{request.url.path[:100]} is for {allowed}, not for {request.method[:20]}"
        return JSONResponse(error_body(error.status_code, message), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> JSONResponse:
        """Answer as every error is; the log has it with its place."""
        return JSONResponse(
            error_body(500, f"the server failed: {type(error).__name__}; its log says where"), 500
        )


def _parameters(request: Request) -> str:
    if request.url.path.endswith("/edits"):
        return ", ".join((*EditRequest.model_fields, *IMAGE_NAMES, "mask"))
    return ", ".join(GenerationRequest.model_fields)


def _add_health(app: FastAPI) -> None:
    @app.get("/livez", response_model=Alive)
    async def livez() -> dict[str, str]:
        """Whether the server answers."""
        return {"status": "alive"}

    @app.get("/readyz", response_model=Health, responses={503: {"model": Health}})
    async def readyz(request: Request) -> JSONResponse:
        """Return whether requests are accepted, and the state of the server and of each worker."""
        pool: ReplicaPool = request.app.state.pool
        workers = [_worker_health(replica) for replica in pool.replicas]
        status = "ready" if pool.is_ready else "not ready"
        body: dict[str, Any] = {"status": status, "state": _state(pool), "workers": workers}
        if pool.problem is not None:
            body["problem"] = pool.problem
        return JSONResponse(body, 200 if pool.is_ready else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Metrics for Prometheus."""
        return Response(request.app.state.metrics.text(), media_type="text/plain; version=0.0.4")

    @app.get("/dashboard.json")
    async def dashboard_json() -> dict[str, Any]:
        """A dashboard for Grafana, of the metrics."""
        return dashboard()


def _state(pool: ReplicaPool) -> str:
    if pool.problem is not None:
        return "unusable"
    if pool.state is None:
        return "loading"
    phases = {replica.phase for replica in pool.replicas}
    if not pool.is_ready:
        return "failing"
    if not phases or phases & {Phase.READY, Phase.DRAWING}:
        return "drawing" if Phase.DRAWING in phases else "idle"
    return "unloaded" if Phase.UNLOADED in phases else "reloading"


def _worker_health(replica: Replica) -> dict[str, Any]:
    health = {"worker": replica.number, "phase": replica.phase.value, "doing": replica.doing}
    return health if replica.starting is None else health | {"start": replica.starting.health()}


def _add_models(app: FastAPI) -> None:
    @app.get("/v1/models", response_model_exclude_unset=True)
    async def models(request: Request) -> ModelList:
        """The model that is served, its recipe, sizes, tasks and LoRAs."""
        model = _model(request.app.state.pool, request.app.state.settings)
        return ModelList(object="list", data=[model])

    @app.get("/v1/models/{name:path}", response_model_exclude_unset=True)
    async def model(name: str, request: Request) -> ServedModel:
        """The model that is served, by its name."""
        settings: ServeSettings = request.app.state.settings
        if name not in (settings.name, settings.model):
            raise RequestError(
                "model", f"this server has {settings.name!r}, not {name[:300]!r}", 404, "model_not_found"
            )
        return _model(request.app.state.pool, settings)

    @app.get("/", response_class=HTMLResponse)
    async def drawing_page() -> HTMLResponse:
        """A page to draw with."""
        page = resources.files("vivace.serve.http").joinpath("templates", "page.html").read_text("utf-8")
        style = resources.files("vivace.answers").joinpath("templates", "style.css").read_text("utf-8")
        text = page.replace("/* style.css of the other pages */", style)
        return HTMLResponse(text, headers={"Content-Security-Policy": _POLICY})


def _model(pool: ReplicaPool, settings: ServeSettings) -> ServedModel:
    state, loras = pool.state, settings.lora_files()
    unfit = unfit_loras(loras, state)
    facts: dict[str, Any] = {"unfit_loras": unfit} if unfit else {}
    if state is not None:
        facts |= {
            "tasks": (["text"] if state.draws_text else []) + sorted(state.edits.tasks),
            "refused_tasks": state.edits.refused,
            "sizes": [str(size) for size in sorted(state.speeds)],
            "size": str(state.size),
            "num_inference_steps": state.steps,
            "strength": state.edits.strength,
            "partial_images": state.has_partials,
            "expected_seconds": round(state.predicted_s(state.size, state.steps), 3),
        }
    if state is not None and state.batching:
        facts["batching"] = {
            str(size): {
                "images": list(batching.allowed),
                "gains": {str(number): round(gain, 3) for number, gain in batching.gains.items()},
                "largest_difference": batching.difference,
            }
            for size, batching in state.batching.items()
        }
    return ServedModel(
        id=settings.name,
        object="model",
        created=0,
        owned_by="vivace",
        recipe=settings.recipe,
        recipe_from=settings.why,
        loras=sorted(loras.keys() - unfit.keys()),
        **facts,
    )


_POLICY = (
    "default-src 'self'; img-src 'self' data: blob:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
)
