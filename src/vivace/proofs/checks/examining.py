"""Name faults and check requests of B's images, compared with A's."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from vivace.proofs.checks.image_findings import (
    ImageFinding,
    RequestOf,
    broken,
    duplicates,
    find_switched,
    of_other_sizes,
    switched,
)
from vivace.proofs.checks.pair_figures import (
    ROUNDING_DB,
    PairFigures,
    ReadImage,
    are_equal,
    is_near,
    psnr_of,
    read_image,
)
from vivace.proofs.checks.server_checks import (
    ReadDrawn,
    ServerCheck,
    Status,
    answers_check,
    field_checks,
    missing,
    probe_check,
    repeat_check,
)
from vivace.proofs.checks.state_checks import (
    cancelled_check,
    lora_checks,
    negative_prompt_check,
    together_check,
)
from vivace.proofs.sides.drawing import DrawingFailed, DrawJob, DrawnImage, suffix_of
from vivace.proofs.sides.endpoint import Endpoint, ServedImages
from vivace.proofs.sides.prepare_sides import ImageSource, Prepared
from vivace.proofs.sides.probes import hypotheses, main_jobs, probes, repeat_jobs
from vivace.proofs.sides.proof_store import Letter, ProofStore
from vivace.proofs.sides.sides import EndpointSide

_NEARER_DB = 20.0
"""By how much B's image is nearer to what A draws with other values, if that is what B drew."""
_LEAST_PAIRS = 10
_SURELY = 3.3
"""Standard deviations of a rank correlation by chance, beyond which growth is no chance (1 in 2,000)."""
_FURTHER_DB = 6.0
_EQUAL_DB = 100.0  # of images without any difference
_NUMBERS = ((2, "two"), (4, "four"))
_SIZE = re.compile(r"\d+x\d+")
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "jpg": ".jpg", "webp": ".webp"}


class StoredImages:
    """The images of a store, each read once."""

    def __init__(self, store: ProofStore) -> None:
        self._store = store
        self._read: dict[tuple[Letter, DrawJob], ReadImage] = {}

    def image(self, letter: Letter, job: DrawJob) -> ReadImage:
        key = (letter, job)
        if key not in self._read:
            self._read[key] = read_image(self._store.image(letter, job))
        return self._read[key]

    def read(self, image: DrawnImage) -> ReadImage:
        """Return an image that belongs to no job."""
        return read_image(self._store.keep_file(image))


def endpoint_of(prepared: Prepared, source: ImageSource) -> Endpoint | None:
    return prepared.endpoint(source) if isinstance(source.side, EndpointSide) else None


def request_for(endpoint: Endpoint | None) -> RequestOf:
    """Return what returns the request for B's image of a pair."""

    def request_of(pair: PairFigures) -> str:
        if endpoint is None:
            return ""
        return endpoint.curl(endpoint.body(pair.prompt, pair.seed, pair.settings))

    return request_of


def findings_of(
    prepared: Prepared, pairs: Sequence[PairFigures], images: StoredImages, request_of: RequestOf
) -> list[ImageFinding]:
    listed = [*broken(pairs, request_of), *of_other_sizes(pairs, request_of), *duplicates(pairs, request_of)]
    listed += switched(pairs, request_of) or _instead(prepared, images, request_of, pairs[0])
    if not listed:
        listed += find_switched(pairs, request_of)
    return [*listed, *drifting(pairs, request_of)]


def _instead(
    prepared: Prepared, images: StoredImages, request_of: RequestOf, pair: PairFigures
) -> list[ImageFinding]:
    """Return what B drew instead of the first image, if A draws the same with other values, up to rounding."""
    if not (pair.a.is_there and pair.b.is_there) or are_equal(pair.a, pair.b):
        return []
    least_db = max(ROUNDING_DB, psnr_of(pair.a, pair.b) + _NEARER_DB)
    words = [
        hypothesis.words
        for hypothesis in hypotheses(prepared)
        if (image := images.image("a", hypothesis.job)).is_there and psnr_of(image, pair.b) >= least_db
    ]
    if not words:
        return []
    summary = f"instead: B draws A's image of {' or of '.join(words)}"
    return [ImageFinding(summary, pair.label, request_of(pair), is_cause=True)]


