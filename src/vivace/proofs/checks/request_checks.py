"""Whether B follows its requests: each check with the request that shows it.

What only a server gets (several images, unknown fields, many requests at once) is sent now, after the images of the
proof are drawn, so each is compared with the image that the same request got alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Any

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
from vivace.proofs.sides.endpoint_side import NO_IMAGES, EndpointSide
from vivace.proofs.sides.plan import Probe, ProofPlan
from vivace.proofs.sides.side import DrawingFailure, DrawJob, DrawnImage, suffix_of

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
_AT_ONCE = 8
"""More than most servers draw in a batch."""
_CANCELLED_AFTER = 0.3
"""Of the time of an image."""
_LEAST_S = 0.002
_NUMBERS = ((2, "two"), (4, "four"))
_IMPOSSIBLE: tuple[tuple[str, Any], ...] = (("size", "abc"), ("n", 0), ("num_inference_steps", -1))
_SIZE = re.compile(r"\d+x\d+")
Reference = tuple[ReadImage, ReadImage]
"""A's images of both values of a probe."""


class Status(StrEnum):
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
    """What should hold does not; the message says what was seen, `name` what should hold if another thing."""

    def __init__(self, reason: str, name: str = "") -> None:
        super().__init__(reason)
        self.name = name


class CheckSkip(Exception):
    """It cannot be said whether it holds; the message says why."""


def run_check(name: str, request: str, observe: Callable[[], str]) -> ServerCheck:
    """Return a check. `observe` returns what was seen, or raises CheckFailure, CheckSkip, or that no image came."""
    try:
        return ServerCheck(name, Status.PASSED, observe(), request)
    except CheckSkip as error:
        return ServerCheck(name, Status.UNCLEAR, str(error), request)
    except CheckFailure as error:
        return ServerCheck(error.name or name, Status.FAILED, str(error), request)
    except (DrawingFailure, NoAnswer) as error:
        status = Status.UNCLEAR if _is_busy(str(error)) else Status.FAILED
        return ServerCheck(name, status, str(error), request)


def _require(*images: ReadImage) -> None:
    for image in images:
        if not image.is_there:
            raise CheckSkip(f"refused: {image.reason}" if _is_refusal(image.reason) else image.reason)


def _is_refusal(reason: str) -> bool:
    """Return whether an image was refused (4xx), which is honest."""
    return reason.startswith("HTTP 4") and not _is_busy(reason)


def _is_busy(reason: str) -> bool:
    """Return whether there is no image since the server is busy, which is no fault."""
    return reason.startswith(("HTTP 429", "HTTP 503"))


def check_all(plan: ProofPlan, images: StoredImages) -> Iterator[ServerCheck]:
    """Yield every check of B; none if it draws nothing."""
    drawn = [(job, images.image("b", job)) for job in plan.main_jobs]
    first = drawn[0][1]
    wrong = [image for _, image in drawn if image.reason.startswith(NO_IMAGES)]
    if wrong and isinstance(plan.b, EndpointSide):  # an error that looks like none
        reason = f"{len(wrong)} of {len(drawn)} have not, e.g. {wrong[0].reason}"
        name = "an answer of status 200 has the image"
        yield ServerCheck(name, Status.FAILED, reason, wrong[0].kept.request)
    if plan.b.draws and not first.is_there:
        yield ServerCheck("the first image is drawn", Status.UNCLEAR, first.reason, first.kept.request)
    elif plan.b.draws:
        repeated = _check_repeats(plan, images)
        yield repeated
        check = _ProbeChecks(plan, images, repeated.status is not Status.FAILED)
        for probe in plan.probes:
            name, request = _NAMES[probe.name], plan.b.request_text(probe.job)
            yield run_check(name, request, partial(check.observe, probe))
        if isinstance(plan.b, EndpointSide):
            yield from _EndpointChecks(plan.b, images, drawn).all(images.image("a", drawn[0][0]))


def _check_repeats(plan: ProofPlan, images: StoredImages) -> ServerCheck:
    jobs = plan.repeat_jobs
    drawn = [(images.image("b", replace(job, repeat=0)), images.image("b", job), job) for job in jobs]
    there = [each for each in drawn if each[0].is_there and each[1].is_there]
    first, again, job = min(there or drawn[:1], key=lambda each: psnr_of(each[0], each[1]))

    def observe() -> str:
        _require(first, again)
        db = psnr_of(first, again)
        if db >= ROUNDING_DB:
            return "every pixel is equal" if math.isinf(db) else f"but for rounding, PSNR {db:.0f} dB"
        kind = "a similar image" if is_near(first, again) else "another image"
        num_failed = sum(not are_equal(one, two) for one, two, _ in there)
        raise CheckFailure(f"it gives {kind}, PSNR {db:.0f} dB: {job.label} ({num_failed} of {len(drawn)})")

    return run_check("the same seed twice gives the same image", plan.b.request_text(job), observe)


