"""Honest server? Whether a source follows its requests, each with the request that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vivace.answers.formatting import count
from vivace.measure.damage.details import resized
from vivace.measure.image_metrics import match
from vivace.proofs.checks.image_findings import ImageFinding
from vivace.proofs.checks.pair_figures import ROUNDING_DB, ReadImage, are_equal, is_near, match_of, psnr_of
from vivace.proofs.http import NoAnswer
from vivace.proofs.sides.drawing import DrawJob, DrawnImage
from vivace.proofs.sides.endpoint import NO_IMAGES, Endpoint
from vivace.proofs.sides.probes import Probe
from vivace.proofs.verdicts.verdict import ProofAnswer, ProofVerdict

ReadDrawn = Callable[[DrawnImage], ReadImage]
"""Reads an image that is not kept."""
_UNKNOWN_FIELD = "no_such_field_by_vivace"
_IMPOSSIBLE: tuple[tuple[str, Any], ...] = (("size", "abc"), ("n", 0), ("num_inference_steps", -1))
_NAMES = {
    "seed": "the seed",
    "large seed": "a seed above 2^31",
    "num_inference_steps": "the number of steps",
    "guidance_scale": "the guidance",
    "case of letters": "the case of the prompt's letters",
    "quotes": "a pair of quotes around the prompt",
    "other scripts": "words of other scripts",
    "end of a long prompt": "the end of a long prompt",
}
_OF_THE_SAME_MODEL = ("case of letters", "quotes", "other scripts", "end of a long prompt")
"""What another model than the reference's may ignore."""
_BY_REFERENCE_ALONE = ("guidance_scale", *_OF_THE_SAME_MODEL)
"""What good models may ignore; only against a reference that does not can it be said to be wrong."""
_THE_SAME_DB, _OTHER_DB = 54.0, 40.0
"""PSNR from which an image is certainly the reference's, and below which it is certainly not, while another one is."""
_OFF_DB = 46.0  # where its neighbour is equal to the last bit
_MOST_NAMES = 2
_FURTHER_DB = 10.0
"""By how much a value changes the reference's image more, where it changes this one by rounding at most."""
_RESIZED = 0.95
"""Match from which an image is another one, resized or cut."""


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
        findings: faults of its images as a set.
    """
    failed = [check for check in checks if check.status is Status.FAILED]
    passed = [check for check in checks if check.status is Status.PASSED]
    if failed or findings:
        names = list(dict.fromkeys(check.name for check in failed))
        more = ", …" if len(names) > _MOST_NAMES else ""
        number = f"{len(failed)} of {len(failed) + len(passed)} checks failed"
        parts = [f"{number} ({', '.join(names[:_MOST_NAMES])}{more})"] if failed else []
        return ProofAnswer(
            ProofVerdict.FAILED, "; ".join([*parts, *(finding.summary for finding in findings)])
        )
    if not passed:
        return ProofAnswer(ProofVerdict.LEFT_OUT, "nothing that could be asked")
    return ProofAnswer(ProofVerdict.PROVEN, f"{count(len(passed), 'check')} passed")


def answers_check(images: Sequence[ReadImage]) -> list[ServerCheck]:
    """Return that answers of status 200 have no image, or several, if some do: an error that looks like none."""
    wrong = [image for image in images if image.reason.startswith(NO_IMAGES)]
    if not wrong:
        return []
    name = "an answer of status 200 has the image"
    reason = f"{len(wrong)} of {len(images)} have not, e.g. {wrong[0].reason}"
    return [ServerCheck(name, Status.FAILED, reason, wrong[0].kept.request)]


def repeat_check(repeats: Sequence[tuple[str, ReadImage, ReadImage, str]]) -> ServerCheck:
    """Check that the same prompt and seed give the same image.

    Args:
        repeats: images that were drawn twice: the first, the second, and the request. The first was drawn first of all.
    """
    name = "the same seed twice gives the same image"
    levels = [(_repeat_level(first, again), what, request) for what, first, again, request in repeats]
    failed = [each for each in levels if each[0].status is Status.FAILED]
    passed = [each for each in levels if each[0].status is Status.PASSED]
    level, what, request = min(failed or passed or levels, key=lambda each: each[0].db)
    if not failed or len(levels) == 1:
        return ServerCheck(name, level.status, level.reason, request)
    is_first_alone = len(failed) == 1 and failed[0] is levels[0]
    which = ", the one drawn first of all" if is_first_alone else ""
    return ServerCheck(
        name, level.status, f"{level.reason}: {what} ({len(failed)} of {len(levels)}{which})", request
    )


@dataclass(frozen=True)
class _RepeatLevel:
    status: Status
    reason: str
    db: float = 0.0


def _repeat_level(first: ReadImage, again: ReadImage) -> _RepeatLevel:
    if (reason := missing(first, again)) is not None:
        return _RepeatLevel(Status.UNCLEAR, reason)
    db = psnr_of(first, again)
    if math.isinf(db):
        return _RepeatLevel(Status.PASSED, "every pixel is equal", db)
    if db >= ROUNDING_DB:
        return _RepeatLevel(Status.PASSED, f"but for rounding, PSNR {db:.0f} dB", db)
    kind = "a similar image" if is_near(first, again) else "another image"
    return _RepeatLevel(Status.FAILED, f"it gives {kind}, PSNR {db:.0f} dB", db)


def probe_check(
    probe: Probe,
    first: ReadImage,
    changed: ReadImage,
    reference: tuple[ReadImage, ReadImage] | None,
    request: str,
    *,
    is_same_model: bool,
    repeats: bool = True,
    draw_again: Callable[[], ReadImage | None] | None = None,
) -> ServerCheck:
    """Check that another value changes the image as it should.

    Args:
        reference: A's images of both values; None if it did not draw them.
        is_same_model: whether B's first image is A's.
        repeats: whether B draws the same image twice.
        draw_again: draws B's second image once more, to tell what is always wrong from what sometimes is.
    """
    if probe.name == "size":
        return _size_check(probe, first, changed, reference, request)
    name = f"{_NAMES[probe.name]} change{'' if probe.name == 'other scripts' else 's'} the image"
    if (reason := missing(first, changed)) is not None:
        is_refused = reason.startswith("HTTP 4")
        return ServerCheck(name, Status.UNCLEAR, f"refused: {reason}" if is_refused else reason, request)
    before, after = (
        f"{value:g}" if isinstance(value, float) else str(value) for value in (probe.before, probe.after)
    )
    values = f"{before} and {after}" if len(before) + len(after) < 60 else f"{before[:40]}… and {after[:40]}…"
    if reference is not None and _leaves_reference(first, changed, reference):
        if not repeats:
            return ServerCheck(name, Status.UNCLEAR, "B does not draw the same image twice", request)
        again = None if draw_again is None else draw_again()
        if again is not None and again.is_there and psnr_of(reference[1], again) >= _THE_SAME_DB:
            reason = f"of {probe.name} {after[:60]} it draws A's image only when it is asked again"
            return ServerCheck("a request gives the same image each time", Status.FAILED, reason, request)
        reason = f"of {before[:60]} it draws A's image, of {after[:60]} another one"
        return ServerCheck(name, Status.FAILED, reason, request)
    if not are_equal(first, changed):
        return ServerCheck(name, Status.PASSED, f"{probe.name} {values} give different images", request)
    if (
        reference is not None
        and missing(*reference) is None
        and not _leaves_no_doubt(psnr_of(*reference), psnr_of(first, changed))
    ):
        return ServerCheck(
            name, Status.UNCLEAR, f"it hardly changes the reference's images either ({values})", request
        )
    is_others = probe.name in _OF_THE_SAME_MODEL and not is_same_model
    if is_others or (reference is None and probe.name in _BY_REFERENCE_ALONE):
        differ = "" if reference is None else ", A's are different"
        reason = f"{values} give the same image{differ}; good models of other kinds may do so"
        return ServerCheck(name, Status.UNCLEAR, reason, request)
    return ServerCheck(name, Status.FAILED, f"{probe.name} {values} give the same image", request)


def field_checks(endpoint: Endpoint, job: DrawJob) -> list[ServerCheck]:
    """Return whether an images endpoint refuses unknown fields and impossible values. The requests are sent now."""
    return [
        _unknown_field_check(endpoint, job),
        *(_impossible_check(endpoint, job, name, value) for name, value in _IMPOSSIBLE),
    ]


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
    if answer.is_busy:
        return ServerCheck(name, Status.UNCLEAR, answer.complaint[:160], request)
    if answer.status == 200:
        return ServerCheck(name, Status.FAILED, f"HTTP 200: {otherwise}", request)
    return ServerCheck(name, Status.FAILED, f"{answer.complaint[:160]}, which is no refusal (4xx)", request)


def _leaves_reference(first: ReadImage, changed: ReadImage, reference: tuple[ReadImage, ReadImage]) -> bool:
    """Return whether one image equals the reference's to the last bits, and the other certainly does not."""
    if (
        missing(*reference) is not None
        or reference[0].size != first.size
        or reference[1].size != changed.size
    ):
        return False
    same, other = (psnr_of(a, b) for a, b in zip(reference, (first, changed), strict=True))
    return same >= _THE_SAME_DB and other < (_OFF_DB if math.isinf(same) else _OTHER_DB)


