"""Whether B follows its requests: each check with the request that shows it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from vivace.benchmark.load_testing.images_endpoint import NoAnswer
from vivace.measure.image_metrics import match, resized
from vivace.proofs.checks.pair_figures import (
    ROUNDING_DB,
    ReadImage,
    StoredImages,
    are_equal,
    is_near,
    match_of,
    psnr_of,
)
from vivace.proofs.sides.jobs import Probe, main_jobs, probes, repeat_jobs
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.side import DrawingFailure

_NAMES = {
    "seed": "the seed changes the image",
    "large seed": "a seed above 2^31 changes the image",
    "num_inference_steps": "the number of steps changes the image",
    "guidance_scale": "the guidance changes the image",
    "case of letters": "the case of the prompt's letters changes the image",
    "quotes": "a pair of quotes around the prompt changes the image",
    "other scripts": "words of other scripts change the image",
    "end of a long prompt": "the end of a long prompt changes the image",
    "size": "the size is what was asked for",
}
_OF_THE_SAME_MODEL = ("case of letters", "quotes", "other scripts", "end of a long prompt")
"""What another model than the reference's may ignore."""
_BY_REFERENCE_ALONE = ("guidance_scale", *_OF_THE_SAME_MODEL)
"""What good models may ignore; only against a reference that does not can it be said to be wrong."""
_THE_SAME_DB, _OTHER_DB = 54.0, 40.0
"""PSNR from which an image is certainly the reference's, and below which it is certainly not, while another one is."""
_OFF_DB = 46.0  # where its neighbour is equal to the last bit
_FURTHER_DB = 10.0
"""By how much a value changes the reference's image more, where it changes this one by rounding at most."""
_RESIZED = 0.95
"""Match from which an image is another one, resized or cut."""
Reference = tuple[ReadImage, ReadImage] | None
"""A's images of both values of a probe; None if it did not draw both."""


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


class CheckFailure(Exception):
    """What should hold does not; the message says what was seen.

    Args:
        name: what should hold, if it is not what was looked for.
    """

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


class CheckSkip(Exception):
    """It cannot be said whether it holds; the message says why."""


def run_check(name: str, request: str, observe: Callable[[], str]) -> ServerCheck:
    """Return a check.

    Args:
        observe: returns what was seen if the check passes, and raises CheckFailure, CheckSkip, or that no image came.
    """
    try:
        return ServerCheck(name, Status.PASSED, observe(), request)
    except CheckSkip as error:
        return ServerCheck(name, Status.UNCLEAR, str(error), request)
    except CheckFailure as error:
        return ServerCheck(error.name or name, Status.FAILED, str(error), request)
    except (DrawingFailure, NoAnswer) as error:
        return ServerCheck(
            name, Status.UNCLEAR if is_busy(str(error)) else Status.FAILED, str(error), request
        )


def require(*images: ReadImage) -> None:
    """Raise CheckSkip for an image that is not there."""
    for image in images:
        if not image.is_there:
            raise CheckSkip(f"refused: {image.reason}" if is_refusal(image.reason) else image.reason)


def is_refusal(reason: str) -> bool:
    """Return whether an image was refused (4xx), which is honest."""
    return reason.startswith("HTTP 4") and not is_busy(reason)


def is_busy(reason: str) -> bool:
    """Return whether there is no image since the server is busy, which is no fault."""
    return reason.startswith(("HTTP 429", "HTTP 503"))


def check_requests(plan: ProofPlan, images: StoredImages) -> Iterator[ServerCheck]:
    """Yield the checks of images that are drawn: repetitions, and other values."""
    repeated = _check_repeats(plan, images)
    yield repeated
    first = main_jobs(plan)[0]
    is_same_model = is_near(images.image("a", first), images.image("b", first))
    for probe in probes(plan):
        drawn = images.image("b", probe.base), images.image("b", probe.job)
        both = images.image("a", probe.base), images.image("a", probe.job)
        is_drawn = probe.is_of_reference and all(image.is_there for image in both)
        known = _ProbeContext(both if is_drawn else None, is_same_model, repeated.status is not Status.FAILED)

        def observe(
            probe: Probe = probe, drawn: tuple[ReadImage, ReadImage] = drawn, known: _ProbeContext = known
        ) -> str:
            if probe.name == "size":
                return _observe_size(probe, *drawn, known.reference)
            return _observe_change(probe, *drawn, known, lambda: _draw_again(plan, probe, images))

        yield run_check(_NAMES[probe.name], plan.b.request_text(probe.job), observe)


@dataclass(frozen=True)
class _ProbeContext:
    """What else is known: A's images, whether B's first is A's, whether B draws the same image twice."""

    reference: Reference
    is_same_model: bool
    repeats: bool


