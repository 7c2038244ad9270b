"""Bodies of requests: those of the OpenAI images API, and more under diffusers' names. Unknown fields are errors."""

from __future__ import annotations

import re
import secrets
import time
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from vivace.serve.jobs import ImageJob, RequestedLora
from vivace.serve.settings import MAX_IMAGES, MAX_PROMPT, ModelState, ServeSettings
from vivace.spec.sizes import Size

_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
_MAX_SEED = 2**32 - 1
_MOST_STEPS = 4
"""Times the model's own steps, at most, and `_FEW` at least."""
_FEW = 50


class RequestError(Exception):
    """A request that cannot be served.

    Attributes:
        field: that is wrong.
    """

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


class LoraRequest(BaseModel):
    """A LoRA by its name in the server's folder."""

    model_config = ConfigDict(extra="forbid")

    name: Annotated[str, Field(min_length=1, max_length=200)]
    scale: Annotated[float, Field(ge=-10, le=10, allow_inf_nan=False)] = 1.0


class GenerationRequest(BaseModel):
    """The body of POST /v1/images/generations."""

    model_config = ConfigDict(extra="forbid")

    prompt: Annotated[str, Field(min_length=1, max_length=MAX_PROMPT)]
    model: Annotated[str, Field(max_length=300)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_IMAGES)] = 1
    size: Annotated[str, Field(max_length=20)] | None = None
    response_format: Literal["b64_json", "url"] = "b64_json"
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


def jobs_of(request: GenerationRequest, settings: ServeSettings, state: ModelState) -> list[ImageJob]:
    """Return the jobs of a request.

    Raises:
        RequestError: it asks for what this server does not do.
    """
    if request.model is not None and request.model != state.name:
        raise RequestError("model", f"this server has {state.name!r}, not {request.model!r}")
    if request.partial_images and not request.stream:
        raise RequestError("partial_images", "partial images come in a stream only; add stream=true")
    if request.partial_images and not state.has_partials:
        raise RequestError("partial_images", f"{state.name} has no partial images; leave it out")
    if request.output_format == "png" and request.output_compression is not None:
        raise RequestError("output_compression", "png is not compressed with loss; ask for jpeg or webp")
    size = _size(request.size, settings, state)
    steps = _steps(request, state)
    call = {
        "height": size.height,
        "width": size.width,
        "num_inference_steps": steps,
        **_guidance(request, state),
    }
    lora = _lora(request, settings)
    seed = secrets.randbelow(_MAX_SEED - MAX_IMAGES) if request.seed is None else request.seed
    timeout_s = min(settings.timeout_s, request.timeout or settings.timeout_s)
    deadline = time.monotonic() + timeout_s
    parts = request.partial_images
    return [
        ImageJob(
            prompt=request.prompt,
            seed=seed + number,
            size=size,
            steps=steps,
            call=call,
            predicted_s=state.predicted_s(size, steps),
            deadline=deadline,
            lora=lora,
            partials=tuple(sorted({round(steps * (k + 1) / (parts + 1)) for k in range(parts)} - {0, steps})),
        )
        for number in range(request.n)
    ]


def _size(text: str | None, settings: ServeSettings, state: ModelState) -> Size:
    if text in (None, "auto"):
        return state.size
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


def _steps(request: GenerationRequest, state: ModelState) -> int:
    steps = request.num_inference_steps
    if steps is None:
        return state.steps
    most = max(_FEW, _MOST_STEPS * state.steps)
    if steps > most:
        raise RequestError("num_inference_steps", f"at most {most} steps are drawn here; got {steps}")
    return steps


def _guidance(request: GenerationRequest, state: ModelState) -> dict[str, float | str]:
    call: dict[str, float | str] = {}
    scale = state.guidance if request.guidance_scale is None else request.guidance_scale
    if request.guidance_scale is not None:
        if "guidance_scale" not in state.takes:
            raise RequestError("guidance_scale", f"{state.name} has no guidance scale; leave it out")
        call["guidance_scale"] = request.guidance_scale
    if request.negative_prompt is not None:
        if "negative_prompt" not in state.takes or state.guided_above is None:
            raise RequestError("negative_prompt", f"{state.name} takes no negative prompt; leave it out")
        if scale is not None and scale <= state.guided_above:
            raise RequestError(
                "negative_prompt",
                f"it has no effect at guidance_scale {scale:g}, above {state.guided_above:g} it has",
            )
        call["negative_prompt"] = request.negative_prompt
    return call


def _lora(request: GenerationRequest, settings: ServeSettings) -> RequestedLora | None:
    if not request.loras:
        return None
    if len(request.loras) > 1:
        raise RequestError("loras", "one LoRA at a time is served here")
    (lora,) = request.loras
    path = settings.loras.get(lora.name)
    if path is None:
        names = ", ".join(sorted(settings.loras)) or "none; the server was started without --loras"
        raise RequestError("loras", f"no LoRA {lora.name!r}; there are: {names}")
    return RequestedLora(lora.name, path, lora.scale)
