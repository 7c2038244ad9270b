"""The quality pass, after all timing: generate the noise floor's images and compute the metrics of every image."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from vivace.benchmark.progress import Deadline, is_over, limit_s
from vivace.benchmark.rounds.worker_requests import FiguresRequest, ImagesRequest, Scorer, ask
from vivace.benchmark.store import Store
from vivace.benchmark.store.images import image_path
from vivace.errors import RecipeError, WorkerError
from vivace.foundation.processes.launcher import Launcher, last_line
from vivace.foundation.spec.figures import FiguresKey, ImageFigures, NoiseFloor, key_of
from vivace.foundation.spec.record import Record
from vivace.models.find import WEIGHTS
from vivace.models.prompts import PROMPT_SETS
from vivace.models.reading_limits import ReadingLimits
from vivace.models.scorers import LocatedScorer
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve

Model = TypeVar("Model")
OnProgress = Callable[[str, int, int], None]
_TIMEOUT_S = 3600.0
_CHUNK = 256  # images per request; each chunk is stored, so an interrupted pass keeps those before
_CHUNK_IN_A_HURRY = 64  # where a deadline may stop one
# Changes that only reorder arithmetic, tried in this order.
_HARMLESS = ("attention(math)", "channels_last")
_MAX_FLOOR_IMAGES = 13


def keys_of(records: Sequence[Record], floor: NoiseFloor | None, scorer: str | None) -> list[FiguresKey]:
    """Return a key for every image, the noise floor's included, whose prompt and seed the baseline, the first record,
    has too."""
    if not records:
        return []
    references = {(p.prompt, p.seed): p.sha256 for p in records[0].rounds[0].pictures}
    drawn = [p for record in records for p in record.rounds[0].pictures]
    drawn += floor.pictures if floor is not None else ()
    workload = records[0].trial.workload
    keys = {
        key_of(p, references[p.prompt, p.seed], workload, scorer): None
        for p in drawn
        if (p.prompt, p.seed) in references
    }
    return list(keys)


def add_figures(
    records: Sequence[Record],
    store: Store,
    launcher: Launcher,
    scorer: LocatedScorer | None,
    device: str,
    threads: int | None,
    lpips: bool = False,
    on_progress: OnProgress = lambda what, done, total: None,
    deadline: Deadline | None = None,
) -> int:
    """Compute in a worker the metrics that are not stored yet, until the deadline; return the number of images."""
    stored = store.figures()
    floor = store.noise_floor(records[0].trial.key(records[0].environment)) if records else None
    keys = keys_of(records, floor, scorer.id if scorer else None)
    todo = [key for key in keys if key not in stored or _lacks(stored[key], "lpips" if lpips else "match")]
    chunk = _CHUNK if deadline is None else _CHUNK_IN_A_HURRY
    for start in range(0, len(todo), chunk):
        request = FiguresRequest(
            pictures=store.images,
            keys=tuple(todo[start : start + chunk]),
            scorer=None if scorer is None else Scorer.of(scorer),
            device=device,
            lpips=lpips,
            threads=threads,
            sources=store.sources,
        )

        def on_event(event: dict[str, Any], done: int = start) -> None:
            if event["event"] == "phase":  # others are the worker's own
                on_progress(event["phase"], done + event["done"], len(todo))

        on_progress("comparing images", start, len(todo))
        what = None if scorer is None else f"the scorer {scorer.name}"
        try:
            answer = ask(launcher, request, limit_s(_TIMEOUT_S, deadline), on_event, reads=what)
        except WorkerError:
            if is_over(deadline):
                return start
            raise
        store.add_figures([ImageFigures.model_validate(row) for row in answer["figures"]])
    return len(todo)


def _lacks(row: ImageFigures, figure: str) -> bool:
    """Whether an image was compared without this figure; stores of older versions lack "hole" and thumbnails."""
    return row.thumbnail is None or (
        "psnr_db" in row.against and not {"match", "hole", figure} <= row.against.keys()
    )


def draw_noise_floor(
    baseline: Record,
    store: Store,
    launcher: Launcher,
    threads: int | None,
    on_progress: OnProgress = lambda what, done, total: None,
    deadline: Deadline | None = None,
) -> int:
    """Generate the baseline's first images again with a harmless change; return the number of new images. If there is
    none, the reason is stored."""
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
        request = ImagesRequest(
            trial=baseline.trial.model_copy(update={"recipe": recipe.spec}),
            pictures=store.images,
            number=_MAX_FLOOR_IMAGES,
            threads=threads,
            sources=store.sources,
        )

        def on_event(event: dict[str, Any]) -> None:
            if event.get("phase") == "pictures":
                on_progress("drawing the noise floor", event["done"], event["of"])

        on_progress("drawing the noise floor", 0, min(_MAX_FLOOR_IMAGES, baseline.trial.workload.num_images))
        ending = launcher.run(request, limit_s(_TIMEOUT_S, deadline), on_event)
        if ending.timed_out and is_over(deadline):
            return 0
        # A failure here, such as out of memory, must not discard the recipes' rows.
        drawn = ending.value or {"reason": f"generating it failed: {last_line(ending.log) or ending}"}
        floor = NoiseFloor(recipe=recipe.text, **drawn)
        if floor.reason is None:
            break
    store.set_noise_floor(key, floor)
    return len(floor.pictures)


def compute_figures(
    images: Path,
    keys: Iterable[FiguresKey],
    scorer: Scorer | None,
    device: str,
    lpips: bool = False,
    report: Callable[[dict[str, Any]], None] = lambda event: None,
    sources: Path | None = None,
) -> list[ImageFigures]:
    """Return the metrics of images in the store's folder; missing images are left out. Runs in the worker."""
    from PIL import Image

    from vivace.measure.figures import FigureSet
    from vivace.measure.scorer import ClipScorer, FunctionScorer, Witness

    def read_source(sha256: str) -> Any:
        assert sources is not None
        return Image.open(image_path(sources, sha256))

    figures = FigureSet(
        lambda sha256: Image.open(image_path(images, sha256)), None if sources is None else read_source
    )
    for done, key in enumerate(keys):
        report({"event": "phase", "phase": "comparing images", "done": done})
        if all(image_path(images, sha).exists() for sha in (key.sha256, key.reference)):
            figures.add(key)
    if scorer is not None:
        strangers = PROMPT_SETS[scorer.others]

        def others(prompt: str) -> list[str]:
            return [other for other in strangers if other != prompt]

        folder = Path(scorer.folder)
        if scorer.function is not None:
            figures.add_scores(FunctionScorer(scorer.function, folder), others)
        else:
            clip = _read_under_limits(ClipScorer, folder, device, report)
            report({"event": "phase", "phase": "scoring images", "done": 0})
            figures.add_scores(clip, others)
        if scorer.witness is not None:
            witness = _read_under_limits(Witness, Path(scorer.witness), device, report)
            report({"event": "phase", "phase": "asking the second witness", "done": 0})
            figures.add_witness(witness, others)
    if lpips:
        figures.add_lpips(device)
    return figures.rows


def _read_under_limits(
    kind: Callable[[Path, str], Model], folder: Path, device: str, report: Callable[[dict[str, Any]], None]
) -> Model:
    """Read a model that scores images. The launcher limits this process if the model is not vivace's own."""
    limits = None if folder.parent == WEIGHTS else asdict(ReadingLimits.of_weights_in(folder))
    report({"event": "phase", "phase": "reading the scorer", "done": 0, "limits": limits})
    return kind(folder, device)
