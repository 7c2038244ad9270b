"""Whether an images endpoint follows requests that only a server gets: several images, unknown fields, many at once.

The requests are sent now, after the images of the proof are drawn, so each is compared with the image that the same
request got alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from vivace.proofs.checks.pair_figures import ReadImage, StoredImages, are_equal, is_near
from vivace.proofs.checks.request_checks import (
    CheckFailure,
    CheckSkip,
    ServerCheck,
    Status,
    check_requests,
    is_busy,
    is_refusal,
    require,
    run_check,
)
from vivace.proofs.sides.endpoint_side import NO_IMAGES, EndpointSide, ServedImages
from vivace.proofs.sides.jobs import main_jobs
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.side import DrawingFailure, DrawJob, DrawnImage, suffix_of

_AT_ONCE = 8
"""More than most servers draw in a batch."""
_CANCELLED_AFTER = 0.3
"""Of the time of an image."""
_LEAST_S = 0.002
_NUMBERS = ((2, "two"), (4, "four"))
_IMPOSSIBLE: tuple[tuple[str, Any], ...] = (("size", "abc"), ("n", 0), ("num_inference_steps", -1))
_SIZE = re.compile(r"\d+x\d+")
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "jpg": ".jpg", "webp": ".webp"}


def check_all(plan: ProofPlan, images: StoredImages) -> Iterator[ServerCheck]:
    """Yield every check of B; none if it draws nothing."""
    drawn = [(job, images.image("b", job)) for job in main_jobs(plan)]
    first = drawn[0][1]
    if isinstance(plan.b, EndpointSide):
        yield from _check_answers([image for _, image in drawn])
    if plan.b.draws and first.is_there:
        yield from check_requests(plan, images)
        if isinstance(plan.b, EndpointSide):
            yield from _Served(plan.b, images).check(drawn, images.image("a", drawn[0][0]))
    elif plan.b.draws:
        yield ServerCheck("the first image is drawn", Status.UNCLEAR, first.reason, first.kept.request)


def _check_answers(images: Sequence[ReadImage]) -> Iterator[ServerCheck]:
    """Yield that answers of status 200 have no image, or several, if some do: an error that looks like none."""
    wrong = [image for image in images if image.reason.startswith(NO_IMAGES)]
    if wrong:
        reason = f"{len(wrong)} of {len(images)} have not, e.g. {wrong[0].reason}"
        name = "an answer of status 200 has the image"
        yield ServerCheck(name, Status.FAILED, reason, wrong[0].kept.request)


@dataclass(frozen=True)
class _Served:
    """An endpoint with the images that it draws now."""

    side: EndpointSide
    images: StoredImages

    def check(
        self, drawn: Sequence[tuple[DrawJob, ReadImage]], reference: ReadImage
    ) -> Iterator[ServerCheck]:
        """Yield the checks.

        Args:
            drawn: the images of the proof, in order.
            reference: A's first image.
        """
        job, first = drawn[0]
        yield from self.check_numbers(job, first)
        yield from self.check_fields(job)
        yield from self.check_loras(job, first, reference)
        yield from self.check_negative_prompt(job, first)
        yield self.check_at_once(drawn)
        yield self.check_cancelled(drawn)

    def draw(self, body: dict[str, Any]) -> ReadImage:
        content = self.side.images(body).contents[0]
        return self.images.read(DrawnImage(content, suffix_of(content)))

    def check_numbers(self, job: DrawJob, first: ReadImage) -> Iterator[ServerCheck]:
        """Yield the checks of requests for more than one image."""
        for number, in_words in _NUMBERS:
            body = self.side.body(job, n=number)
            request, name = self.side.curl(body), f"n={number} gives {in_words} images"
            try:
                served = self.side.images(body)
                drawn = [self.images.read(DrawnImage(each, suffix_of(each))) for each in served.contents]
            except DrawingFailure as error:
                is_honest = is_refusal(str(error)) or is_busy(str(error))
                yield ServerCheck(name, Status.UNCLEAR if is_honest else Status.FAILED, str(error), request)
                continue
            yield run_check(name, request, partial(_see_different, number, drawn))
            if all(image.is_there for image in drawn):
                if len(drawn) == number:
                    see = partial(_see_first, first, drawn)
                    yield run_check(f"n={number} begins with the image of n=1", request, see)
                if number == _NUMBERS[0][0] and (claims := _claims_of(job, served, drawn[0])):
                    yield run_check("the answer says what is in it", request, partial(_see_claims, claims))

    def check_fields(self, job: DrawJob) -> Iterator[ServerCheck]:
        """Yield whether unknown fields and impossible values are refused."""
        unknown = ("an unknown field is refused", "an unknown field is ignored, so a typo is too")
        yield self._check_refusal(self.side.body(job, no_such_field_by_vivace=1), *unknown)
        for field, value in _IMPOSSIBLE:
            words = (f"{field}={value} is refused", f"{field}={value} is taken for something else")
            yield self._check_refusal(self.side.body(job, **{field: value}), *words)

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

    def check_negative_prompt(self, job: DrawJob, first: ReadImage) -> Iterator[ServerCheck]:
        """Yield whether a negative prompt changes the image, or is refused; nothing for models without guidance."""
        guidance = job.settings.guidance_scale
        body = self.side.body(job, negative_prompt=job.prompt)

        def observe() -> str:
            answer = self.side.ask(body)
            if answer.is_refusal:
                return f"HTTP {answer.status}"
            image = self.draw(body)
            require(first, image)
            if are_equal(first, image):
                raise (CheckFailure if guidance else CheckSkip)("it is accepted and changes nothing")
            return "it gives another image"

        if guidance is None or guidance > 1:
            name = "a negative prompt changes the image, or is refused"
            yield run_check(name, self.side.curl(body), observe)

    def check_at_once(self, drawn: Sequence[tuple[DrawJob, ReadImage]]) -> ServerCheck:
        """Check that several requests at once give each its own image.

        Args:
            drawn: images that were drawn alone, in order.
        """
        chosen = [(job, image) for job, image in drawn if image.is_there][:_AT_ONCE]

        def draw(job: DrawJob) -> DrawnImage | None:
            try:
                return self.side.draw(job)
            except DrawingFailure as error:
                if is_busy(str(error)):
                    return None
                raise

        def observe() -> str:
            with ThreadPoolExecutor(len(chosen)) as pool:
                together = list(pool.map(draw, [job for job, _ in chosen]))
            for (job, alone), answer in zip(chosen, together, strict=True):
                if answer is not None:
                    image = self.images.read(answer)
                    require(alone, image)
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

    def check_cancelled(self, drawn: Sequence[tuple[DrawJob, ReadImage]]) -> ServerCheck:
        """Check that a request whose client goes away does not spoil the next one."""
        (job, first), (other, last) = drawn[0], drawn[-1]
        after_s = max(_LEAST_S, _CANCELLED_AFTER * (first.kept.seconds or last.kept.seconds or 1.0))
        body = self.side.body(other)

        def observe() -> str:
            was_cancelled = self.side.hang_up(body, after_s) or self.side.hang_up(body, _LEAST_S)
            for which in ("next one", "next but one"):  # a queue may give its image to either
                image = self.images.read(self.side.draw(job))
                require(first, image)
                if not is_near(first, image):
                    raise CheckFailure(f"the {which} gets another image")
            if not was_cancelled:
                raise CheckSkip("it answers before anything can be cancelled")
            return "the next one gets its own image"

        request = f"{self.side.curl(body)} --max-time {after_s:.3f}; {self.side.request_text(job)}"
        return run_check("a cancelled request does not spoil the next one", request, observe)

    def check_loras(self, job: DrawJob, first: ReadImage, reference: ReadImage) -> Iterator[ServerCheck]:
        """Yield whether each field that names a LoRA changes the image of its own request alone, at its own strength.

        Args:
            first: B's image with the field.
            reference: A's.
        """
        body = self.side.body(job)
        for field in [name for name in body if "lora" in name.lower() or "adapter" in name.lower()]:
            plain = {name: value for name, value in body.items() if name != field}

            def observe(plain: dict[str, Any] = plain) -> str:
                return _see_lora(first, *(self.draw(each) for each in (plain, body, plain)))

            request = "; ".join(self.side.curl(each) for each in (body, plain, body, plain))
            yield run_check(f"{field} changes the image of its own request alone", request, observe)
            if reference.is_there and not are_equal(reference, first):
                yield from self._check_strength(body, field, reference)

    def _check_strength(
        self, body: dict[str, Any], field: str, reference: ReadImage
    ) -> Iterator[ServerCheck]:
        """Yield a failed check if another strength gives A's image."""
        for factor, words in ((2.0, "half"), (0.5, "twice")):
            changed = body | {field: _scaled(body[field], factor)}
            if changed[field] is not None and self._draws(reference, changed):
                reason = f"it works at {words} the strength: at {factor:g} times it, the image is A's"
                name = f"{field} works at the strength that is asked for"
                yield ServerCheck(name, Status.FAILED, reason, self.side.curl(changed))

    def _draws(self, reference: ReadImage, body: dict[str, Any]) -> bool:
        try:
            return are_equal(reference, self.draw(body))
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


