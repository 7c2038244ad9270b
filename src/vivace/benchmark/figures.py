"""The quality pass, after all timing: generate the noise floor's images and compute the metrics of every image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vivace.benchmark.deadline import Deadline, is_over, limit_s
from vivace.benchmark.launcher import Launcher, ask, last_line
from vivace.benchmark.pictures import picture_path
from vivace.benchmark.requests import FiguresRequest, PicturesRequest, Scorer
from vivace.benchmark.runner import sources_folder
from vivace.benchmark.store import Store
from vivace.errors import RecipeError, WorkerError
from vivace.models.find import WEIGHTS
from vivace.models.prompts import PROMPT_SETS
from vivace.models.reading import Limits
from vivace.models.scorers import FoundScorer
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.spec.figures import SAME_PIXELS, FiguresKey, NoiseFloor, PictureFigures, key_of
from vivace.spec.record import Record
from vivace.spec.trial import Trial

if TYPE_CHECKING:
    import numpy as np

    from vivace.measure.scorer import ClipScorer
    from vivace.measure.witness import Witness

Model = TypeVar("Model")
OnProgress = Callable[[str, int, int], None]
_TIMEOUT_S = 3600.0
_CHUNK = 256  # images per request; each chunk is stored, so an interrupted pass keeps those before
_CHUNK_IN_A_HURRY = 64  # where a deadline may stop one
_MAY_BE_SHIFTED = 0.9  # match
_SCORER_BATCH = 32  # images per forward of the scorer
# Changes that only reorder arithmetic, tried in this order.
_HARMLESS = ("attention(math)", "channels_last")
_MAX_FLOOR_PICTURES = 13


def keys_of(records: Sequence[Record], floor: NoiseFloor | None, scorer: str | None) -> list[FiguresKey]:
    """Return a key for every image whose prompt and seed the baseline has too.

    Args:
        records: the baseline's first.
        floor: adds the noise floor's images.
        scorer: NAME@REVISION of the CLIP model.
    """
    if not records:
        return []
    references = {(p.prompt, p.seed): p.sha256 for p in records[0].rounds[0].pictures}
    drawn = [p for record in records for p in record.rounds[0].pictures]
    drawn += floor.pictures if floor is not None else ()
    workload = records[0].trial.workload
    found = {
        key_of(p, references[p.prompt, p.seed], workload, scorer): None
        for p in drawn
        if (p.prompt, p.seed) in references
    }
    return list(found)


def add_figures(
    records: Sequence[Record],
    store: Store,
    launcher: Launcher,
    scorer: FoundScorer | None,
    device: str,
    threads: int | None,
    lpips: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
    deadline: Deadline | None = None,
) -> int:
    """Compute and store the metrics that are not stored yet; return the number of images.

    A worker does the work, so that this process imports no torch.

    Args:
        on_progress: called with what is done, the number of images that are done, and their number.
        deadline: by which it ends, with the images that were compared until then.
    """
    known = store.figures()
    floor = store.noise_floor(records[0].trial.key(records[0].environment)) if records else None
    wanted = keys_of(records, floor, scorer.id if scorer else None)
    todo = [key for key in wanted if key not in known or _lacks(known[key], "lpips" if lpips else "match")]
    chunk = _CHUNK if deadline is None else _CHUNK_IN_A_HURRY
    for start in range(0, len(todo), chunk):
        request = FiguresRequest(
            pictures=_pictures_folder(store),
            keys=tuple(todo[start : start + chunk]),
            scorer=None if scorer is None else _asked(scorer),
            device=device,
            lpips=lpips,
            threads=threads,
            sources=sources_folder(store),
        )

        def on_event(event: dict[str, Any], done: int = start) -> None:
            if event["event"] == "phase":  # others are the worker's own
                on_progress(event["phase"], done + event["done"], len(todo))

        on_progress("comparing images", start, len(todo))
        what = None if scorer is None else f"the scorer {scorer.name}"
        try:
            found = ask(launcher, request, limit_s(_TIMEOUT_S, deadline), on_event, reads=what)
        except WorkerError:
            if is_over(deadline):
                return start
            raise
        store.add_figures([PictureFigures.model_validate(row) for row in found["figures"]])
    return len(todo)


def _asked(scorer: FoundScorer) -> Scorer:
    witness = None if scorer.witness is None else str(scorer.witness.folder)
    return Scorer(folder=str(scorer.folder), others=scorer.prompt_set, witness=witness)


def _lacks(row: PictureFigures, figure: str) -> bool:
    """Whether an image was compared without this figure; "match" is missing in stores of older versions."""
    return "psnr_db" in row.against and not {"match", figure} <= row.against.keys()


def draw_noise_floor(
    baseline: Record,
    store: Store,
    launcher: Launcher,
    threads: int | None,
    on_progress: OnProgress = lambda what, done, total: None,
    deadline: Deadline | None = None,
) -> int:
    """Generate the baseline's first images again with a harmless change; return the number of new images.

    If there is no noise floor, the reason is stored instead, and reports show it.

    Args:
        on_progress: see `add_figures`.
        deadline: when it has passed nothing is stored.
    """
    key = baseline.trial.key(baseline.environment)
    if is_over(deadline) or store.noise_floor(key) is not None or not baseline.rounds[0].pictures:
        return 0
    floor = NoiseFloor(
        recipe=baseline.trial.recipe.text, reason="no harmless change applies to this baseline"
    )
    for change in _HARMLESS:
        try:
            recipe = Recipe.from_spec(baseline.trial.recipe).with_(*resolve(change))
        except RecipeError:
            continue  # the baseline sets this already
        request = PicturesRequest(
            trial=baseline.trial.model_copy(update={"recipe": recipe.spec}),
            pictures=_pictures_folder(store),
            number=_MAX_FLOOR_PICTURES,
            threads=threads,
            sources=sources_folder(store),
        )

        def on_event(event: dict[str, Any]) -> None:
            if event.get("phase") == "pictures":
                on_progress("drawing the noise floor", event["done"], event["of"])

        on_progress(
            "drawing the noise floor", 0, min(_MAX_FLOOR_PICTURES, baseline.trial.workload.num_pictures)
        )
        ending = launcher.run(request, limit_s(_TIMEOUT_S, deadline), on_event)
        if ending.timed_out and is_over(deadline):
            return 0
        # A failure here, such as out of memory, must not discard the recipes' rows.
        found = ending.value or {"reason": f"generating it failed: {last_line(ending.log) or ending}"}
        floor = NoiseFloor(recipe=recipe.text, **found)
        if floor.reason is None:
            break
    store.set_noise_floor(key, floor)
    return len(floor.pictures)


def draw_pictures(
    trial: Trial,
    number: int,
    pictures: Path,
    report: Callable[[dict[str, Any]], None],
    sources: Path | None = None,
) -> dict[str, Any]:
    """Generate the first images of a trial, untimed; return fields of a NoiseFloor. Runs in the worker.

    Args:
        sources: folder of the pictures that the trial starts from.
    """
    from vivace.benchmark.round import draw_untimed, explain

    try:
        drawn = draw_untimed(trial, number, pictures, report, sources)
    except Exception as error:  # noqa: BLE001  the process boundary
        outcome, reason = explain(error)
        return {"pictures": [], "reason": f"{outcome.value.replace('_', ' ')}: {reason}"}
    return {"pictures": [p.model_dump(mode="json") for p in drawn], "reason": None}


def compute_figures(
    pictures: Path,
    keys: Iterable[FiguresKey],
    scorer: Scorer | None,
    device: str,
    lpips: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda event: None,
    sources: Path | None = None,
) -> list[PictureFigures]:
    """Return the metrics of stored images; missing images are left out. Runs in the worker.

    Args:
        pictures: the store's folder of images.
        scorer: the CLIP model, and the prompt set used as other prompts.
        device: where the scorer runs.
        lpips: also compute LPIPS.
        report: called with progress events.
        sources: folder of the pictures that images were made from.
    """
    from PIL import Image

    from vivace.measure.quality import pixels

    found: list[PictureFigures] = []
    for done, key in enumerate(keys):
        report({"event": "phase", "phase": "comparing images", "done": done})
        paths = [picture_path(pictures, sha) for sha in (key.sha256, key.reference)]
        if all(path.exists() for path in paths):
            picture, original = (pixels(Image.open(path)) for path in paths)
            row = _pixel_figures(key, picture, original)
            row.alone.update(_against_source(key, picture, sources))
            found.append(row)
    if scorer is not None:
        from vivace.measure.scorer import ClipScorer

        clip = _read_under_limits(ClipScorer, Path(scorer.folder), device, report)
        report({"event": "phase", "phase": "scoring images", "done": 0})
        _add_scores(found, pictures, clip, PROMPT_SETS[scorer.others], sources)
        if scorer.witness is not None:
            from vivace.measure.witness import Witness

            witness = _read_under_limits(Witness, Path(scorer.witness), device, report)
            report({"event": "phase", "phase": "asking the second witness", "done": 0})
            _add_witness(found, pictures, witness, PROMPT_SETS[scorer.others])
    if lpips:
        _add_lpips(found, pictures, device)
    return found


def _read_under_limits(
    kind: Callable[[Path, str], Model], folder: Path, device: str, report: Callable[[dict[str, Any]], None]
) -> Model:
    """Read a model that scores images. The launcher holds this process to limits if the model is somebody else's."""
    limits = None if folder.parent == WEIGHTS else asdict(Limits.of_weights_in(folder))
    report({"event": "phase", "phase": "reading the scorer", "done": 0, "limits": limits})
    return kind(folder, device)


