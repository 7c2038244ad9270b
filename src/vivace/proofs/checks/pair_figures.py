"""The figures of every pair of images: each alone, against each other, and by models that read the prompt."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vivace.answers.formatting import count
from vivace.errors import VivaceError
from vivace.foundation.spec.limits import DEFAULT_LIMITS
from vivace.foundation.untrusted.image_files import open_image
from vivace.measure.image_metrics import (
    Pixels,
    faults,
    figures_against,
    luminance,
    match,
    num_rectangles,
    pixels,
    sharpness,
    thumbnail,
)
from vivace.measure.scorer import MIN_SIDE, Lpips, default_weights
from vivace.proofs.sides.plan import ProofPlan
from vivace.proofs.sides.proof_store import KeptImage, Letter, ProofStore
from vivace.proofs.sides.side import DrawJob, DrawnImage, ImageSettings

LETTERS: tuple[Letter, ...] = ("a", "b")
AGAINST = ("psnr_db", "ssim", "match", "lpips")
NEAR = DEFAULT_LIMITS.match or 0.9
"""Match from which an image is near the reference's."""
ROUNDING_DB = 48.0
"""PSNR from which only the last bit of 8 differs: an error of one level in every value has 48.1 dB."""
_BLOCK = 8  # pixels
_CALM = 0.1  # share of the blocks
_GAIN = 6.0  # standard deviation of the difference of two Laplacians, for white noise of 1
_NEARER_DB = 20.0
"""By how much B's image is nearer to A's of another request, if that is what B drew."""
_ALIKE = 2.0  # of 255: mean difference of thumbnails up to which two images are compared pixel by pixel
_OTHERS = ("another seed", "another prompt")


#     sharpness    variance of the Laplacian of the luminance (`measure.image_metrics`); a blurring decoder lowers it
#     contrast     standard deviation of the luminance
#     saturation   mean of max(R, G, B) - min(R, G, B)
#     brightness   mean luminance
#     noise        standard deviation of the noise in the calmest tenth of the image's blocks, in grey levels
#                  (Immerkaer 1996, Fast noise variance estimation: the difference of two Laplacians)
#
# The first three are compared as ratios, the last two as differences. The margins are differences visible side by side,
# wide enough that another seed's images of the same prompts stay within them on average.
@dataclass(frozen=True)
class ImageWitness:
    """A figure of an image, with the margin for its mean.

    Attributes:
        margin: of the logarithm of the ratio, or of the difference.
        worse: the direction that is worse.
        lower, higher: words for an image with a lower or higher value.
    """

    name: str
    is_ratio: bool
    margin: float
    worse: Literal["lower", "higher", "either"]
    lower: str
    higher: str

    def difference(self, a: float, b: float) -> float:
        """Return the distance of B's value from A's, on the scale of the margin."""
        return (
            math.log((b + 1.0) / (a + 1.0)) if self.is_ratio else b - a
        )  # flat and grey images have a ratio, too

    @property
    def margin_in_words(self) -> str:
        if not self.is_ratio:
            return f"±{self.margin:g}"
        return f"×{math.exp(-self.margin):.2f} to ×{math.exp(self.margin):.2f}"

    def in_words(self, difference: float) -> str:
        """Return a difference as printed: a ratio, or a signed number."""
        return f"×{math.exp(difference):.2f}" if self.is_ratio else f"{difference:+.1f}"


WITNESSES = (
    ImageWitness("sharpness", True, math.log(1.5), "lower", "softer", "sharper"),
    ImageWitness("contrast", True, math.log(1.25), "either", "flatter", "harsher"),
    ImageWitness("saturation", True, math.log(1.25), "either", "paler", "more colourful"),
    ImageWitness("brightness", False, 12.0, "either", "darker", "brighter"),
    ImageWitness("noise", False, 2.0, "higher", "cleaner", "noisier"),
)


class Nearness(StrEnum):
    """How near an image is to the reference's; see `same`."""

    ITSELF = "as near as the reference is to itself"
    NEAR = "near"
    CHANGED = "changed"
    ANOTHER = "another image"


