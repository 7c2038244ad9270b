"""The images that a workload starts from: read, fitted to one size, and identified by their pixels. Without files a
task takes images that ship with vivace (tinyworld/source_pictures)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from vivace.errors import WorkloadError
from vivace.foundation.spec.sizes import Size
from vivace.foundation.spec.workload import Source, Task, Workload
from vivace.foundation.untrusted.files import user_path
from vivace.foundation.untrusted.image_files import open_image, open_mask
from vivace.models.prompts import PROMPT_SETS
from vivace.models.tasks import names_of, task_of

if TYPE_CHECKING:
    from PIL.Image import Image

FOLDER = Path(__file__).parent / "source_images"
NUM_DEFAULT = len(PROMPT_SETS["tinyworld"])
_TOLERATED_CUT = 0.01
"""Share of an image's side that may be cut off silently: sizes are multiples of 8 or 16 pixels."""


@dataclass(frozen=True)
class SourceImages:
    """The images of a workload's sources.

    Attributes:
        by_sha: each image, RGB or, for masks, L, by the sha256 of its pixels.
    """

    sources: tuple[Source, ...]
    by_sha: Mapping[str, Any]
    height: int
    width: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Files:
    """The files that a user passed, by their roles."""

    images: Sequence[str] = ()
    masks: Sequence[str] = ()
    controls: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.images or self.masks or self.controls)


@dataclass
class _ReadImages:
    """Images before they are fitted to a size."""

    kind: Literal["image", "mask", "control"]
    flag: str
    files: Sequence[str]
    images: list[Image] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_files(task: Task | None, files: Files, strength: float | None) -> Task:
    """Check that a set of files go together, and return their task."""
    meant: Task = (
        "inpaint" if files.masks else "control" if files.controls else "image" if files.images else "text"
    )
    if files.masks and not files.images and (task in (None, "inpaint")):
        raise WorkloadError("--mask: a mask needs the image that it belongs to; give --image FILE too")
    if task is None:
        task = meant
    takes = {
        "inpaint": ("images", "masks"),
        "image": ("images",),
        "edit": ("images",),
        "control": ("controls",),
    }
    for name, flag, advice in (
        ("images", "--image", "image, inpaint or edit"),
        ("masks", "--mask", "inpaint"),
        ("controls", "--control", "control"),
    ):
        if getattr(files, name) and name not in takes.get(task, ()):
            raise WorkloadError(
                f"{flag}: the task '{task}' takes none; leave it out, or give --task {advice}"
            )
    if task == "inpaint" and files.images and not files.masks:
        raise WorkloadError("--task inpaint: the mask is missing; give --mask FILE, white where to repaint")
    if strength is not None and task not in ("image", "inpaint"):
        raise WorkloadError(
            f"--strength {strength:g}: only image-to-image and inpainting have one; give --image FILE, or leave it out"
        )
    return task


def source_images_of(
    task: Task, files: Files, num_prompts: int, size: tuple[int | None, int | None], limits: PixelLimits
) -> SourceImages:
    """Read the images of a task, or take the default ones, and fit all to one size.

    The size is what was asked for; else that of the first file, made smaller if it has more pixels than the model's
    own size and rounded to multiples; else the model's own. An image of other proportions is cut at the longer side.

    Args:
        size: height and width as asked, in pixels; None where they were not.
        limits: what the model can take.
    """
    images = list(_read_files(files)) if files else list(_default(task))
    for each in images:
        if files and len(each.images) not in (1, num_prompts):
            raise WorkloadError(
                f"{each.flag}: {len(each.images)} files for {num_prompts} prompts; give one, or one for each prompt"
            )
    _check_masks(images)
    first = images[0].images[0]
    height, width = limits.size_of(first if files else None, *size)
    number = max(len(each.images) for each in images) if files else num_prompts
    sources: list[Source] = []
    by_sha: dict[str, Any] = {}
    notes: dict[str, None] = dict.fromkeys(note for each in images for note in each.notes)
    for index in range(number):
        names: dict[str, str] = {}
        for each in images:
            image = each.images[index % len(each.images)]
            fitted = fit(image, height, width)
            if files and (note := _note(each, index, image, height, width)):
                notes[note] = None
            sha = sha_of(fitted)
            by_sha[sha] = fitted
            names[each.kind] = sha
        sources.append(Source(**names))
    if len(set(sources)) == 1:
        sources = sources[:1]
    return SourceImages(tuple(sources), by_sha, height, width, tuple(notes))


@dataclass(frozen=True)
class PixelLimits:
    """Limits of a model's sizes."""

    multiple: int
    largest: int
    height: int
    width: int

    def size_of(self, image: Image | Size | None, height: int | None, width: int | None) -> tuple[int, int]:
        """Return height and width of a workload; requested ones are kept, and checked elsewhere."""
        if image is None or (height is not None and width is not None):
            return height or self.height, width or self.width
        ratio = image.width / image.height
        if height is not None:
            return height, self._rounded(height * ratio)
        if width is not None:
            return self._rounded(width / ratio), width
        scale = min(1.0, math.sqrt(self.height * self.width / (image.height * image.width)))
        return self._rounded(image.height * scale), self._rounded(image.width * scale)

    def _rounded(self, side: float) -> int:
        most = self.largest // self.multiple * self.multiple
        return min(max(round(side / self.multiple), 1) * self.multiple, most)