def _check_repeats(plan: ProofPlan, images: StoredImages) -> ServerCheck:
    jobs = repeat_jobs(plan)
    drawn = [(images.image("b", replace(job, repeat=0)), images.image("b", job), job) for job in jobs]
    there = [each for each in drawn if each[0].is_there and each[1].is_there]
    first, again, job = min(there or drawn[:1], key=lambda each: psnr_of(each[0], each[1]))

    def observe() -> str:
        require(first, again)
        db = psnr_of(first, again)
        if db >= ROUNDING_DB:
            return "every pixel is equal" if math.isinf(db) else f"but for rounding, PSNR {db:.0f} dB"
        kind = "a similar image" if is_near(first, again) else "another image"
        num_failed = sum(not are_equal(one, two) for one, two, _ in there)
        raise CheckFailure(f"it gives {kind}, PSNR {db:.0f} dB: {job.label} ({num_failed} of {len(drawn)})")

    return run_check("the same seed twice gives the same image", plan.b.request_text(job), observe)


def _observe_change(
    probe: Probe,
    first: ReadImage,
    changed: ReadImage,
    known: _ProbeContext,
    draw_again: Callable[[], ReadImage | None],
) -> str:
    """See whether another value changes the image as it should."""
    require(first, changed)
    before, after = (f"{v:g}" if isinstance(v, float) else str(v) for v in (probe.before, probe.after))
    values = f"{before} and {after}" if len(before) + len(after) < 60 else f"{before[:40]}… and {after[:40]}…"
    reference = known.reference
    if reference is not None and _leaves_reference(first, changed, reference):
        if not known.repeats:
            raise CheckSkip("B does not draw the same image twice")
        again = draw_again()
        if again is not None and psnr_of(reference[1], again) >= _THE_SAME_DB:
            raise CheckFailure(
                f"of {probe.name} {after[:60]} it draws A's image only when it is asked again",
                "a request gives the same image each time",
            )
        raise CheckFailure(f"of {before[:60]} it draws A's image, of {after[:60]} another one")
    if not are_equal(first, changed):
        return f"{probe.name} {values} give different images"
    if reference is not None and not _leaves_no_doubt(psnr_of(*reference), psnr_of(first, changed)):
        raise CheckSkip(f"it hardly changes the reference's images either ({values})")
    is_others = probe.name in _OF_THE_SAME_MODEL and not known.is_same_model
    if is_others or (reference is None and probe.name in _BY_REFERENCE_ALONE):
        differ = "" if reference is None else ", A's are different"
        raise CheckSkip(f"{values} give the same image{differ}; good models of other kinds may do so")
    raise CheckFailure(f"{probe.name} {values} give the same image")


def _draw_again(plan: ProofPlan, probe: Probe, images: StoredImages) -> ReadImage | None:
    """Draw B's second image once more, to tell what is always wrong from what sometimes is."""
    try:
        with plan.b.open(plan) as draw:
            return images.read(draw(probe.job))
    except DrawingFailure:
        return None


def _leaves_reference(first: ReadImage, changed: ReadImage, reference: Sequence[ReadImage]) -> bool:
    """Return whether one image equals the reference's to the last bits, and the other certainly does not."""
    if (reference[0].size, reference[1].size) != (first.size, changed.size):
        return False
    same, other = (psnr_of(a, b) for a, b in zip(reference, (first, changed), strict=True))
    return same >= _THE_SAME_DB and other < (_OFF_DB if math.isinf(same) else _OTHER_DB)


def _leaves_no_doubt(reference_db: float, db: float) -> bool:
    """Return whether a value changes the reference's image, but not this one."""
    return reference_db < ROUNDING_DB and (math.isinf(db) or reference_db < db - _FURTHER_DB)


def _observe_size(probe: Probe, first: ReadImage, changed: ReadImage, reference: Reference) -> str:
    """See whether the image has the size that was asked for, and is drawn in it."""
    if is_refusal(changed.reason):
        raise CheckSkip(f"{probe.after}: {changed.reason}")
    if changed.size is None:
        raise CheckFailure(f"{probe.after}: {changed.reason}")
    size = "{}x{}".format(*changed.size)
    if size != probe.after:
        raise CheckFailure(f"asked for {probe.after}, got {size}")
    if first.is_there and (reference is None or not _is_resized(*reference)):
        if _is_resized(first, changed):
            raise CheckFailure(f"{size} is the image of {probe.before}, resized or cut")
        if reference is not None and is_near(reference[0], first) and match_of(reference[1], changed) < 0.5:
            raise CheckFailure(f"at {size} it draws another image than A, though not at {probe.before}")
    return size


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
