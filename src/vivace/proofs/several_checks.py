"""Several images of one request: how many they are, whether they differ, and what the answer says of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from vivace.proofs.drawing import DrawingFailed, DrawJob, DrawnImage, suffix_of
from vivace.proofs.endpoint import Endpoint, ServedImages
from vivace.proofs.pair_figures import ReadImage, are_equal, is_near
from vivace.proofs.server_checks import ReadDrawn, ServerCheck, Status, missing

_NUMBERS = ((2, "two"), (4, "four"))
_SIZE = re.compile(r"\d+x\d+")
_SUFFIXES = {"png": ".png", "jpeg": ".jpg", "jpg": ".jpg", "webp": ".webp"}


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