@dataclass(frozen=True)
class _ProbeChecks:
    plan: ProofPlan
    images: StoredImages
    repeats: bool

    def observe(self, probe: Probe) -> str:
        first, changed = (self.images.image("b", job) for job in (probe.base, probe.job))
        of_a = self.images.image("a", probe.base), self.images.image("a", probe.job)
        reference = of_a if probe.is_of_reference and all(image.is_there for image in of_a) else None
        if probe.name == "size":
            return _observe_size(probe, first, changed, reference)
        _require(first, changed)
        before, after = (f"{v:g}" if isinstance(v, float) else str(v) for v in (probe.before, probe.after))
        if reference is not None and _leaves_reference(first, changed, reference):
            raise self._failure_beside_reference(probe, before[:60], after[:60], reference)
        values = f"{before[:40]} and {after[:40]}"
        if not are_equal(first, changed):
            return f"{probe.name} {values} give different images"
        if reference is not None and not _leaves_no_doubt(psnr_of(*reference), psnr_of(first, changed)):
            raise CheckSkip(f"it hardly changes the reference's images either ({values})")
        is_others = probe.name in _OF_THE_SAME_MODEL and not self._is_same_model
        if is_others or (reference is None and probe.name in _BY_REFERENCE_ALONE):
            differ = "" if reference is None else ", A's are different"
            raise CheckSkip(f"{values} give the same image{differ}; good models of other kinds may do so")
        raise CheckFailure(f"{probe.name} {values} give the same image")

    @property
    def _is_same_model(self) -> bool:
        first = self.plan.main_jobs[0]
        return is_near(self.images.image("a", first), self.images.image("b", first))

    def _failure_beside_reference(
        self, probe: Probe, before: str, after: str, reference: Reference
    ) -> Exception:
        """Draw B's second image once more, to tell what is always wrong from what sometimes is."""
        if not self.repeats:
            return CheckSkip("B does not draw the same image twice")
        try:
            with self.plan.b.open(self.plan) as draw:
                again = self.images.read(draw(probe.job))
        except DrawingFailure:
            again = None
        if again is not None and psnr_of(reference[1], again) >= _THE_SAME_DB:
            reason = f"of {probe.name} {after} it draws A's image only when it is asked again"
            return CheckFailure(reason, "a request gives the same image each time")
        return CheckFailure(f"of {before} it draws A's image, of {after} another one")


def _leaves_reference(first: ReadImage, changed: ReadImage, reference: Reference) -> bool:
    """Return whether one image equals the reference's to the last bits, and the other certainly does not."""
    if (reference[0].size, reference[1].size) != (first.size, changed.size):
        return False
    same, other = psnr_of(reference[0], first), psnr_of(reference[1], changed)
    return same >= _THE_SAME_DB and other < (_OFF_DB if math.isinf(same) else _OTHER_DB)


def _leaves_no_doubt(reference_db: float, db: float) -> bool:
    return reference_db < ROUNDING_DB and (math.isinf(db) or reference_db < db - _FURTHER_DB)


def _observe_size(probe: Probe, first: ReadImage, changed: ReadImage, reference: Reference | None) -> str:
    """See whether the image has the size that was asked for, and is drawn in it."""
    if changed.size is None:
        kind = CheckSkip if _is_refusal(changed.reason) else CheckFailure
        raise kind(f"{probe.after}: {changed.reason}")
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
    assert other.size is not None
    width, height = other.size
    whole = first.pixels
    images = [resized(whole, height, width)]
    top, left = (whole.shape[0] - height) // 2, (whole.shape[1] - width) // 2
    if top >= 0 and left >= 0:
        images += [whole[top : top + height, left : left + width], whole[:height, :width]]
    return max(match(other.pixels, image) for image in images) >= _RESIZED