def checks_of(prepared: Prepared, images: StoredImages, endpoint: Endpoint | None) -> list[ServerCheck]:
    if not prepared.b.draws:
        return []
    job = main_jobs(prepared)[0]
    first = images.image("b", job)
    checks = (
        [] if endpoint is None else answers_check([images.image("b", each) for each in main_jobs(prepared)])
    )
    if not first.is_there:
        name = "the first image is drawn"
        return [*checks, ServerCheck(name, Status.UNCLEAR, first.reason, first.kept.request)]

    def request_of(drawn: DrawJob) -> str:
        if endpoint is None:
            return ""
        return endpoint.curl(endpoint.body(drawn.prompt, drawn.seed, drawn.settings))

    repeated = repeat_check(_repeats(prepared, images, request_of))
    checks.append(repeated)
    is_same_model = is_near(images.image("a", job), first)
    for probe in probes(prepared):
        both = images.image("a", probe.base), images.image("a", probe.job)
        checks.append(
            probe_check(
                probe,
                images.image("b", probe.base),
                images.image("b", probe.job),
                both if probe.is_of_reference and prepared.a.draws else None,
                request_of(probe.job),
                is_same_model=is_same_model,
                repeats=repeated.status is not Status.FAILED,
                draw_again=partial(_drawn_again, prepared, probe.job, images),
            )
        )
    if endpoint is not None:
        drawn = [(each, images.image("b", each)) for each in main_jobs(prepared)]
        checks += [*several_checks(endpoint, job, first, images.read), *field_checks(endpoint, job)]
        checks += lora_checks(endpoint, job, first, images.image("a", job), images.read)
        negative = negative_prompt_check(endpoint, job, first, images.read)
        checks += [negative] if negative is not None else []
        checks += [
            together_check(endpoint, drawn, images.read),
            cancelled_check(endpoint, drawn, images.read),
        ]
    return checks


def _drawn_again(prepared: Prepared, job: DrawJob, images: StoredImages) -> ReadImage | None:
    try:
        with prepared.open(prepared.b) as drawer:
            return images.read(drawer.draw(job.prompt, job.seed, job.settings))
    except DrawingFailed:
        return None


def _repeats(
    prepared: Prepared, images: StoredImages, request_of: Callable[[DrawJob], str]
) -> list[tuple[str, ReadImage, ReadImage, str]]:
    repeats = []
    for again in repeat_jobs(prepared):
        first, second = images.image("b", replace(again, repeat=0)), images.image("b", again)
        repeats.append((f"“{again.prompt[:60]}” seed {again.seed}", first, second, request_of(again)))
    return repeats


def drifting(pairs: Sequence[PairFigures], request_of: RequestOf) -> list[ImageFinding]:
    """Return whether the distances grow in the order of drawing.

    The order is by prompt, again for each seed, so what prompts have to do with it shows no growth.
    """
    compared = [pair for pair in pairs if pair.against]
    if len(compared) < _LEAST_PAIRS:
        return []
    values = np.minimum([pair.against["psnr_db"] for pair in compared], _EQUAL_DB)
    third = len(compared) // 3
    first, last = (float(np.median(part)) for part in (values[:third], values[-third:]))
    if (
        last > min(first - _FURTHER_DB, ROUNDING_DB)
        or _correlation(-values) * math.sqrt(len(values) - 1) < _SURELY
    ):
        return []
    begin = "equal to" if first == _EQUAL_DB else f"{first:.0f} dB from"
    summary = (
        f"drift: B's images get further from A's the later they are drawn, from {begin} them to {last:.0f} dB"
    )
    return [ImageFinding(summary, compared[-1].label, request_of(compared[-1]))]


def _correlation(values: np.ndarray) -> float:
    """Return the rank correlation of values with their order (Spearman); equal values share their rank."""
    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values))
    ranks[order] = np.arange(len(values))
    for value in np.unique(values):
        ranks[values == value] = ranks[values == value].mean()
    if ranks.std() == 0:
        return 0.0
    return float(np.corrcoef(ranks, np.arange(len(values)))[0, 1])


