"""Requests: strict JSON, the fields of the OpenAI images API and further ones under diffusers' names, what the client
wants to get, and the jobs that come of it. Unknown fields are errors."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from starlette.requests import ClientDisconnect

from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Task
from vivace.serve.http.responses import MIME, RequestError
from vivace.serve.queue.jobs import ImageJob, JobError, JobPicture, RequestedLora
from vivace.serve.settings import MAX_IMAGES, MAX_PROMPT, ModelState, ServeSettings

if TYPE_CHECKING:
    from starlette.requests import Request

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_MAX_SEED = 2**32 - 1
_MOST_STEPS = 4
"""Most steps of a request, as a multiple of the model's own, and `_FEW` at least."""
_FEW = 50
_MOST_DIGITS = 100


async def read_object(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request's body; RequestError if it is none."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise RequestError(
            None, f"send JSON, with the header Content-Type: application/json; got {kind[:100] or 'none'}"
        )
    check_encoding(request)
    try:
        content = parsed_json(await request.body())
    except ClientDisconnect:
        raise JobError(499, "the client has gone") from None
    except UnicodeDecodeError:
        raise RequestError(None, "the body is not JSON: its text is not UTF-8") from None
    except ValueError as error:
        raise RequestError(None, f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(None, 'the body is not a JSON object; give one, e.g. {"prompt": "a red circle"}')
    return content


def check_encoding(request: Request) -> None:
    """Raise RequestError if a body is said to be compressed: a small one may become a very large one."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity":
        raise RequestError(None, f"send the body as it is, without Content-Encoding: {encoding[:50]}")


def parsed_json(text: str | bytes) -> Any:
    """Parse a JSON text strictly: ValueError if it is too deep, has too long a number, or gives a name twice."""
    try:
        return json.loads(text, object_pairs_hook=_without_repeats, parse_int=_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{twice[:100]!r} is given twice; give it once")
    return content


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits is too long")
    return int(digits)


class LoraRequest(BaseModel):
    """A LoRA by its name in the server's folder."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: Annotated[str, Field(min_length=1, max_length=255)]
    scale: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 1.0


class ImageBody(BaseModel):
    """The fields of every request for images."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    model: Annotated[str, Field(max_length=300)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    size: Annotated[str, Field(max_length=20)] | None = None
    response_format: Literal["b64_json", "url"] | None = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = None
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0
    user: Annotated[str, Field(max_length=300)] | None = None
    seed: Annotated[int, Field(ge=0, le=_MAX_SEED)] | None = None
    num_inference_steps: Annotated[int, Field(ge=1, le=1000)] | None = None
    guidance_scale: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] | None = None
    negative_prompt: Annotated[str, Field(max_length=MAX_PROMPT)] | None = None
    loras: Annotated[list[LoraRequest], Field(max_length=8)] = []
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    quality: Literal["auto", "standard"] | None = None
    background: Literal["auto", "opaque"] | None = None
    moderation: Literal["auto", "low"] | None = None
    """These three of OpenAI's may be left to the server, and nothing else: it has no other value."""


def _allow_null(schema: dict[str, Any]) -> None:
    for name, field_schema in schema["properties"].items():
        if name not in schema["required"] and {"type": "null"} not in field_schema.get("anyOf", ()):
            default = {"default": field_schema.pop("default")}
            schema["properties"][name] = {"anyOf": [field_schema, {"type": "null"}], **default}


class GenerationRequest(ImageBody):
    """The body of POST /v1/images/generations. true and "1" are not accepted as numbers. Null means left out."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_allow_null)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, content: object) -> object:
        """Leave nulls out, which OpenAI's API allows and clients send for unset fields."""
        if not isinstance(content, dict):
            return content
        fields = cls.model_fields
        return {name: value for name, value in content.items() if value is not None or name not in fields}


_NOT_TEXT = {
    "n": "a number",
    "output_compression": "a number",
    "partial_images": "a number",
    "seed": "a number",
    "num_inference_steps": "a number",
    "guidance_scale": "a number",
    "timeout": "a number",
    "strength": "a number",
    "stream": "true or false",
    "keep_unmasked": "true or false",
    "loras": 'JSON, e.g. [{"name": "outlines", "scale": 0.8}]',
}


class EditRequest(ImageBody):
    """The fields of POST /v1/images/edits besides its images. What is not text is read as in JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)

    strength: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    keep_unmasked: bool = True

    @field_validator(*_NOT_TEXT, mode="before")
    @classmethod
    def _from_text(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            return value
        try:
            return parsed_json(value)
        except ValueError:
            raise ValueError(f"give {_NOT_TEXT[str(info.field_name)]}") from None


@dataclass(frozen=True)
class RequestSource:
    """Source images of a request, the size to draw at (None for what the request says), further arguments of the
    pipeline's call, and notes on what was cut off or assumed."""

    task: Task = "text"
    size: Size | None = None
    pictures: tuple[JobPicture, ...] = ()
    call: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def jobs_of(
    request: ImageBody,
    settings: ServeSettings,
    state: ModelState,
    source: RequestSource,
    owner: str,
) -> list[ImageJob]:
    """Return the jobs of a request of a key's owner; RequestError if it asks for something that this server does not
    do."""
    if source.task == "text" and not state.draws_text:
        raise RequestError(None, "this server draws from images; POST /v1/images/edits")
    check_model(request, settings, state)
    _check_output(request, state)
    size = source.size or requested_size(request.size, settings, state) or state.size
    steps = _steps(request, state)
    strength = source.call.get("strength")
    num_run = state.steps_run(steps, strength)
    if num_run < 1:
        raise RequestError(
            "strength",
            f"{strength:g} of {steps} steps runs none of them; give {1 / steps:.2g} or more, or more steps",
        )
    call = {
        "height": size.height,
        "width": size.width,
        "num_inference_steps": steps,
        **_guidance(request, state, state.takes if source.task == "text" else state.edits.takes),
        **source.call,
    }
    lora = _lora(request, settings, state)
    seed = _first_seed(request)
    timeout_s = min(settings.timeout_s, request.timeout or settings.timeout_s)
    deadline = time.monotonic() + timeout_s
    parts = request.partial_images
    return [
        ImageJob(
            prompt=request.prompt,
            seed=seed + number,
            size=size,
            steps=num_run,
            call=call,
            predicted_s=state.predicted_s(size, num_run),
            deadline=deadline,
            lora=lora,
            owner=owner,
            task=source.task,
            pictures=source.pictures,
            partials=tuple(
                sorted({round(num_run * (k + 1) / (parts + 1)) for k in range(parts)} - {0, num_run})
            ),
        )
        for number in range(request.n)
    ]


def _first_seed(request: ImageBody) -> int:
    """Return the seed of the first image. Each image can be asked for alone by its own."""
    most = _MAX_SEED - (request.n - 1)
    if request.seed is None:
        return secrets.randbelow(most + 1)
    if request.seed > most:
        raise RequestError(
            "seed", f"image k of n has seed + k, which is at most {_MAX_SEED}; give {most} or less"
        )
    return request.seed


def check_model(request: ImageBody, settings: ServeSettings, state: ModelState) -> None:
    if request.model not in (None, settings.name, state.name):
        message = f"this server has {settings.name!r}, not {request.model!r}"
        raise RequestError("model", message, 404, "model_not_found")


def _check_output(request: ImageBody, state: ModelState) -> None:
    if request.partial_images and not request.stream:
        raise RequestError("partial_images", "partial images come in a stream only; add stream=true")
    if request.partial_images and not state.has_partials:
        raise RequestError("partial_images", f"{state.name} has no partial images; leave it out")
    if request.output_format == "png" and request.output_compression not in (None, 100):
        raise RequestError("output_compression", "png is not compressed with loss; ask for jpeg or webp")
    if request.stream and request.response_format == "url":
        raise RequestError("response_format", "a stream has images as b64_json; leave response_format out")


def requested_size(text: str | None, settings: ServeSettings, state: ModelState) -> Size | None:
    """Return the size that a request names; None if it leaves it to the server. RequestError if it is not served."""
    if text in (None, "auto"):
        return None
    match = _SIZE.fullmatch(text or "")
    if match is None:
        raise RequestError("size", f"a size is WIDTHxHEIGHT in pixels, e.g. {state.size}; got {text!r}")
    size = Size(int(match[1]), int(match[2]))
    if size in state.speeds:
        return size
    if not settings.any_size:
        raise RequestError(
            "size", f"this server draws {', '.join(map(str, sorted(state.speeds)))}; got {size}"
        )
    if size.width % state.multiple or size.height % state.multiple:
        raise RequestError("size", f"width and height must be multiples of {state.multiple}; got {size}")
    largest = 4 * max(each.width * each.height for each in state.speeds)
    if size.width * size.height > largest:
        raise RequestError("size", f"an image has at most {largest:,} pixels here; {size} has more")
    return size


def _steps(request: ImageBody, state: ModelState) -> int:
    steps = request.num_inference_steps
    if steps is None:
        return state.steps
    most = max(_FEW, _MOST_STEPS * state.steps)
    if steps > most:
        raise RequestError("num_inference_steps", f"at most {most} steps are drawn here; got {steps}")
    return steps


def _guidance(request: ImageBody, state: ModelState, takes: frozenset[str]) -> dict[str, float | str]:
    call: dict[str, float | str] = {}
    scale = state.guidance if request.guidance_scale is None else request.guidance_scale
    if request.guidance_scale is not None:
        if "guidance_scale" not in takes:
            raise RequestError("guidance_scale", f"{state.name} has no guidance scale; leave it out")
        call["guidance_scale"] = request.guidance_scale
    if request.negative_prompt is not None:
        if "negative_prompt" not in takes or state.guided_above is None:
            raise RequestError("negative_prompt", f"{state.name} takes no negative prompt; leave it out")
        if scale is not None and scale <= state.guided_above:
            raise RequestError(
                "negative_prompt",
                f"it has no effect at guidance_scale {scale:g}; give more than {state.guided_above:g}, or leave it out",
            )
        call["negative_prompt"] = request.negative_prompt
    return call


def _lora(request: ImageBody, settings: ServeSettings, state: ModelState) -> RequestedLora | None:
    if not request.loras:
        return None
    if len(request.loras) > 1:
        raise RequestError("loras", "this server applies one LoRA at a time")
    (lora,) = request.loras
    loras = settings.lora_files()
    path = loras.get(lora.name)
    if path is None:
        fitting = sorted(loras.keys() - unfit_loras(loras, state).keys())
        names = ", ".join(fitting) or "none; the server was started without --loras"
        raise RequestError("loras", f"no LoRA {lora.name!r}; there are: {names}")
    reason = state.unfit_loras.get(str(path))
    if reason is not None:
        raise RequestError("loras", f"{lora.name!r} cannot be used: {reason}")
    return RequestedLora(lora.name, path, lora.scale)


def unfit_loras(loras: Mapping[str, Path], state: ModelState | None) -> dict[str, str]:
    """Return why LoRAs cannot be used, by name."""
    if state is None:
        return {}
    return {
        name: state.unfit_loras[str(path)]
        for name, path in sorted(loras.items())
        if str(path) in state.unfit_loras
    }


def accepted_format(header: str, body: ImageBody) -> str | None:
    """Return the format whose bytes a client prefers by its Accept header; None for JSON or events.

    Many clients list types that they do not need, e.g. text/html. They get JSON unless all listed types are images.

    Raises:
        JobError: only images of other types are accepted, or it conflicts with the rest of the request.
    """
    kinds = _accepted_kinds(header)
    formats = {mime: name for name, mime in MIME.items()} | {"image/*": body.output_format}
    for kind in kinds:
        if kind in formats:
            _check_alone(header, body, formats[kind])
            return formats[kind]
        if kind in ("application/json", "application/*", "*/*", "text/event-stream", "text/*"):
            return None
    if kinds and all(kind.startswith("image/") for kind in kinds):
        types = ", ".join(MIME.values())
        raise JobError(406, f"Accept: {header[:100]} has none of the types that this server sends: {types}")
    return None


def _check_alone(header: str, body: ImageBody, format_: str) -> None:
    if body.n > 1 or body.stream or body.response_format == "url":
        raise RequestError(
            None,
            f"Accept: {header[:100]} asks for the bytes of one image; leave n, stream and response_format out",
        )
    if format_ == "png" and body.output_compression not in (None, 100):
        raise RequestError("output_compression", "png is not compressed with loss; accept jpeg or webp")


def _accepted_kinds(header: str) -> list[str]:
    """Return the types of a header by their weights, without those that are refused by a weight of 0."""
    weights: dict[str, float] = {}
    for part in header.lower().split(","):
        kind, *parameters = (text.strip() for text in part.split(";"))
        weight = next((text[2:] for text in parameters if text.startswith("q=")), "1")
        weights[kind] = float(weight) if weight.replace(".", "", 1).isdecimal() else 1.0
    kinds = [kind for kind, weight in weights.items() if kind and weight > 0]
    return sorted(kinds, key=lambda kind: -weights[kind])