def fit(image: Image, height: int, width: int) -> Image:
    """Return an image of a size: scaled to cover it, and cut in the middle. A mask stays black and white."""
    from PIL import Image as Images
    from PIL import ImageOps

    if image.size == (width, height):
        return image
    is_mask = image.mode == "L"
    method = Images.Resampling.NEAREST if is_mask else Images.Resampling.LANCZOS
    return ImageOps.fit(image, (width, height), method)


def sha_of(image: Image) -> str:
    """Return the sha256 of an image's pixels: mode, size and rows, so that it does not depend on a file format."""
    head = f"{image.mode} {image.width}x{image.height}\n".encode()
    return hashlib.sha256(head + image.tobytes()).hexdigest()


def image_arguments(
    pipeline: str, workload: Workload, indices: Sequence[int], by_sha: Mapping[str, Image]
) -> dict[str, Any]:
    """Return the images of some of a workload's images as arguments of the pipeline's call."""
    if workload.task == "text":
        return {}
    names = names_of(pipeline, workload.task)
    sources = [workload.source_of(index) for index in indices]
    arguments: dict[str, Any] = {}
    for kind, name in (("image", names.image), ("mask", names.mask), ("control", names.control)):
        if name:
            images = [by_sha[getattr(source, kind)] for source in sources]
            arguments[name] = images[0] if len(images) == 1 else images
    return arguments


def example_images(kind: str, size: Mapping[str, Any], task: Task | None = None) -> dict[str, Any]:
    """Return the first of the images that ship with vivace as arguments of a call, for calls that calibrate; None: for
    the task that a pipeline's class says."""
    task = task or task_of(kind)
    if task == "text":
        return {}
    names = names_of(kind, task)
    return {
        name: fit(each.images[0], size["height"], size["width"])
        for each in _default(task)
        if (name := getattr(names, each.kind))
    }


def opened(files: Files) -> tuple[list[Image], list[Image]]:
    """Return the images of files, and their masks, as they are."""
    images = list(_read_files(files))
    _check_masks(images)
    by_kind = {each.kind: each.images for each in images}
    return by_kind.get("image", []), by_kind.get("mask", [])


def _read_files(files: Files) -> Iterator[_ReadImages]:
    for read in (
        _ReadImages("image", "--image", files.images),
        _ReadImages("mask", "--mask", files.masks),
        _ReadImages("control", "--control", files.controls),
    ):
        for file in read.files:
            if read.kind != "mask":
                noted: list[str] = []
                read.images.append(open_image(user_path(file), noted.append))
                read.notes += [f"{file}: {note}" for note in noted]
                continue
            mask = open_mask(user_path(file))
            if mask.getextrema() == (0, 0):
                raise WorkloadError(
                    f"--mask {file}: it is black, so nothing would be repainted; paint white what is to change"
                )
            read.images.append(mask)
        if read.files:
            yield read


def _default(task: Task) -> Iterator[_ReadImages]:
    from PIL import Image as Images
    from PIL import ImageFilter

    images, masks = [], []
    for index in range(NUM_DEFAULT):
        with (
            Images.open(FOLDER / f"{index:02}.png") as image,
            Images.open(FOLDER / f"{index:02}-mask.png") as mask,
        ):
            images.append(image.convert("RGB"))
            masks.append(mask.convert("L"))
    if task == "control":
        yield _ReadImages("control", "", (), [each.filter(ImageFilter.FIND_EDGES) for each in images])
        return
    yield _ReadImages("image", "", (), images)
    if task == "inpaint":
        yield _ReadImages("mask", "", (), masks)


def _check_masks(read: Sequence[_ReadImages]) -> None:
    by_kind = {each.kind: each for each in read}
    if "mask" not in by_kind:
        return
    images, masks = by_kind["image"], by_kind["mask"]
    for index in range(max(len(images.images), len(masks.images))):
        image, mask = (each.images[index % len(each.images)] for each in (images, masks))
        if image.size != mask.size:
            file = masks.files[index % len(masks.files)]
            raise WorkloadError(
                f"--mask {file}: it has {mask.width}x{mask.height} pixels, and its image "
                f"{image.width}x{image.height}; give a mask of the image's size"
            )


def _note(each: _ReadImages, index: int, image: Image, height: int, width: int) -> str:
    """Describe how fitting changes a user's image; empty if hardly anything is cut off."""
    if each.kind == "mask" or image.size == (width, height):
        return ""
    scale = max(width / image.width, height / image.height)
    cut_x, cut_y = (1 - side / (scale * own) for side, own in ((width, image.width), (height, image.height)))
    file = each.files[index % len(each.files)]
    text = f"{file}: {image.width}x{image.height} pixels fitted to {width}x{height}"
    if max(cut_x, cut_y) > _TOLERATED_CUT:
        where = "left and right" if cut_x > cut_y else "top and bottom"
        text += f", cutting {max(cut_x, cut_y):.0%} off at {where}"
    return text
