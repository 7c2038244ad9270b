"""A witness's scores of each image: as it was drawn, after harmless changes, and damaged at graded strengths.

The scores of an image are kept in a file of their own as soon as they are complete, so an interrupted run goes on.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vivace.errors import StoreError, UsageError
from vivace.foundation.stats import MIN_GROUPS
from vivace.foundation.untrusted.destinations import replace
from vivace.foundation.untrusted.files import read_object
from vivace.measure.damage import HARMLESS, SHIFT, DamageKind
from vivace.measure.image_metrics import Pixels, aligned, faults, pixels
from vivace.models.scorers import LocatedJudge

if TYPE_CHECKING:
    from vivace.runtime.workloads import CheckedRequest

_BATCH = 16  # images that are damaged, and scored together
Score = Callable[[Sequence[Any], Sequence[str]], Any]
"""Returns the scores of images (PIL) with prompts, one row for each image."""
OnImage = Callable[[int, int], None]
"""Called with the number of finished images, and of all."""


@dataclass(frozen=True)
class CalibrationImages:
    """The images of one model and workload.

    Attributes:
        folder: of the images and of their scores.
        prompts: of each image.
    """

    folder: Path
    prompts: tuple[str, ...]

    def path(self, index: int) -> Path:
        return self.folder / "images" / f"{index:05d}.png"

    @property
    def missing(self) -> list[int]:
        return [k for k in range(len(self.prompts)) if not self.path(k).exists()]

    def read(self) -> Iterator[tuple[int, Any]]:
        """Yield the index of each image, and the image (PIL, RGB)."""
        from vivace.foundation.untrusted.image_files import open_image

        for k in range(len(self.prompts)):
            yield k, open_image(self.path(k)).convert("RGB")


@dataclass(frozen=True)
class ImageScores:
    """The scores of one image.

    Attributes:
        own, others: with its own prompt, and the mean with the others.
        changed: with its own prompt after each change, by `label`.
        faults: why the image shows nothing; then there are no scores.
    """

    prompt: str
    own: float = 0.0
    others: float = 0.0
    changed: dict[str, float] | None = None
    faults: tuple[str, ...] = ()


def label(kind: DamageKind, grade: int) -> str:
    """Return the key of a damage's scores; grades count from 0."""
    return f"{kind.name}/{grade}"


def score_images(
    images: CalibrationImages,
    judge: LocatedJudge,
    kinds: Sequence[DamageKind],
    device: str = "cpu",
    is_read: Callable[[], None] = lambda: None,
    on_image: OnImage = lambda done, total: None,
) -> list[ImageScores]:
    """Return the scores of all images; stored scores are not computed again.

    Args:
        is_read: called when the model is loaded.
        on_image: called after each image that was scored.
    """
    folder = images.folder / sha256(judge.scorer.id.encode()).hexdigest()[:16]
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise StoreError(f"{folder} cannot be written: {error.strerror or error}") from None
    names = [*(change.name for change in HARMLESS)]
    names += [label(kind, grade) for kind in kinds for grade in range(len(kind.strengths))]
    scores = [_kept(folder / f"{k:05d}.json", prompt) for k, prompt in enumerate(images.prompts)]
    todo = [k for k, row in enumerate(scores) if not _is_complete(row, names)]
    if todo:
        distinct = list(dict.fromkeys(images.prompts))
        score = _scorer(judge, distinct, device)
        is_read()
        for done, (k, image) in enumerate(((k, i) for k, i in images.read() if k in set(todo)), start=1):
            row = _scores_of(pixels(image), images.prompts[k], distinct, kinds, score, k)
            replace(folder / f"{k:05d}.json", json.dumps(_as_json(row)).encode())
            scores[k] = row
            on_image(len(scores) - len(todo) + done, len(scores))
    return [row for row in scores if row is not None]


def _scores_of(
    image: Pixels, prompt: str, prompts: list[str], kinds: Sequence[DamageKind], score: Score, seed: int
) -> ImageScores:
    if problems := faults(image):
        return ImageScores(prompt, faults=tuple(problems))
    whole = np.asarray(score([_as_image(image)], prompts)[0])
    mine = prompts.index(prompt)
    changed: dict[str, float] = {}
    for batch in _batches(_changes(image, kinds, seed)):
        rows = score([each for _, each in batch], [prompt])
        changed |= {name: float(row[0]) for (name, _), row in zip(batch, rows, strict=True)}
    return ImageScores(
        prompt, own=float(whole[mine]), others=float(np.delete(whole, mine).mean()), changed=changed
    )