def several_checks(
    endpoint: Endpoint, job: DrawJob, first: ReadImage, read: ReadDrawn
) -> Iterator[ServerCheck]:
    """Yield the checks of requests for more than one image, which are sent now.

    Args:
        job: of an image that the endpoint has drawn.
        first: that image.
    """
    for number, in_words in _NUMBERS:
        request = endpoint.curl(endpoint.body(job.prompt, job.seed, job.settings, n=number))
        name = f"n={number} gives {in_words} images"
        try:
            served = endpoint.images(endpoint.body(job.prompt, job.seed, job.settings, n=number))
            images = [read(DrawnImage(content, suffix_of(content))) for content in served.contents]
        except DrawingFailed as error:
            is_refused = str(error).startswith("HTTP 4")  # which is honest
            yield ServerCheck(name, Status.UNCLEAR if is_refused else Status.FAILED, str(error), request)
            continue
        yield ServerCheck(name, *_of_images(number, images), request)
        if not images or missing(*images) is not None:
            continue
        if len(images) == number:
            yield _of_the_first(number, first, images, request)
        if number == _NUMBERS[0][0] and (says := _of_answer(job, served, images)) is not None:
            yield ServerCheck("the answer says what is in it", *says, request)


def _of_images(number: int, images: Sequence[ReadImage]) -> tuple[Status, str]:
    if len(images) != number:
        return Status.FAILED, f"asked for {number} images, got {len(images)}"
    if (reason := missing(*images)) is not None:
        return Status.FAILED, reason
    for k, image in enumerate(images):
        if any(are_equal(other, image) for other in images[:k]):
            return Status.FAILED, f"image {k + 1} is the same as one before it"
    return Status.PASSED, f"{number} different images"


def _of_the_first(number: int, first: ReadImage, images: Sequence[ReadImage], request: str) -> ServerCheck:
    name = f"n={number} begins with the image of n=1"
    if is_near(first, images[0]):
        return ServerCheck(name, Status.PASSED, "the first of them is that of the seed", request)
    is_later = any(are_equal(first, image) for image in images[1:])
    reason = "the seed's image is a later one" if is_later else "it is another image than alone"
    return ServerCheck(name, Status.FAILED, reason, request)


def _of_answer(job: DrawJob, served: ServedImages, images: Sequence[ReadImage]) -> tuple[Status, str] | None:
    """Return whether an answer's own words on its first image are right; None if it has none."""
    assert images[0].size is not None
    width, height = images[0].size
    format_ = _SUFFIXES.get(str(served.says.get("output_format")))
    of_file = _of_file(images[0])
    real = {
        "width": width,
        "height": height,
        "size": f"{width}x{height}",
        "seed": job.seed,
        "steps": job.settings.num_inference_steps,
        "revised_prompt": job.prompt,
    }
    listed = {name: served.says[name] for name in real if name in served.says}
    if not _SIZE.fullmatch(str(listed.get("size", "0x0"))):
        del listed["size"]  # e.g. "auto"
    for where, values in (("it", listed), ("the file", of_file)):
        for name, value in values.items():
            if real[name] is not None and str(value) != str(real[name]):
                what = "the image has" if name in ("width", "height", "size") else "asked for was"
                return Status.FAILED, f"{where} says {name} {str(value)[:60]}, {what} {str(real[name])[:60]}"
    if format_ is not None and format_ != suffix_of(served.contents[0]):
        return (
            Status.FAILED,
            f"it says {served.says['output_format']}, the image is {suffix_of(served.contents[0])[1:]}",
        )
    names = [*listed, *(f"{name} in the file" for name in of_file), *(["format"] if format_ else [])]
    return (Status.PASSED, f"{', '.join(names)}: as they are") if names else None


def _of_file(image: ReadImage) -> dict[str, str]:
    """Return size, seed and steps as the text of a PNG file has them ("Steps: 20, Seed: 1, Size: 512x512")."""
    from PIL import Image

    if image.kept.path is None or image.kept.path.suffix != ".png":
        return {}
    with Image.open(image.kept.path, formats=("PNG",)) as file:
        text = str(file.info.get("parameters", ""))[:10_000]
    return {name.lower(): value for name, value in re.findall(r"\b(Steps|Seed|Size): (\d+x\d+|\d+)", text)}
