"""The part of /openapi.json about answers, and the form of edits; a test checks the server against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from vivace.serve.http.requests import EditRequest
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


_BYTES = {mime: {"schema": {"type": "string", "format": "binary"}} for mime in MIME.values()}
_EVENT = {
    "type": "object",
    "properties": {
        "event": {"type": "string", "description": "e.g. image_generation.completed, or error"},
        "data": {"type": "string", "description": "JSON, with the event as its type"},
    },
    "required": ["event", "data"],
}
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {
        "model": ErrorAnswer,
        "description": "The request is wrong (400, 404, 406, 408, 413) or not allowed (401, 403), its client has gone "
        "(499), or too many images wait (429, with Retry-After)",
    },
    "5XX": {
        "model": ErrorAnswer,
        "description": "Drawing failed (500), the model is being loaded, cannot be used, or its worker died twice "
        "(503), or the time of the request has ended (504)",
    },
}
IMAGES: dict[int | str, dict[str, Any]] = {
    200: {
        "model": ImagesAnswer,
        "description": "Images; the bytes of one by `Accept`, or events with `stream`",
        "content": {**_BYTES, "text/event-stream": {"schema": _EVENT}},
    },
    **ERRORS,
}
FILE: dict[int | str, dict[str, Any]] = {200: {"description": "The image", "content": _BYTES}, **ERRORS}


def form_of_edits() -> dict[str, Any]:
    """Return the body of /v1/images/edits: the fields of `EditRequest` and the files that no model has."""
    schema = EditRequest.model_json_schema()
    schema.pop("$defs", None)
    file = {"type": "string", "format": "binary"}
    schema["properties"] |= {
        "loras": {"type": "string", "description": "JSON, as the field of generations"},
        "image": file,
        "image[]": {"type": "array", "items": file},
        "mask": file,
    }
    return {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": schema}}}}
