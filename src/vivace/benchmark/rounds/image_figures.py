"""The metrics of stored images, computed in the worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vivace.benchmark.rounds.worker_requests import Scorer
from vivace.benchmark.store.images import image_path
from vivace.foundation.spec.figures import SAME_PIXELS, FiguresKey, ImageFigures, packed
from vivace.models.find import WEIGHTS
from vivace.models.prompts import PROMPT_SETS
from vivace.models.reading_limits import ReadingLimits

if TYPE_CHECKING:
    import numpy as np

    from vivace.measure.scorer import ClipScorer, Witness

Model = TypeVar("Model")
_MAY_BE_SHIFTED = 0.9  # match
_SCORER_BATCH = 32  # images per forward of the scorer


def compute_figures(
    images: Path,
    keys: Iterable[FiguresKey],
    scorer: Scorer | None,
    device: str,
    lpips: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda event: None,
    sources: Path | None = None,
) -> list[ImageFigures]:
    """Return the metrics of stored images; missing images are left out. Runs in the worker.

    Args:
        images: the store's folder of images.
        scorer: the CLIP model, and the prompt set used as other prompts.
        device: where the scorer runs.
        lpips: also compute LPIPS.
        sources: folder of the images that images were made from.
    """
    from PIL import Image

    from vivace.measure.image_metrics import pixels

    figures: list[ImageFigures] = []
    for done, key in enumerate(keys):
        report({"event": "phase", "phase": "comparing images", "done": done})
        paths = [image_path(images, sha) for sha in (key.sha256, key.reference)]
        if all(path.exists() for path in paths):
            image, original = (pixels(Image.open(path)) for path in paths)
            row = _pixel_figures(key, image, original)
            row.alone.update(_against_source(key, image, sources))
            figures.append(row)
    if scorer is not None:
        from vivace.measure.scorer import ClipScorer

        clip = _read_under_limits(ClipScorer, Path(scorer.folder), device, report)
        report({"event": "phase", "phase": "scoring images", "done": 0})
        _add_scores(figures, images, clip, PROMPT_SETS[scorer.others], sources)
        if scorer.witness is not None:
            from vivace.measure.scorer import Witness

            witness = _read_under_limits(Witness, Path(scorer.witness), device, report)
            report({"event": "phase", "phase": "asking the second witness", "done": 0})
            _add_witness(figures, images, witness, PROMPT_SETS[scorer.others])
    if lpips:
        _add_lpips(figures, images, device)
    return figures


def _read_under_limits(
    kind: Callable[[Path, str], Model], folder: Path, device: str, report: Callable[[dict[str, Any]], None]
) -> Model:
    """Read a model that scores images. The launcher limits this process if the model is not vivace's own."""
    limits = None if folder.parent == WEIGHTS else asdict(ReadingLimits.of_weights_in(folder))
    report({"event": "phase", "phase": "reading the scorer", "done": 0, "limits": limits})
    return kind(folder, device)


def _pixel_figures(key: FiguresKey, image: np.ndarray, original: np.ndarray) -> ImageFigures:
    from vivace.measure.image_metrics import figures_against, figures_alone, thumbnail

    against: dict[str, float] = {}
    reason = None
    if not key.is_reference:
        try:
            against = figures_against(image, original)
        except ValueError as error:
            reason = str(error)
        if against.get("psnr_db") == float("inf"):
            # The same pixels in another PNG file; the store hashes files, not pixels.
            against, reason = {}, SAME_PIXELS
    return ImageFigures(
        **key.model_dump(),
        alone=figures_alone(image),
        against=against,
        reason=reason,
        thumbnail=packed(thumbnail(image)),
    )


def _against_source(key: FiguresKey, image: np.ndarray, sources: Path | None) -> dict[str, float]:
    """Return an image's metrics against its source image; empty for text-to-image."""
    from PIL import Image

    from vivace.measure.image_metrics import match, outside_metrics, pixels

    if key.source is None or sources is None:
        return {}
    source = pixels(Image.open(image_path(sources, key.source)))
    if key.mask is None:
        return {"source_match": match(image, source)}
    return outside_metrics(image, source, pixels(Image.open(image_path(sources, key.mask))))


