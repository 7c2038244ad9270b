"""Check that requests do not affect each other: under load, after a cancelled one, and beside a LoRA or a negative
prompt.

The requests are sent now, after the images of the proof are drawn, so each is compared with the image that the same
request got alone.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vivace.proofs.checks.pair_figures import ReadImage, are_equal, is_near
from vivace.proofs.checks.server_checks import ReadDrawn, ServerCheck, Status, missing
from vivace.proofs.http import NoAnswer
from vivace.proofs.sides.drawing import DrawingFailed, DrawJob, DrawnImage, suffix_of
from vivace.proofs.sides.endpoint import Endpoint

_AT_ONCE = 8
"""More than most servers draw in a batch."""
_CANCELLED_AFTER = 0.3
"""Of the time of an image."""
_LEAST_S = 0.002
_BUSY = ("HTTP 429", "HTTP 503")
Drawn = tuple[DrawJob, ReadImage]


def together_check(endpoint: Endpoint, drawn: Sequence[Drawn], read: ReadDrawn) -> ServerCheck:
    """Check that several requests at once give each its own image.

    Args:
        drawn: images that were drawn alone, in order.
    """
    chosen = [(job, image) for job, image in drawn if image.is_there][:_AT_ONCE]
    name = "requests at once give each its own image"
    requests = [endpoint.curl(endpoint.body(job.prompt, job.seed, job.settings)) for job, _ in chosen]
    load = f"{' & '.join(requests)} & wait"
    with ThreadPoolExecutor(max(1, len(chosen))) as pool:
        results = [pool.submit(endpoint.draw, job.prompt, job.seed, job.settings) for job, _ in chosen]
    num_busy = 0
    for (job, alone), result in zip(chosen, results, strict=True):
        try:
            image = read(result.result())
        except DrawingFailed as error:
            if _without_image(error) is Status.FAILED:
                return ServerCheck(name, Status.FAILED, str(error), load)
            num_busy += 1
            continue
        if (reason := missing(alone, image)) is not None:
            return ServerCheck(name, Status.UNCLEAR, reason, load)
        if not is_near(alone, image):
            is_others = any(other is not alone and are_equal(other, image) for _, other in chosen)
            what = "the image of another request" if is_others else "another image than alone"
            return ServerCheck(name, Status.FAILED, f"“{job.prompt[:60]}” seed {job.seed} gets {what}", load)
    if num_busy > len(chosen) - 2:
        return ServerCheck(name, Status.UNCLEAR, "it draws one at a time, and is busy for others", load)
    reason = f"{len(chosen)} at once, as alone" + (f"; for {num_busy} it was busy" if num_busy else "")
    return ServerCheck(name, Status.PASSED, reason, load)


def cancelled_check(endpoint: Endpoint, drawn: Sequence[Drawn], read: ReadDrawn) -> ServerCheck:
    """Check that a request whose client goes away does not spoil the next one."""
    name = "a cancelled request does not spoil the next one"
    job, first = drawn[0]
    other = drawn[-1][0]
    body = endpoint.body(job.prompt, job.seed, job.settings)
    seconds = first.kept.seconds or drawn[-1][1].kept.seconds or 1.0
    cancelled = endpoint.body(other.prompt, other.seed, other.settings)
    after_s = max(_LEAST_S, _CANCELLED_AFTER * seconds)
    request = f"{endpoint.curl(cancelled)} --max-time {after_s:.3f}; {endpoint.curl(body)}"
    times = (after_s, _LEAST_S)
    was_cancelled = any(endpoint.cancelled(cancelled, after_s) for after_s in times)
    for which in ("next one", "next but one"):  # a queue may give its image to either
        try:
            image = read(endpoint.draw(job.prompt, job.seed, job.settings))
        except DrawingFailed as error:
            return ServerCheck(name, _without_image(error), str(error), request)
        if (reason := missing(first, image)) is not None:
            return ServerCheck(name, Status.UNCLEAR, reason, request)
        if not is_near(first, image):
            return ServerCheck(name, Status.FAILED, f"the {which} gets another image", request)
    if not was_cancelled:
        return ServerCheck(name, Status.UNCLEAR, "it answers before anything can be cancelled", request)
    return ServerCheck(name, Status.PASSED, "the next one gets its own image", request)


def negative_prompt_check(
    endpoint: Endpoint, job: DrawJob, first: ReadImage, read: ReadDrawn
) -> ServerCheck | None:
    """Check that a negative prompt changes the image, or is refused; None for models without guidance."""
    guidance = job.settings.guidance_scale
    if guidance is not None and guidance <= 1:
        return None
    name = "a negative prompt changes the image, or is refused"
    body = endpoint.body(job.prompt, job.seed, job.settings, negative_prompt=job.prompt)
    request = endpoint.curl(body)
    try:
        answer = endpoint.ask(body)
        if answer.is_refusal:
            return ServerCheck(name, Status.PASSED, f"HTTP {answer.status}", request)
        image = _image(endpoint, body, read)
    except (NoAnswer, DrawingFailed) as error:
        return ServerCheck(name, _without_image(error), str(error), request)
    if (reason := missing(first, image)) is not None:
        return ServerCheck(name, Status.UNCLEAR, reason, request)
    if not are_equal(first, image):
        return ServerCheck(name, Status.PASSED, "it gives another image", request)
    status = Status.UNCLEAR if guidance is None else Status.FAILED
    return ServerCheck(name, status, "it is accepted and changes nothing", request)


def lora_checks(
    endpoint: Endpoint, job: DrawJob, first: ReadImage, reference: ReadImage | None, read: ReadDrawn
) -> list[ServerCheck]:
    """Check that each field that names a LoRA changes the image of its own request, at its own strength, and no other.

    Args:
        first: B's image with the field.
        reference: A's; None if there is none.
    """
    body = endpoint.body(job.prompt, job.seed, job.settings)
    checks = []
    for field in body:
        if "lora" not in field.lower() and "adapter" not in field.lower():
            continue
        plain = {name: value for name, value in body.items() if name != field}
        request = "; ".join(endpoint.curl(each) for each in (body, plain, body, plain))
        name = f"{field} changes the image of its own request alone"
        try:
            before, beside, after = (_image(endpoint, each, read) for each in (plain, body, plain))
        except DrawingFailed as error:
            checks.append(ServerCheck(name, _without_image(error), f"without it: {error}", request))
            continue
        checks.append(ServerCheck(name, *_of_lora(first, before, beside, after), request))
        if reference is not None and reference.is_there and not are_equal(reference, first):
            checks += _strength_check(endpoint, body, field, first, reference, read)
    return checks


def _of_lora(first: ReadImage, before: ReadImage, beside: ReadImage, after: ReadImage) -> tuple[Status, str]:
    if (reason := missing(first, before, beside, after)) is not None:
        return Status.UNCLEAR, reason
    if are_equal(first, before):
        return (
            Status.FAILED,
            "the image is the same without it: it is ignored, or stays on after the request before",
        )
    if not is_near(first, beside) or (are_equal(before, beside) and not are_equal(first, beside)):
        return Status.FAILED, "after a request without it, its image is another one"
    if not are_equal(before, after):
        return Status.FAILED, "after a request with it, the image without it is another one: it stays on"
    return Status.PASSED, "with it and without it are different images, in any order"


def _strength_check(
    endpoint: Endpoint,
    body: dict[str, Any],
    field: str,
    first: ReadImage,
    reference: ReadImage,
    read: ReadDrawn,
) -> list[ServerCheck]:
    """Return a finding if another strength gives A's image."""
    name = f"{field} works at the strength that is asked for"
    for factor, words in ((2.0, "half"), (0.5, "twice")):
        scaled = _scaled(body[field], factor)
        if scaled is None:
            return []
        changed = body | {field: scaled}
        try:
            image = _image(endpoint, changed, read)
        except DrawingFailed:
            continue
        if are_equal(reference, image):
            reason = f"it works at {words} the strength: at {factor:g} times it, the image is A's"
            return [ServerCheck(name, Status.FAILED, reason, endpoint.curl(changed))]
    return []


def _without_image(error: Exception) -> Status:
    """Return the status of a check whose image was not drawn. To be busy is no fault."""
    return Status.UNCLEAR if str(error).startswith(_BUSY) else Status.FAILED


def _scaled(value: Any, factor: float) -> Any:
    """Return a list of LoRAs with other scales; None for an unknown format."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return None
    scaled = copy.deepcopy(value)
    for each in scaled:
        scale = each.get("scale", 1.0)
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            return None
        each["scale"] = scale * factor
    return scaled


def _image(endpoint: Endpoint, body: dict[str, Any], read: ReadDrawn) -> ReadImage:
    content = endpoint.images(body).contents[0]
    return read(DrawnImage(content, suffix_of(content)))