@dataclass(frozen=True)
class _EndpointChecks:
    """An endpoint with the images that it draws now. `drawn` are those of the proof, which it drew alone, in order."""

    side: EndpointSide
    images: StoredImages
    drawn: Sequence[tuple[DrawJob, ReadImage]]

    def all(self, reference: ReadImage) -> Iterator[ServerCheck]:
        """Yield the checks. `reference` is A's first image."""
        job, first = self.drawn[0]
        for number, in_words in _NUMBERS:
            yield from self._check_number(job, first, number, in_words)
        unknown = ("an unknown field is refused", "an unknown field is ignored, so a typo is too")
        yield self._check_refusal(self.side.body(job, no_such_field_by_vivace=1), *unknown)
        for field, value in _IMPOSSIBLE:
            words = (f"{field}={value} is refused", f"{field}={value} is taken for something else")
            yield self._check_refusal(self.side.body(job, **{field: value}), *words)
        yield from self._check_loras(job, first, reference)
        yield from self._check_negative_prompt(job, first)
        yield self._check_at_once()
        yield self._check_cancelled()

    def _draw(self, body: dict[str, Any]) -> ReadImage:
        return self._read(self.side.images(body).contents[0])

    def _read(self, content: bytes) -> ReadImage:
        return self.images.read(DrawnImage(content, suffix_of(content)))

    def _check_number(
        self, job: DrawJob, first: ReadImage, number: int, in_words: str
    ) -> Iterator[ServerCheck]:
        body = self.side.body(job, n=number)
        request, name = self.side.curl(body), f"n={number} gives {in_words} images"
        try:
            served = self.side.images(body)
            drawn = [self._read(content) for content in served.contents]
        except DrawingFailure as error:
            is_honest = _is_refusal(str(error)) or _is_busy(str(error))
            yield ServerCheck(name, Status.UNCLEAR if is_honest else Status.FAILED, str(error), request)
            return
        yield run_check(name, request, partial(_see_different, number, drawn))
        if not all(image.is_there for image in drawn):
            return
        if len(drawn) == number:
            name = f"n={number} begins with the image of n=1"
            yield run_check(name, request, partial(_see_first, first, drawn))
        if number == _NUMBERS[0][0] and (claims := _claims_of(job, served.says, drawn[0])):
            yield run_check("the answer says what is in it", request, partial(_see_claims, claims))

    def _check_refusal(self, body: dict[str, Any], name: str, otherwise: str) -> ServerCheck:
        def observe() -> str:
            answer = self.side.ask(body)
            if answer.is_busy:
                raise CheckSkip(answer.complaint[:160])
            if answer.status == 200:
                raise CheckFailure(f"HTTP 200: {otherwise}")
            if not answer.is_refusal:
                raise CheckFailure(f"{answer.complaint[:160]}, which is no refusal (4xx)")
            return f"HTTP {answer.status}"

        return run_check(name, self.side.curl(body), observe)

    def _check_negative_prompt(self, job: DrawJob, first: ReadImage) -> Iterator[ServerCheck]:
        """Yield whether a negative prompt changes the image, or is refused; nothing for models without guidance."""
        guidance = job.settings.guidance_scale
        body = self.side.body(job, negative_prompt=job.prompt)

        def observe() -> str:
            answer = self.side.ask(body)
            if answer.is_refusal:
                return f"HTTP {answer.status}"
            image = self._draw(body)
            _require(first, image)
            if are_equal(first, image):
                raise (CheckFailure if guidance else CheckSkip)("it is accepted and changes nothing")
            return "it gives another image"

        if guidance is None or guidance > 1:
            name = "a negative prompt changes the image, or is refused"
            yield run_check(name, self.side.curl(body), observe)

    def _check_at_once(self) -> ServerCheck:
        chosen = [(job, image) for job, image in self.drawn if image.is_there][:_AT_ONCE]

        def draw(job: DrawJob) -> DrawnImage | None:
            try:
                return self.side.draw(job)
            except DrawingFailure as error:
                if _is_busy(str(error)):
                    return None
                raise

        def observe() -> str:
            with ThreadPoolExecutor(len(chosen)) as pool:
                together = list(pool.map(draw, [job for job, _ in chosen]))
            for (job, alone), answer in zip(chosen, together, strict=True):
                if answer is not None:
                    image = self.images.read(answer)
                    _require(alone, image)
                    if not is_near(alone, image):
                        is_others = any(other is not alone and are_equal(other, image) for _, other in chosen)
                        what = "the image of another request" if is_others else "another image than alone"
                        raise CheckFailure(f"{job.label} gets {what}")
            num_busy = together.count(None)
            if num_busy > len(chosen) - 2:
                raise CheckSkip("it draws one at a time, and is busy for others")
            return f"{len(chosen)} at once, as alone" + (f"; for {num_busy} it was busy" if num_busy else "")

        request = f"{' & '.join(self.side.request_text(job) for job, _ in chosen)} & wait"
        return run_check("requests at once give each its own image", request, observe)

    def _check_cancelled(self) -> ServerCheck:
        """Check that a request whose client goes away does not spoil the next one."""
        (job, first), (other, last) = self.drawn[0], self.drawn[-1]
        after_s = max(_LEAST_S, _CANCELLED_AFTER * (first.kept.seconds or last.kept.seconds or 1.0))
        body = self.side.body(other)

        def observe() -> str:
            was_cancelled = self.side.hang_up(body, after_s) or self.side.hang_up(body, _LEAST_S)
            for which in ("next one", "next but one"):  # a queue may give its image to either
                image = self.images.read(self.side.draw(job))
                _require(first, image)
                if not is_near(first, image):
                    raise CheckFailure(f"the {which} gets another image")
            if not was_cancelled:
                raise CheckSkip("it answers before anything can be cancelled")
            return "the next one gets its own image"

        request = f"{self.side.curl(body)} --max-time {after_s:.3f}; {self.side.request_text(job)}"
        return run_check("a cancelled request does not spoil the next one", request, observe)

    def _check_loras(self, job: DrawJob, first: ReadImage, reference: ReadImage) -> Iterator[ServerCheck]:
        """Yield whether each field that names a LoRA changes the image of its own request alone, at its strength."""
        body = self.side.body(job)
        for field in [name for name in body if "lora" in name.lower() or "adapter" in name.lower()]:
            plain = {name: value for name, value in body.items() if name != field}

            def observe(plain: dict[str, Any] = plain) -> str:
                return _see_lora(first, *(self._draw(each) for each in (plain, body, plain)))

            request = "; ".join(self.side.curl(each) for each in (body, plain, body, plain))
            yield run_check(f"{field} changes the image of its own request alone", request, observe)
            if not reference.is_there or are_equal(reference, first):
                continue
            for factor, words in ((2.0, "half"), (0.5, "twice")):
                changed = body | {field: _scaled(body[field], factor)}
                if changed[field] is not None and self._draws(reference, changed):
                    reason = f"it works at {words} the strength: at {factor:g} times it, the image is A's"
                    name = f"{field} works at the strength that is asked for"
                    yield ServerCheck(name, Status.FAILED, reason, self.side.curl(changed))

    def _draws(self, reference: ReadImage, body: dict[str, Any]) -> bool:
        try:
            return are_equal(reference, self._draw(body))
        except DrawingFailure:
            return False