@dataclass
class ReadImage:
    """An image with its figures. Its pixels are read when they are needed.

    Attributes:
        size: width and height; None if there is no image.
        digest: of its pixels.
        faults: e.g. "black"; see `measure.image_metrics.faults`.
        reason: why there is no image; "" if there is one.
        scores: how well it fits its prompt and the other prompts, by the names of models: (own, others).
        thumbnail: (THUMBNAIL, THUMBNAIL, 3); empty if there is no image.
        num_rectangles: of one exact colour; see `measure.image_metrics`.
    """

    kept: KeptImage
    size: tuple[int, int] | None = None
    digest: str = ""
    faults: tuple[str, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()
    alone: dict[str, float] = field(default_factory=dict)
    scores: dict[str, tuple[float, float]] = field(default_factory=dict)
    thumbnail: Pixels = field(default_factory=lambda: np.zeros(0))
    num_rectangles: int = 0

    @classmethod
    def of(cls, kept: KeptImage | None) -> ReadImage:
        if kept is None:
            return cls(KeptImage(None), reason="it was not drawn")
        if kept.path is None:
            return cls(kept, reason=kept.reason)
        notes = list(kept.notes)
        try:
            image = open_image(kept.path, lambda text: notes.append(f"an image: {text}"))
        except VivaceError as error:
            text = str(error).replace(str(kept.path), "the image")
            return cls(kept, reason=text, notes=tuple(notes))
        array = pixels(image)
        return cls(
            kept,
            image.size,
            hashlib.sha256(image.tobytes()).hexdigest(),
            tuple(dict.fromkeys((*kept.faults, *faults(array)))),
            notes=tuple(notes),
            alone=statistics_of(array),
            thumbnail=thumbnail(array),
            num_rectangles=num_rectangles(array),
        )

    @property
    def is_there(self) -> bool:
        return self.size is not None

    @property
    def picture(self) -> Any:
        assert self.kept.path is not None
        return open_image(self.kept.path)

    @property
    def pixels(self) -> Pixels:
        return pixels(self.picture)


class StoredImages:
    """The images of a store, each read once."""

    def __init__(self, store: ProofStore) -> None:
        self._store = store
        self._read: dict[tuple[Letter, DrawJob], ReadImage] = {}

    def image(self, letter: Letter, job: DrawJob) -> ReadImage:
        key = (letter, job)
        if key not in self._read:
            self._read[key] = ReadImage.of(self._store.image(letter, job))
        return self._read[key]

    def read(self, image: DrawnImage) -> ReadImage:
        """Return an image that belongs to no job."""
        return ReadImage.of(self._store.keep_file(image))


@dataclass
class PairFigures:
    """An image of A and the one of B of the same prompt and seed.

    Attributes:
        settings: the requested ones.
        size: the requested one; "" if all images have the same.
        against: PSNR (infinite for equal images), SSIM, match and LPIPS of B against A.
        has_hole: whether B's image has a patch of one colour where A's has none.
        num_rectangles: of one exact colour in B's image, where A's has another; see `measure.image_metrics`.
        nearness: None if they were not compared.
        reason: why they cannot be compared pixel by pixel; "" if they were.
        request: which draws B's image; "" if it is not an endpoint's.
    """

    prompt: str
    seed: int
    a: ReadImage
    b: ReadImage
    settings: ImageSettings = field(default_factory=ImageSettings)
    size: str = ""
    against: dict[str, float] = field(default_factory=dict)
    has_hole: bool = False
    num_rectangles: int = 0
    nearness: Nearness | None = None
    reason: str = ""
    request: str = ""

    @classmethod
    def of(cls, job: DrawJob, a: ReadImage, b: ReadImage, lpips: Lpips | None) -> PairFigures:
        pair = cls(job.prompt, job.seed, a, b, job.settings)
        if pair.is_complete:
            try:
                is_large = min(a.size or (0, 0)) >= MIN_SIDE
                pair.against = figures_against(b.pixels, a.pixels, lpips if is_large else None)
                pair.has_hole = pair.against.pop("hole") > 0
                pair.num_rectangles = int(pair.against.pop("num_rectangles"))
            except ValueError as error:
                pair.reason = str(error)
        return pair

    @property
    def differs(self) -> bool:
        return self.nearness in (Nearness.CHANGED, Nearness.ANOTHER)

    @property
    def is_broken(self) -> bool:
        return bool(self.b.faults and not self.a.faults) or self.has_hole

    @property
    def label(self) -> str:
        return f"“{self.prompt[:60]}” {self.seed_in_words}"

    @property
    def seed_in_words(self) -> str:
        return f"seed {self.seed}" + (f" at {self.size}" if self.size else "")

    def image(self, letter: Letter) -> ReadImage:
        return self.a if letter == "a" else self.b

    @property
    def is_complete(self) -> bool:
        return self.a.is_there and self.b.is_there


def compare_all(plan: ProofPlan, images: StoredImages, lpips: Lpips | None) -> list[PairFigures]:
    pairs = []
    for job in plan.main_jobs:
        pair = PairFigures.of(job, images.image("a", job), images.image("b", job), lpips)
        pair.request = plan.b.request_text(job)
        if len(plan.settings_by_size) > 1:
            pair.size = f"{job.settings.width}x{job.settings.height}"
        pairs.append(pair)
    return pairs


def find_lpips() -> Lpips | None:
    return Lpips() if default_weights().is_file() else None


def psnr_of(a: ReadImage, b: ReadImage) -> float:
    """Return the PSNR of two images in dB: infinite for equal ones, 0 for missing ones and different sizes."""
    if a.size is None or a.size != b.size:
        return 0.0
    error = float(((a.pixels - b.pixels) ** 2).mean())
    return math.inf if error == 0 else 10 * math.log10(255.0**2 / error)


def are_equal(a: ReadImage, b: ReadImage) -> bool:
    """Return whether two images differ by rounding at most."""
    return psnr_of(a, b) >= ROUNDING_DB


def match_of(a: ReadImage, b: ReadImage) -> float:
    return match(b.pixels, a.pixels) if a.size is not None and a.size == b.size else -1.0


def is_near(a: ReadImage, b: ReadImage) -> bool:
    return match_of(a, b) >= NEAR


def add_scores(
    images: Sequence[tuple[str, ReadImage]],
    prompts: Sequence[str],
    name: str,
    score: Callable[[Sequence[Any], Sequence[str]], Any],
) -> None:
    """Add to each image its scores with its own prompt and with the others, by a matrix (images, prompts)."""
    complete = [(prompt, image) for prompt, image in images if image.is_there]
    batch = 32
    for start in range(0, len(complete), batch):
        part = complete[start : start + batch]
        rows = score([image.picture for _, image in part], prompts)
        for (prompt, image), row in zip(part, rows, strict=True):
            own = prompts.index(prompt)
            others = [float(value) for k, value in enumerate(row) if k != own]
            image.scores[name] = float(row[own]), sum(others) / len(others)


def statistics_of(image: Pixels) -> dict[str, float]:
    """Return the figures of an image (H, W, 3), 0 to 255, by the names of `WITNESSES`; empty if it is not finite."""
    if not np.isfinite(image).all():
        return {}
    light = luminance(image)
    return {
        "sharpness": sharpness(image),
        "contrast": float(light.std()),
        "saturation": float((image.max(axis=-1) - image.min(axis=-1)).mean()),
        "brightness": float(light.mean()),
        "noise": noise(light),
    }


def noise(light: NDArray[np.float64]) -> float:
    """Return the standard deviation of the noise of a luminance (H, W), where the image is calm."""
    padded = np.pad(light, 1, mode="reflect")
    rows = padded[:-2] - 2 * padded[1:-1] + padded[2:]
    doubled = rows[:, :-2] - 2 * rows[:, 1:-1] + rows[:, 2:]
    height, width = (side // _BLOCK * _BLOCK for side in doubled.shape)
    if not height or not width:
        return 0.0
    blocks = doubled[:height, :width].reshape(height // _BLOCK, _BLOCK, width // _BLOCK, _BLOCK)
    deviations = np.sort(np.sqrt((blocks**2).mean(axis=(1, 3))).ravel()) / _GAIN
    return float(deviations[: max(1, round(_CALM * deviations.size))].mean())


@dataclass(frozen=True)
class ImageFinding:
    """A fault of B's images in words, with an example, and a request that shows it. `is_cause`: A itself draws B's
    image so."""

    summary: str
    example: str
    request: str
    is_cause: bool

    @property
    def text(self) -> str:
        return f"{self.summary}, e.g. {self.example}"


def find_broken(pairs: Sequence[PairFigures]) -> Iterator[ImageFinding]:
    """Yield the kinds of broken images that B has where A has none, holes among them."""
    by_fault: dict[str, list[PairFigures]] = {}
    for pair in pairs:
        for fault in (*pair.b.faults, *(["hole"] if pair.has_hole else [])) if not pair.a.faults else ():
            by_fault.setdefault(fault, []).append(pair)
    for fault, hit in by_fault.items():
        yield ImageFinding(f"{fault}: {count(len(hit), 'image')} of B", hit[0].label, hit[0].request, True)


def find_instead(
    plan: ProofPlan, pairs: Sequence[PairFigures], images: StoredImages
) -> Iterator[ImageFinding]:
    """Yield what B drew instead of A's images, where A draws the same with another seed, prompt or setting."""
    hits = []
    for number, pair in enumerate(pairs):
        own_db = pair.against.get("psnr_db", 0.0)
        if not pair.is_complete or own_db >= ROUNDING_DB:
            continue
        others = [(_OTHERS[pair.prompt != other.prompt], other.a) for other in pairs if other is not pair]
        if number == 0:
            others += [(words, images.image("a", job)) for words, job in plan.hypotheses]
        least_db = max(ROUNDING_DB, own_db + _NEARER_DB)
        if kinds := [kind for kind, other in others if _is_as_near(pair.b, other, least_db)]:
            hits.append((pair, " or of ".join(dict.fromkeys(kinds))))
    if hits:
        kind = Counter(kind for _, kind in hits).most_common(1)[0][0]
        summary = (
            f"instead: {count(len(hits), 'image')} of B {'is' if len(hits) == 1 else 'are'} A's of {kind}"
        )
        is_cause = kind not in _OTHERS or len(hits) >= sum(each.differs for each in pairs)
        yield ImageFinding(summary, hits[0][0].label, hits[0][0].request, is_cause)


def _is_as_near(image: ReadImage, other: ReadImage, least_db: float) -> bool:
    if not other.is_there or np.abs(other.thumbnail - image.thumbnail).mean() > _ALIKE:
        return False
    return psnr_of(other, image) >= least_db
