"""The part of /openapi.json about answers and forms; a test checks the server against it."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict, Field

from vivace.serve.http.requests import EditRequest, GenerationRequest, LoraRequest
from vivace.serve.http.responses import MIME


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorAnswer(BaseModel):
    """The body of every error."""

    error: ErrorDetail


class ImageEntry(BaseModel):
    """An image of an answer: its base64, or its URL, which is answered until `expires_at` (Unix time) at most."""

    model_config = ConfigDict(extra="forbid")

    seed: int
    b64_json: str = ""
    url: str = ""
    expires_at: int = 0


class ImagesAnswer(BaseModel):
    """Images. `notes` name the parts of the request that were cut off or assumed."""

    created: int
    data: list[ImageEntry]
    output_format: str
    size: str
    notes: list[str] = Field(default=[])


class StartHealth(BaseModel):
    """The progress of a worker's start: the seconds so far, in all and by phase, those of earlier starts, and the
    longest that the present phase may take."""

    seconds: float
    expected_seconds: float | None
    phases: dict[str, float]
    phase_limit_seconds: float


class WorkerHealth(BaseModel):
    worker: int
    phase: str
    doing: str
    start: StartHealth | None = None


class Health(BaseModel):
    """Whether requests are accepted, and the state of the server and of each worker.

    Ready: "idle" or "drawing"; "unloaded" or "reloading", when an image waits until the model is loaded again. Not
    ready: "loading", "failing" when a worker that drew before does not start again, and "unusable".
    """

    status: str
    state: Literal["loading", "idle", "drawing", "unloaded", "reloading", "failing", "unusable"]
    workers: list[WorkerHealth]
    problem: str = ""


class Alive(BaseModel):
    status: str


class ServedModel(BaseModel):
    """The model that is served. Facts that are unknown before it is loaded are missing until then."""

    model_config = ConfigDict(extra="forbid")

    id: str
    object: str
    created: int
    owned_by: str
    recipe: str
    recipe_from: str
    loras: list[str]
    unfit_loras: dict[str, str] = Field(default={})
    tasks: list[str] = Field(default=[])
    refused_tasks: dict[str, str] = Field(default={})
    sizes: list[str] = Field(default=[])
    size: str = ""
    num_inference_steps: int = 0
    strength: float | None = None
    partial_images: bool = False
    expected_seconds: float = 0.0
    batching: dict[str, dict[str, Any]] = Field(default={})


class ModelList(BaseModel):
    object: str
    data: list[ServedModel]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    words = {
        400: "The request is wrong; the message says what is allowed",
        401: "The key is missing or wrong",
        403: "A page of another site sends it, or it names another machine than this one, which has no key",
        404: "There is no such image or model",
        406: "The server makes none of the types of Accept",
        408: "The body does not come",
        413: "The body is too large",
        429: "Too many images wait; Retry-After tells when there is probably room",
        499: "The client has gone",
        500: "Drawing failed",
        503: "The model is being loaded, cannot be used, or its worker died twice",
        504: "The time of the request has ended",
    }
    return {status: {"model": ErrorAnswer, "description": words[status]} for status in statuses}


_PLACE = "#/components/schemas/{model}"
_BYTES = {mime: {"schema": {"type": "string", "format": "binary"}} for mime in MIME.values()}
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "e.g. image_generation.completed, or error"},
        "data": {"type": "string", "description": "JSON, with the event as its type"},
    },
    "required": ["event", "data"],
}
_DRAWN = {
    200: {
        "model": ImagesAnswer,
        "description": "Images; the bytes of one by `Accept`, or events with `stream`",
        "content": {**_BYTES, "text/event-stream": {"schema": _EVENT}},
    }
}
OPEN: dict[str, Any] = {"responses": _errors(403, 413)}
"""Documented answers of routes that need no key."""
KEYED: dict[str, Any] = {"responses": _errors(401, 403, 413)}
"""Documented answers of routes that need one."""
MODEL: dict[str, Any] = {"responses": _errors(401, 403, 404, 413)}
_DRAWS: dict[str, Any] = {
    "responses": _DRAWN | _errors(400, 401, 403, 404, 406, 408, 413, 429, 499, 500, 503, 504)
}
FILE_ANSWERS: dict[str, Any] = {
    "responses": {200: {"description": "The image", "content": _BYTES}} | _errors(403, 404, 413)
}


def _object() -> dict[str, Any]:
    """Return the schema of the body of /v1/images/generations."""
    schema = GenerationRequest.model_json_schema(ref_template=_PLACE)
    schema.pop("$defs")
    return schema


def _form() -> dict[str, Any]:
    """Return the schema of the form of /v1/images/edits."""
    schema = EditRequest.model_json_schema()
    schema.pop("$defs", None)
    fields = dict(schema["properties"])
    fields["loras"] = {"type": "string", "description": "JSON, as the field of generations"}
    file = {"type": "string", "format": "binary"}
    fields |= {"image": file, "image[]": {"type": "array", "items": file}, "mask": file}
    return {
        "type": "object",
        "title": "EditForm",
        "properties": fields,
        "required": ["prompt"],
        "additionalProperties": False,
    }


def _with_body(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    body = {"required": True, "content": {kind: {"schema": schema}}}
    return _DRAWS | {"openapi_extra": {"requestBody": body}}


GENERATIONS = _with_body("application/json", _object())
EDITS = _with_body("multipart/form-data", _form())


def describe(app: FastAPI) -> None:
    """Describe errors in /openapi.json as the server answers them: 400 and not 422."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        schema = plain()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            schema["components"]["schemas"].pop(name, None)
        schema["components"]["schemas"]["LoraRequest"] = LoraRequest.model_json_schema()
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
