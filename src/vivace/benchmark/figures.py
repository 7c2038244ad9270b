"""The quality pass, after all timing: the noise floor's pictures, and figures of every picture, kept by content."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from vivace.benchmark.launcher import Launcher, ask, last_line
from vivace.benchmark.requests import FiguresRequest, PicturesRequest, Scorer
from vivace.benchmark.store import Store, picture_path
from vivace.errors import RecipeError
from vivace.models.prompts import PROMPT_SETS
from vivace.models.scorers import FoundScorer
from vivace.recipes.recipe import Recipe
from vivace.recipes.resolve import resolve
from vivace.spec.figures import SAME_PIXELS, FiguresKey, NoiseFloor, PictureFigures
from vivace.spec.record import Record
from vivace.spec.trial import Trial

_TIMEOUT_S = 3600.0
_AT_ONCE = (
    256  # pictures whose figures are computed before they are stored: an interrupted pass keeps the rest
)
_BATCH = 32  # pictures that the scorer sees together
# What should not matter to a picture, the surest first: arithmetic in another order.
_HARMLESS = ("attention(math)", "channels_last")
_MAX_FLOOR_PICTURES = 13


def keys_of(records: Sequence[Record], floor: NoiseFloor | None, scorer: str | None) -> list[FiguresKey]:
    """A key for every picture whose prompt and seed the first record, the baseline, has drawn too."""
    if not records:
        return []
    references = {(p.prompt, p.seed): p.sha256 for p in records[0].rounds[0].pictures}
    drawn = [p for record in records for p in record.rounds[0].pictures]
    drawn += floor.pictures if floor is not None else ()
    found = {
        FiguresKey(
            sha256=p.sha256, reference=references[p.prompt, p.seed], prompt=p.prompt, scorer=scorer
        ): None
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
) -> int:
    """Compute and store the figures that are not stored yet; returns how many pictures that were.

    The work is done in a worker, so that this process imports no torch.
    """
    known = store.figures()
    floor = store.noise_floor(records[0].trial.key(records[0].environment)) if records else None
    wanted = keys_of(records, floor, scorer.id if scorer else None)
    todo = [key for key in wanted if key not in known or (lpips and _lacks_lpips(known[key]))]
    for start in range(0, len(todo), _AT_ONCE):
        request = FiguresRequest(
            pictures=_pictures(store),
            keys=tuple(todo[start : start + _AT_ONCE]),
            scorer=None if scorer is None else Scorer(folder=str(scorer.folder), others=scorer.prompt_set),
            device=device,
            lpips=lpips,
            threads=threads,
        )
        found = ask(launcher, request, _TIMEOUT_S)
        store.add_figures([PictureFigures.model_validate(row) for row in found["figures"]])
    return len(todo)


def _lacks_lpips(row: PictureFigures) -> bool:
    return "psnr_db" in row.against and "lpips" not in row.against


def draw_noise_floor(baseline: Record, store: Store, launcher: Launcher, threads: int | None) -> int:
    """Draw the baseline's first pictures once more with a harmless change; returns how many were drawn now.

    What cannot be had is stored with its reason: a report then says why it shows no floor.
    """
    key = baseline.trial.key(baseline.environment)
    if store.noise_floor(key) is not None or not baseline.rounds[0].pictures:
        return 0
    floor = NoiseFloor(
        recipe=baseline.trial.recipe.text, reason="no harmless change applies to this baseline"
    )
    for change in _HARMLESS:
        try:
            recipe = Recipe.from_spec(baseline.trial.recipe).with_(*resolve(change))
        except RecipeError:
            continue  # the baseline has set this itself
        request = PicturesRequest(
            trial=baseline.trial.model_copy(update={"recipe": recipe.spec}),
            pictures=_pictures(store),
            number=_MAX_FLOOR_PICTURES,
            threads=threads,
        )
        ending = launcher.run(request, _TIMEOUT_S)
        # Out of memory, say: the recipes' rows stand all the same.
        found = ending.value or {"reason": f"drawing it failed: {last_line(ending.log) or ending}"}
        floor = NoiseFloor(recipe=recipe.text, **found)
        if floor.reason is None:
            break
    store.set_noise_floor(key, floor)
    return len(floor.pictures)


def draw_pictures(trial: Trial, number: int, pictures: Path) -> dict[str, Any]:
    """In the worker: the first pictures of a trial, untimed, as the fields of a NoiseFloor."""
    from vivace.benchmark.round import draw_untimed, explain

    try:
        drawn = draw_untimed(trial, number, pictures)
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
) -> list[PictureFigures]:
    """In the worker: figures of the pictures below the folder `pictures`. Pictures that are gone are left out.

    Args:
        scorer: folder of a CLIP model, and the name of the prompt set whose prompts stand for other prompts.
        device: where the scorer runs.
    """
    from PIL import Image

    from vivace.measure.quality import pixels

    found = []
    for key in keys:
        paths = [picture_path(pictures, sha) for sha in (key.sha256, key.reference)]
        if all(path.exists() for path in paths):
            found.append(_of_pixels(key, *(pixels(Image.open(path)) for path in paths)))
    if scorer is not None:
        _add_scores(found, pictures, Path(scorer.folder), PROMPT_SETS[scorer.others], device)
    if lpips:
        _add_lpips(found, pictures, device)
    return found


def _of_pixels(key: FiguresKey, picture: Any, original: Any) -> PictureFigures:
    from vivace.measure.quality import paired_metrics, picture_metrics

    against: dict[str, float] = {}
    reason = None
    if not key.is_reference:
        try:
            against = paired_metrics(picture, original)
        except ValueError as error:
            reason = str(error)
        if against.get("psnr_db") == float("inf"):
            # The same pixels in another file; the store names files, not pixels, by content.
            against, reason = {}, SAME_PIXELS
    return PictureFigures(**key.model_dump(), alone=picture_metrics(picture), against=against, reason=reason)


def _add_scores(
    rows: list[PictureFigures], pictures: Path, folder: Path, others: Sequence[str], device: str
) -> None:
    """CLIP's figures, written into the rows' own mappings."""
    import numpy as np
    from PIL import Image

    from vivace.measure.scorer import ClipScorer

    clip = ClipScorer(folder, device)
    prompts = list(dict.fromkeys([*(row.prompt for row in rows), *others]))
    said = dict(zip(prompts, clip.embed_prompts(prompts), strict=True))
    shas = list(dict.fromkeys(sha for row in rows for sha in (row.sha256, row.reference)))
    seen: dict[str, Any] = {}
    for start in range(0, len(shas), _BATCH):
        some = shas[start : start + _BATCH]
        images = [Image.open(picture_path(pictures, sha)) for sha in some]
        seen |= dict(zip(some, clip.embed_pictures(images), strict=True))
    for row in rows:
        row.alone["clip_score"] = 100 * float(seen[row.sha256] @ said[row.prompt])
        if row.is_reference:
            theirs = [float(seen[row.sha256] @ said[p]) for p in others if p != row.prompt]
            row.alone["clip_score_of_others"] = 100 * float(np.mean(theirs))
        elif not row.is_identical:
            row.against["clip_similarity"] = 100 * float(seen[row.sha256] @ seen[row.reference])


def _add_lpips(rows: list[PictureFigures], pictures: Path, device: str) -> None:
    """LPIPS of the pictures that differ from a reference of the same size, written into the rows' own mappings."""
    from PIL import Image

    from vivace.measure.lpips import Lpips
    from vivace.measure.quality import pixels

    network = Lpips(device)
    for row in rows:
        if "psnr_db" in row.against:
            pair = [pixels(Image.open(picture_path(pictures, sha))) for sha in (row.sha256, row.reference)]
            (row.against["lpips"],) = network.distances(pair[:1], pair[1:])


def _pictures(store: Store) -> str:
    return str((store.folder / "pictures").absolute())