def _pixel_figures(key: FiguresKey, picture: np.ndarray, original: np.ndarray) -> PictureFigures:
    from vivace.measure.quality import paired_metrics, picture_metrics

    against: dict[str, float] = {}
    reason = None
    if not key.is_reference:
        try:
            against = paired_metrics(picture, original)
        except ValueError as error:
            reason = str(error)
        if against.get("psnr_db") == float("inf"):
            # The same pixels in another PNG file; the store hashes files, not pixels.
            against, reason = {}, SAME_PIXELS
    return PictureFigures(**key.model_dump(), alone=picture_metrics(picture), against=against, reason=reason)


def _against_source(key: FiguresKey, picture: np.ndarray, sources: Path | None) -> dict[str, float]:
    """Return how an image compares with the picture that it was made from; empty for text."""
    from PIL import Image

    from vivace.measure.quality import match, outside_metrics, pixels

    if key.source is None or sources is None:
        return {}
    source = pixels(Image.open(picture_path(sources, key.source)))
    if key.mask is None:
        return {"source_match": match(picture, source)}
    return outside_metrics(picture, source, pixels(Image.open(picture_path(sources, key.mask))))


def _add_scores(
    rows: list[PictureFigures],
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
    images = [*(picture_path(pictures, sha) for sha in shas), *moved.values()]
    image_embeddings = dict(zip([*shas, *moved], _embedded(clip, images), strict=True))
    for row in rows:
        seen = image_embeddings[row.key if row.key in moved else row.sha256]
        row.alone["clip_score"] = 100 * float(seen @ prompt_embeddings[row.prompt])
        if row.is_reference:
            other_scores = [float(seen @ prompt_embeddings[p]) for p in others if p != row.prompt]
            row.alone["clip_score_of_others"] = 100 * float(np.mean(other_scores))
        elif not row.is_identical:
            row.against["clip_similarity"] = 100 * float(seen @ image_embeddings[row.reference])
    _add_similarities(
        rows, clip, lambda row: image_embeddings[row.key if row.key in moved else row.sha256], sources
    )


def _add_similarities(
    rows: list[PictureFigures], clip: ClipScorer, seen: Callable[[PictureFigures], Any], sources: Path | None
) -> None:
    """Add the similarity of images to the pictures that they were made from, in place.

    Args:
        seen: the embedding of a row's image.
    """
    import numpy as np

    shas = list(dict.fromkeys(row.source for row in rows if row.source is not None))
    if sources is None or not shas:
        return
    known = dict(zip(shas, _embedded(clip, [picture_path(sources, sha) for sha in shas]), strict=True))
    for row in rows:
        if row.source is None:
            continue
        row.alone["source_similarity"] = 100 * float(seen(row) @ known[row.source])
        strangers = [float(seen(row) @ known[sha]) for sha in shas if sha != row.source]
        if row.is_reference and strangers:
            row.alone["source_similarity_of_others"] = 100 * float(np.mean(strangers))


def _embedded(clip: ClipScorer, images: Sequence[Any]) -> Iterator[Any]:
    """Yield the embedding of each image, or image file, computed in batches."""
    from PIL import Image

    for start in range(0, len(images), _SCORER_BATCH):
        batch = images[start : start + _SCORER_BATCH]
        yield from clip.embed_pictures([Image.open(i) if isinstance(i, Path) else i for i in batch])


def _moved_back(row: PictureFigures, pictures: Path) -> Any:
    """Return the image without a shift by a pixel or two against its reference; None if there is none."""
    from PIL import Image

    from vivace.measure.quality import aligned, pixels

    picture, original = (
        pixels(Image.open(picture_path(pictures, sha))) for sha in (row.sha256, row.reference)
    )
    near = aligned(picture, original)
    return None if near is picture else Image.fromarray(near.astype("uint8"))


def _add_witness(rows: list[PictureFigures], pictures: Path, witness: Witness, others: Sequence[str]) -> None:
    """Add the second witness's scores to the rows, in place."""
    import numpy as np
    from PIL import Image

    for row in rows:
        strangers = [prompt for prompt in others if prompt != row.prompt] if row.is_reference else []
        own, *rest = witness.scores(Image.open(picture_path(pictures, row.sha256)), [row.prompt, *strangers])
        row.alone["witness_score"] = own
        if rest:
            row.alone["witness_score_of_others"] = float(np.mean(rest))


def _add_lpips(rows: list[PictureFigures], pictures: Path, device: str) -> None:
    """Add LPIPS to the rows, in place, for images that differ from a reference of the same size."""
    from PIL import Image

    from vivace.measure.lpips import Lpips
    from vivace.measure.quality import pixels

    network = Lpips(device)
    for row in rows:
        if "psnr_db" in row.against:
            pair = [pixels(Image.open(picture_path(pictures, sha))) for sha in (row.sha256, row.reference)]
            (row.against["lpips"],) = network.distances(pair[:1], pair[1:])


def _pictures_folder(store: Store) -> str:
    return str((store.folder / "pictures").absolute())