def _see_different(number: int, images: Sequence[ReadImage]) -> str:
    if len(images) != number:
        raise CheckFailure(f"asked for {number} images, got {len(images)}")
    for k, image in enumerate(images):
        if not image.is_there:
            raise CheckFailure(image.reason)
        if any(are_equal(other, image) for other in images[:k]):
            raise CheckFailure(f"image {k + 1} is the same as one before it")
    return f"{number} different images"


def _see_first(first: ReadImage, images: Sequence[ReadImage]) -> str:
    if not is_near(first, images[0]):
        is_later = any(are_equal(first, image) for image in images[1:])
        raise CheckFailure(
            "the seed's image is a later one" if is_later else "it is another image than alone"
        )
    return "the first of them is that of the seed"


def _claims_of(job: DrawJob, says: dict[str, Any], image: ReadImage) -> list[tuple[str, object, object]]:
    """Return what an answer says of the first image: the name, the value that is said, and the real one."""
    assert image.size is not None
    width, height = image.size
    steps = job.settings.num_inference_steps
    real = {"width": width, "height": height, "size": f"{width}x{height}", "seed": job.seed, "steps": steps}
    if not _SIZE.fullmatch(str(says.get("size"))):  # e.g. "auto"
        del real["size"]
    real["revised_prompt"] = job.prompt
    return [(name, says[name], value) for name, value in real.items() if name in says and value is not None]


def _see_claims(claims: Sequence[tuple[str, object, object]]) -> str:
    for name, says, real in claims:
        if str(says) != str(real):
            what = "asked for was" if name in ("seed", "steps", "revised_prompt") else "the image has"
            raise CheckFailure(f"it says {name} {str(says)[:60]}, {what} {str(real)[:60]}")
    return f"{', '.join(name for name, _, _ in claims)}: as they are"


def _see_lora(first: ReadImage, before: ReadImage, beside: ReadImage, after: ReadImage) -> str:
    _require(first, before, beside, after)
    if are_equal(first, before):
        raise CheckFailure(
            "the image is the same without it: it is ignored, or stays on after the request before"
        )
    if not is_near(first, beside) or (are_equal(before, beside) and not are_equal(first, beside)):
        raise CheckFailure("after a request without it, its image is another one")
    if not are_equal(before, after):
        raise CheckFailure("after a request with it, the image without it is another one: it stays on")
    return "with it and without it are different images, in any order"


def _scaled(value: Any, factor: float) -> Any:
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return None
    scales = [each.get("scale", 1.0) for each in value]
    if any(isinstance(scale, bool) or not isinstance(scale, int | float) for scale in scales):
        return None
    return [each | {"scale": scale * factor} for each, scale in zip(value, scales, strict=True)]
