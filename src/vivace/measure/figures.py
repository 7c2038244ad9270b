"""The figures of images: alone, against their references and sources, and by models that score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean
from typing import Any

from vivace.foundation.spec.figures import SAME_PIXELS, FiguresKey, ImageFigures, packed
from vivace.measure.image_metrics import (
    aligned,
    figures_against,
    figures_alone,
    match,
    outside_metrics,
    pixels,
    thumbnail,
)
from vivace.measure.scorer import ClipScorer, FunctionScorer, Lpips, Witness

Read = Callable[[str], Any]
"""Returns an image (PIL) by the name that a row has for it."""
Others = Callable[[str], Sequence[str]]
"""Returns the prompts that an image is scored with besides its own."""
_MAY_BE_SHIFTED = 0.9  # match
_SCORER_BATCH = 32  # images per forward of the scorer


class FigureSet:
    """Images and their figures, which grow row by row, then model by model."""

    def __init__(self, read: Read, read_source: Read | None = None) -> None:
        self.rows: list[ImageFigures] = []
        self._read = read
        self._read_source = read_source

    def add(self, key: FiguresKey) -> None:
        """Add an image, with what its pixels say."""
        image = pixels(self._read(key.sha256))
        against: dict[str, float] = {}
        reason = None
        if not key.is_reference:
            try:
                against = figures_against(image, pixels(self._read(key.reference)))
            except ValueError as error:
                reason = str(error)
            if against.get("psnr_db") == float("inf"):
                # The same pixels in another PNG file; the store hashes files, not pixels.
                against, reason = {}, SAME_PIXELS
        self.rows.append(
            ImageFigures(
                **key.model_dump(),
                alone=figures_alone(image) | self._against_source(key, image),
                against=against,
                reason=reason,
                thumbnail=packed(thumbnail(image)),
            )
        )

    def add_scores(self, scorer: ClipScorer | FunctionScorer, others: Others | None) -> None:
        """Add scores for prompts, and with CLIP the similarity to references and sources."""
        if isinstance(scorer, ClipScorer):
            self._add_clip(scorer, others)
        elif others is not None:
            for row in self.rows:
                image = self._read(row.sha256)
                prompts = [row.prompt, *(others(row.prompt) if row.is_reference else ())]
                _add(row, "clip_score", scorer.scores([image] * len(prompts), prompts))

    def add_witness(self, witness: Witness, others: Others) -> None:
        """Add the second witness's scores."""
        for row in self.rows:
            prompts = [row.prompt, *(others(row.prompt) if row.is_reference else ())]
            _add(row, "witness_score", witness.scores(self._read(row.sha256), prompts))

    def add_lpips(self, device: str) -> None:
        """Add LPIPS for images that differ from a reference of the same size."""
        network = Lpips(device)
        for row in self.rows:
            if "psnr_db" in row.against:
                image, original = ([pixels(self._read(sha))] for sha in (row.sha256, row.reference))
                (row.against["lpips"],) = network.distances(image, original)

    def _against_source(self, key: FiguresKey, image: Any) -> dict[str, float]:
        if key.source is None or self._read_source is None:
            return {}
        source = pixels(self._read_source(key.source))
        if key.mask is None:
            return {"source_match": match(image, source)}
        return outside_metrics(image, source, pixels(self._read_source(key.mask)))

    def _add_clip(self, clip: ClipScorer, others: Others | None) -> None:
        rows = self.rows
        prompts = []
        if others is not None:
            prompts = [
                p for row in rows for p in (row.prompt, *(others(row.prompt) if row.is_reference else ()))
            ]
            prompts = list(dict.fromkeys(prompts))
        of_prompts = dict(zip(prompts, clip.embed_prompts(prompts) if prompts else (), strict=True))
        shas = list(dict.fromkeys(sha for row in rows for sha in (row.sha256, row.reference)))
        # A shift by a pixel or two is undone first: scorers dislike it, though nothing is lost.
        moved = {
            row.key: image
            for row in rows
            if row.against.get("match", 0) > _MAY_BE_SHIFTED and (image := self._moved_back(row)) is not None
        }
        of_images = dict(zip(shas, _embedded(clip, shas, self._read), strict=True))
        of_moved = dict(zip(moved, _embedded(clip, list(moved), moved.__getitem__), strict=True))
        of_rows = [of_moved.get(row.key, of_images[row.sha256]) for row in rows]
        for row, embedding in zip(rows, of_rows, strict=True):
            if others is not None:
                asked = [row.prompt, *(others(row.prompt) if row.is_reference else ())]
                _add(row, "clip_score", [100 * float(embedding @ of_prompts[prompt]) for prompt in asked])
            if not row.is_identical:
                row.against["clip_similarity"] = 100 * float(embedding @ of_images[row.reference])
        if self._read_source is not None:
            names = list(dict.fromkeys(row.source for row in rows if row.source is not None))
            sources = dict(zip(names, _embedded(clip, names, self._read_source), strict=True))
            for row, embedding in zip(rows, of_rows, strict=True):
                if row.source is not None:
                    strangers = [name for name in names if name != row.source] if row.is_reference else []
                    likeness = [100 * float(embedding @ sources[name]) for name in (row.source, *strangers)]
                    _add(row, "source_similarity", likeness)
        for k, row in enumerate(rows):
            rows[k] = row.model_copy(update={"embedding": packed(of_images[row.sha256])})

    def _moved_back(self, row: ImageFigures) -> Any:
        """Return the image without a shift against its reference; None if there is none."""
        from PIL import Image

        image, original = (pixels(self._read(sha)) for sha in (row.sha256, row.reference))
        near = aligned(image, original)
        return None if near is image else Image.fromarray(near.astype("uint8"))


def _add(row: ImageFigures, name: str, scores: Sequence[float]) -> None:
    row.alone[name] = scores[0]
    if scores[1:]:
        row.alone[f"{name}_of_others"] = fmean(scores[1:])


def _embedded(clip: ClipScorer, names: Sequence[Any], read: Callable[[Any], Any]) -> Iterator[Any]:
    for start in range(0, len(names), _SCORER_BATCH):
        yield from clip.embed_images([read(name) for name in names[start : start + _SCORER_BATCH]])