def _size_check(
    probe: Probe,
    first: ReadImage,
    changed: ReadImage,
    reference: tuple[ReadImage, ReadImage] | None,
    request: str,
) -> ServerCheck:
    name = "the size is what was asked for"
    if changed.size is None:
        is_refused = changed.reason.startswith("HTTP 4")  # which is honest
        status = Status.UNCLEAR if is_refused else Status.FAILED
        return ServerCheck(name, status, f"{probe.after}: {changed.reason}", request)
    size = "{}x{}".format(*changed.size)
    if size != probe.after:
        return ServerCheck(name, Status.FAILED, f"asked for {probe.after}, got {size}", request)
    is_of_a = reference is not None and missing(*reference) is None
    if first.is_there and not (is_of_a and reference is not None and _is_resized(*reference)):
        if _is_resized(first, changed):
            reason = f"{size} is the image of {probe.before}, resized or cut"
            return ServerCheck(name, Status.FAILED, reason, request)
        if (
            is_of_a
            and reference is not None
            and is_near(reference[0], first)
            and match_of(reference[1], changed) < 0.5
        ):
            reason = f"at {size} it draws another image than A, though not at {probe.before}"
            return ServerCheck(name, Status.FAILED, reason, request)
    return ServerCheck(name, Status.PASSED, size, request)


def _is_resized(first: ReadImage, other: ReadImage) -> bool:
    """Return whether an image is the first one, resized or cut to another size."""
    assert other.size is not None
    width, height = other.size
    whole = first.pixels
    images = [resized(whole, height, width)]
    top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
    if top >= 0 and left >= 0:
        images += [whole[top : top + height, left : left + width], whole[:height, :width]]
    return max(match(other.pixels, image) for image in images) >= _RESIZED


def missing(*images: ReadImage) -> str | None:
    return next((image.reason for image in images if not image.is_there), None)


def _leaves_no_doubt(reference_db: float, db: float) -> bool:
    """Return whether a value changes the reference's image, but not this one."""
    return reference_db < ROUNDING_DB and (math.isinf(db) or reference_db < db - _FURTHER_DB)