def _changes(image: Pixels, kinds: Sequence[DamageKind], seed: int) -> Iterator[tuple[str, Any]]:
    """Yield the label and the image (PIL) of each change, one after the other: all at once are gigabytes."""
    for change in HARMLESS:
        yield change.name, _as_image(change.apply(image, seed))
    for kind in kinds:
        for grade, strength in enumerate(kind.strengths):
            damaged = kind.apply(image, strength, seed)
            # A shift by a pixel or two is moved back, as the gate does.
            yield (
                label(kind, grade),
                _as_image(aligned(damaged, image) if kind.name == SHIFT else damaged),
            )


def _batches(changes: Iterator[tuple[str, Any]]) -> Iterator[list[tuple[str, Any]]]:
    while batch := list(itertools.islice(changes, _BATCH)):
        yield batch


def _as_image(image: Pixels) -> Any:
    from PIL import Image

    return Image.fromarray(image.astype(np.uint8))


def _scorer(judge: LocatedJudge, prompts: Sequence[str], device: str) -> Score:
    """Load the model that scores."""
    from vivace.models.quiet import quiet

    if judge.kind == "blip":
        from vivace.measure.witness import Witness

        with quiet():
            witness = Witness(judge.scorer.folder, device)
        return lambda images, prompts: [witness.scores(image, prompts) for image in images]
    from vivace.measure.scorer import ClipScorer

    with quiet():
        clip = ClipScorer(judge.scorer.folder, device)
    of_prompts = dict(zip(prompts, clip.embed_prompts(prompts), strict=True))

    def score(images: Sequence[Any], prompts: Sequence[str]) -> Any:
        return 100 * clip.embed_images(images) @ np.stack([of_prompts[prompt] for prompt in prompts]).T

    return score


def _is_complete(row: ImageScores | None, names: Sequence[str]) -> bool:
    if row is None:
        return False
    return bool(row.faults) or (row.changed is not None and set(names) <= row.changed.keys())


def _as_json(row: ImageScores) -> dict[str, Any]:
    return {"own": row.own, "others": row.others, "changed": row.changed, "faults": list(row.faults)}


def _kept(file: Path, prompt: str) -> ImageScores | None:
    """Return the stored scores of an image; None if there are none."""
    if not file.exists():
        return None
    try:
        row = read_object(file)
        changed = row["changed"]
        return ImageScores(
            prompt,
            float(row["own"]),
            float(row["others"]),
            None if changed is None else {str(name): float(value) for name, value in changed.items()},
            tuple(str(fault) for fault in row["faults"]),
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise StoreError(
            f"{file} is damaged ({error!r}); delete it, and run the same command again"
        ) from None


def images_of(prepared: CheckedRequest, store: Path) -> CalibrationImages:
    """Return the images of a request, drawn or not.

    Raises:
        UsageError: too few prompts for a verdict.
        StoreError: the folder cannot be written.
    """
    workload = prepared.workload
    if (number := len(set(workload.prompts))) < MIN_GROUPS:
        raise UsageError(
            f"{number} {'prompt' if number == 1 else 'prompts'}: a calibration needs {MIN_GROUPS} or more; give "
            "--prompts FILE"
        )
    identity = json.dumps(
        {"model": prepared.located.model.model_dump(), "workload": workload.model_dump(mode="json")},
        sort_keys=True,
    )
    folder = store / "calibrate-witness" / sha256(identity.encode()).hexdigest()[:16]
    try:
        (folder / "images").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"--store {store} cannot be written: {error.strerror or error}") from None
    replace(folder / "of.json", (identity + "\n").encode())
    return CalibrationImages(folder, tuple(prompt for _, prompt, _ in workload.images()))


def draw_missing(
    prepared: CheckedRequest,
    images: CalibrationImages,
    device: str,
    is_read: Callable[[], None] = lambda: None,
    on_image: OnImage = lambda done, total: None,
) -> None:
    """Draw the images that are not there yet, each kept at once.

    Args:
        device: torch's type of device.
        is_read: called when the model is loaded.
    """
    from vivace.models.load import explained
    from vivace.models.quiet import quiet

    missing = images.missing
    if not missing:
        return
    calls = {k: (k, prompt, seed) for k, prompt, seed in prepared.workload.images()}
    total = len(calls)
    with explained(prepared.located), quiet():
        session = prepared.open(device)
    is_read()
    with session:
        for number, k in enumerate(missing, start=total - len(missing) + 1):
            with explained(prepared.located, "does not run"):
                output = session(**prepared.arguments([calls[k]]))
            file = io.BytesIO()
            output.images[0].convert("RGB").save(file, "PNG")
            replace(images.path(k), file.getvalue())
            on_image(number, total)