_Claim = tuple[str, str, object, object]
"""Who says it, what, the value that is said, and the real one."""


def _claims_of(job: DrawJob, served: ServedImages, image: ReadImage) -> list[_Claim]:
    """Return what an answer and the file say of the first image."""
    assert image.size is not None
    width, height = image.size
    steps = job.settings.num_inference_steps
    real = {"width": width, "height": height, "size": f"{width}x{height}", "seed": job.seed, "steps": steps}
    real["revised_prompt"] = job.prompt
    claims: list[_Claim] = []
    for where, says in (("it", served.says), ("the file", _says_of_file(image))):
        claims += [(where, name, says[name], real[name]) for name in real if name in says]
    suffix = _SUFFIXES.get(str(served.says.get("output_format")))
    if suffix is not None:
        claims.append(("it", "format", suffix[1:], suffix_of(served.contents[0])[1:]))
    has_size = _SIZE.fullmatch(str(served.says.get("size")))  # not e.g. "auto"
    return [claim for claim in claims if claim[3] is not None and (claim[1] != "size" or has_size)]


def _see_claims(claims: Sequence[_Claim]) -> str:
    for where, name, says, real in claims:
        if str(says) != str(real):
            what = "asked for was" if name in ("seed", "steps", "revised_prompt") else "the image has"
            raise CheckFailure(f"{where} says {name} {str(says)[:60]}, {what} {str(real)[:60]}")
    return f"{', '.join(name for _, name, _, _ in claims)}: as they are"


def _says_of_file(image: ReadImage) -> dict[str, str]:
    """Return size, seed and steps as the text of a PNG file has them ("Steps: 20, Seed: 1, Size: 512x512")."""
    from PIL import Image

    if image.kept.path is None or image.kept.path.suffix != ".png":
        return {}
    with Image.open(image.kept.path, formats=("PNG",)) as file:
        text = str(file.info.get("parameters", ""))[:10_000]
    return {name.lower(): value for name, value in re.findall(r"\b(Steps|Seed|Size): (\d+x\d+|\d+)", text)}


def _see_lora(first: ReadImage, before: ReadImage, beside: ReadImage, after: ReadImage) -> str:
    require(first, before, beside, after)
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
    """Return a list of LoRAs with other scales; None for an unknown format."""
    if not isinstance(value, list) or not all(isinstance(each, dict) and "name" in each for each in value):
        return None
    scales = [each.get("scale", 1.0) for each in value]
    if any(isinstance(scale, bool) or not isinstance(scale, int | float) for scale in scales):
        return None
    return [each | {"scale": scale * factor} for each, scale in zip(value, scales, strict=True)]