def _add_scores(
    rows: list[ImageFigures],
    pictures: Path,
    clip: ClipScorer,
    others: Sequence[str],
    sources: Path | None,
) -> None:
    """Add CLIP scores and similarities to the rows, in place."""
    import numpy as np

    prompts = list(dict.fromkeys([*(row.prompt for row in rows), *others]))
    prompt_embeddings = dict(zip(prompts, clip.embed_prompts(prompts), strict=True))
    shas = list(dict.fromkeys(sha for row in rows for sha in (row.sha256, row.reference)))
    moved = {
        row.key: image
        for row in rows
        if row.against.get("match", 0) > _MAY_BE_SHIFTED and (image := _moved_back(row, pictures)) is not None
    }
    images = [*(image_path(pictures, sha) for sha in shas), *moved.values()]
    image_embeddings = dict(zip([*shas, *moved], _embedded(clip, images), strict=True))
    for row in rows:
        embedding = image_embeddings[row.key if row.key in moved else row.sha256]
        row.alone["clip_score"] = 100 * float(embedding @ prompt_embeddings[row.prompt])
        if row.is_reference:
            other_scores = [float(embedding @ prompt_embeddings[p]) for p in others if p != row.prompt]
            row.alone["clip_score_of_others"] = 100 * float(np.mean(other_scores))
        elif not row.is_identical:
            row.against["clip_similarity"] = 100 * float(embedding @ image_embeddings[row.reference])
    for k, row in enumerate(rows):
        rows[k] = row.model_copy(update={"embedding": packed(image_embeddings[row.sha256])})
    _add_similarities(
        rows, clip, lambda row: image_embeddings[row.key if row.key in moved else row.sha256], sources
    )


def _add_similarities(
    rows: list[ImageFigures], clip: ClipScorer, embed: Callable[[ImageFigures], Any], sources: Path | None
) -> None:
    """Add the similarity of images to the images that they were made from, in place.

    Args:
        embed: the embedding of a row's image.
    """
    import numpy as np

    shas = list(dict.fromkeys(row.source for row in rows if row.source is not None))
    if sources is None or not shas:
        return
    embeddings = dict(zip(shas, _embedded(clip, [image_path(sources, sha) for sha in shas]), strict=True))
    for row in rows:
        if row.source is None:
            continue
        row.alone["source_similarity"] = 100 * float(embed(row) @ embeddings[row.source])
        strangers = [float(embed(row) @ embeddings[sha]) for sha in shas if sha != row.source]
        if row.is_reference and strangers:
            row.alone["source_similarity_of_others"] = 100 * float(np.mean(strangers))


def _embedded(clip: ClipScorer, images: Sequence[Any]) -> Iterator[Any]:
    """Yield the embedding of each image, or image file, computed in batches."""
    from PIL import Image

    for start in range(0, len(images), _SCORER_BATCH):
        batch = images[start : start + _SCORER_BATCH]
        yield from clip.embed_images([Image.open(i) if isinstance(i, Path) else i for i in batch])


def _moved_back(row: ImageFigures, images: Path) -> Any:
    """Return the image without a shift by a pixel or two against its reference; None if there is none."""
    from PIL import Image

    from vivace.measure.image_metrics import aligned, pixels

    image, original = (pixels(Image.open(image_path(images, sha))) for sha in (row.sha256, row.reference))
    near = aligned(image, original)
    return None if near is image else Image.fromarray(near.astype("uint8"))


def _add_witness(rows: list[ImageFigures], images: Path, witness: Witness, others: Sequence[str]) -> None:
    """Add the second witness's scores to the rows, in place."""
    import numpy as np
    from PIL import Image

    for row in rows:
        strangers = [prompt for prompt in others if prompt != row.prompt] if row.is_reference else []
        own, *rest = witness.scores(Image.open(image_path(images, row.sha256)), [row.prompt, *strangers])
        row.alone["witness_score"] = own
        if rest:
            row.alone["witness_score_of_others"] = float(np.mean(rest))


def _add_lpips(rows: list[ImageFigures], images: Path, device: str) -> None:
    """Add LPIPS to the rows, in place, for images that differ from a reference of the same size."""
    from PIL import Image

    from vivace.measure.image_metrics import pixels
    from vivace.measure.scorer import Lpips

    network = Lpips(device)
    for row in rows:
        if "psnr_db" in row.against:
            pair = [pixels(Image.open(image_path(images, sha))) for sha in (row.sha256, row.reference)]
            (row.against["lpips"],) = network.distances(pair[:1], pair[1:])
