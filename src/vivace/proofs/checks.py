"""Honest server? Whether a source follows its requests, each with the request that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vivace.measure.quality import Pixels, match
from vivace.proofs.drawing import DrawingFailed, DrawJob, DrawnImage, suffix_of
from vivace.proofs.endpoint import Endpoint
from vivace.proofs.figures import ReadImage
from vivace.proofs.findings import ImageFinding
from vivace.proofs.http import NoAnswer
from vivace.proofs.probes import Probe
from vivace.proofs.same import ROUNDING_DB
from vivace.proofs.verdict import ProofAnswer, ProofVerdict
from vivace.report.value_text import count
from vivace.spec.limits import DEFAULT_LIMITS

ReadDrawn = Callable[[DrawnImage], ReadImage]
"""Reads an image that is not kept."""
_UNKNOWN_FIELD = "no_such_field_by_vivace"
_IMPOSSIBLE: tuple[tuple[str, Any], ...] = (("size", "abc"), ("n", 0), ("num_inference_steps", -1))
_NAMES = {"seed": "the seed", "num_inference_steps": "the number of steps", "guidance_scale": "the guidance"}


class Status(StrEnum):
    """Whether a check passed."""

    PASSED = "passed"
    FAILED = "failed"
    UNCLEAR = "not checked"


@dataclass(frozen=True)
class ServerCheck:
    """A check: what should hold, whether it does, the observation, and the request that shows it."""

    name: str
    status: Status
    reason: str
    request: str = ""


def honest(checks: Sequence[ServerCheck], findings: Sequence[ImageFinding]) -> ProofAnswer:
    """Return whether a source follows its requests.

    Args:
        findings: what is wrong with its images as a set.
    """
    failed = [check for check in checks if check.status is Status.FAILED]
    passed = [check for check in checks if check.status is Status.PASSED]
    if failed or findings:
        parts = [f"{len(failed)} of {len(failed) + len(passed)} checks failed"] if failed else []
        return ProofAnswer(
            ProofVerdict.FAILED, "; ".join([*parts, *(finding.summary for finding in findings)])
        )
    if not passed:
        return ProofAnswer(ProofVerdict.LEFT_OUT, "nothing that could be asked")
    return ProofAnswer(ProofVerdict.PROVEN, f"{count(len(passed), 'check')} passed")


def repeat_check(first: ReadImage, again: ReadImage, request: str) -> ServerCheck:
    """Check that the same prompt and seed give the same image."""
    name = "the same seed twice gives the same image"
    if (missing := _missing(first, again)) is not None:
        return ServerCheck(name, Status.UNCLEAR, missing, request)
    db = _psnr(first.pixels, again.pixels) if first.size == again.size else 0.0
    if math.isinf(db):
        return ServerCheck(name, Status.PASSED, "every pixel is equal", request)
    if db >= ROUNDING_DB:
        return ServerCheck(name, Status.PASSED, f"but for rounding, PSNR {db:.0f} dB", request)
    kind = "another image" if _match(first, again) < (DEFAULT_LIMITS.match or 0.9) else "a similar image"
    return ServerCheck(name, Status.FAILED, f"it gives {kind}, PSNR {db:.0f} dB", request)


def probe_check(
    probe: Probe,
    first: ReadImage,
    changed: ReadImage,
    reference: tuple[ReadImage, ReadImage] | None,
    request: str,
) -> ServerCheck:
    """Check that another value changes the image as it should.

    Args:
        reference: A's images of both values; None if it did not draw them.
    """
    if probe.name == "size":
        return _size_check(probe, changed, request)
    name = f"{_NAMES[probe.name]} changes the image"
    if (missing := _missing(first, changed)) is not None:
        return ServerCheck(name, Status.UNCLEAR, missing, request)
    values = f"{probe.before:g} and {probe.after:g}"
    if not _are_equal(first, changed):
        return ServerCheck(name, Status.PASSED, f"{probe.name} {values} give different images", request)
    if reference is not None and _missing(*reference) is None and _are_equal(*reference):
        return ServerCheck(
            name, Status.UNCLEAR, f"it does not change the reference's images either ({values})", request
        )
    if reference is None and probe.name == "guidance_scale":
        reason = f"{values} give the same image, as models without guidance do"
        return ServerCheck(name, Status.UNCLEAR, reason, request)
    return ServerCheck(name, Status.FAILED, f"{probe.name} {values} give the same image", request)


def endpoint_checks(endpoint: Endpoint, job: DrawJob, first: ReadImage, read: ReadDrawn) -> list[ServerCheck]:
    """Return the checks of an images endpoint's own fields. The requests are sent now.

    Args:
        job: of an image that the endpoint has drawn.
        first: that image.
    """
    checks = [*_number_checks(endpoint, job, first, read), _unknown_field_check(endpoint, job)]
    checks += [_impossible_check(endpoint, job, name, value) for name, value in _IMPOSSIBLE]
    checks.append(_together_check(endpoint, job, first, read))
    return checks


def _number_checks(endpoint: Endpoint, job: DrawJob, first: ReadImage, read: ReadDrawn) -> list[ServerCheck]:
    body = endpoint.body(job.prompt, job.seed, job.settings, n=2)
    request = endpoint.curl(body)
    name = "n=2 gives two images"
    try:
        contents = endpoint.images(body).contents
        images = [read(DrawnImage(content, suffix_of(content))) for content in contents]
    except DrawingFailed as error:
        return [ServerCheck(name, Status.FAILED, str(error), request)]
    if len(images) != 2:
        return [ServerCheck(name, Status.FAILED, f"asked for 2 images, got {len(images)}", request)]
    if (missing := _missing(*images)) is not None:
        return [ServerCheck(name, Status.FAILED, missing, request)]
    if _are_equal(*images):
        return [ServerCheck(name, Status.FAILED, "both images are the same", request)]
    checks = [ServerCheck(name, Status.PASSED, "two different images", request)]
    name = "n=2 begins with the image of n=1"
    if _missing(first, images[0]) is None and _is_near(first, images[0]):
        return [
            *checks,
            ServerCheck(name, Status.PASSED, "the first of two images is that of the seed", request),
        ]
    return [*checks, ServerCheck(name, Status.FAILED, "a batch changes what the seed draws", request)]


def _unknown_field_check(endpoint: Endpoint, job: DrawJob) -> ServerCheck:
    body = endpoint.body(job.prompt, job.seed, job.settings, **{_UNKNOWN_FIELD: 1})
    return _refusal(
        endpoint, body, "an unknown field is refused", "an unknown field is ignored, so a typo is too"
    )


def _impossible_check(endpoint: Endpoint, job: DrawJob, field: str, value: Any) -> ServerCheck:
    body = endpoint.body(job.prompt, job.seed, job.settings, **{field: value})
    return _refusal(
        endpoint, body, f"{field}={value} is refused", f"{field}={value} is taken for something else"
    )


def _refusal(endpoint: Endpoint, body: dict[str, Any], name: str, otherwise: str) -> ServerCheck:
    request = endpoint.curl(body)
    try:
        answer = endpoint.ask(body)
    except NoAnswer as error:
        return ServerCheck(name, Status.FAILED, str(error), request)
    if answer.is_refusal:
        return ServerCheck(name, Status.PASSED, f"HTTP {answer.status}", request)
    if answer.status == 200:
        return ServerCheck(name, Status.FAILED, f"HTTP 200: {otherwise}", request)
    return ServerCheck(name, Status.FAILED, f"{answer.complaint[:160]}, which is no refusal (4xx)", request)


def _together_check(endpoint: Endpoint, job: DrawJob, first: ReadImage, read: ReadDrawn) -> ServerCheck:
    """Check that a request gets its own image beside another one, after all invalid requests."""
    name = "two requests at once give each its own image"
    body = endpoint.body(job.prompt, job.seed, job.settings)
    request = endpoint.curl(body)
    with ThreadPoolExecutor(2) as pool:
        drawn = [
            pool.submit(endpoint.draw, job.prompt, seed, job.settings) for seed in (job.seed, job.seed + 1)
        ]
        try:
            own, other = (read(result.result()) for result in drawn)
        except DrawingFailed as error:
            return ServerCheck(name, Status.FAILED, str(error), request)
    if (missing := _missing(first, own, other)) is not None:
        return ServerCheck(name, Status.UNCLEAR, missing, request)
    if not _is_near(first, own):
        return ServerCheck(name, Status.FAILED, "beside another request it draws another image", request)
    return ServerCheck(name, Status.PASSED, "as alone", request)


def _size_check(probe: Probe, changed: ReadImage, request: str) -> ServerCheck:
    name = "the size is what was asked for"
    if changed.size is None:
        is_refused = changed.reason.startswith("HTTP 4")  # which is honest
        status = Status.UNCLEAR if is_refused else Status.FAILED
        return ServerCheck(name, status, f"{probe.after}: {changed.reason}", request)
    size = "{}x{}".format(*changed.size)
    if size == probe.after:
        return ServerCheck(name, Status.PASSED, size, request)
    return ServerCheck(name, Status.FAILED, f"asked for {probe.after}, got {size}", request)


def _missing(*images: ReadImage) -> str | None:
    return next((image.reason for image in images if not image.is_there), None)


def _are_equal(a: ReadImage, b: ReadImage) -> bool:
    return a.size == b.size and _psnr(a.pixels, b.pixels) >= ROUNDING_DB


def _is_near(a: ReadImage, b: ReadImage) -> bool:
    return a.size == b.size and _match(a, b) >= (DEFAULT_LIMITS.match or 0.9)


def _match(a: ReadImage, b: ReadImage) -> float:
    return match(b.pixels, a.pixels) if a.size == b.size else -1.0


def _psnr(a: Pixels, b: Pixels) -> float:
    error = float(((a - b) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(255.0**2 / error)
