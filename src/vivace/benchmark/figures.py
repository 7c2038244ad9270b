"""The quality pass: figures of every picture, computed after all timing is done, kept by the pictures' contents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vivace.benchmark.launcher import Launcher, last_line
from vivace.benchmark.store import Store, picture_path
from vivace.errors import WorkerError
from vivace.spec.figures import PictureFigures
from vivace.spec.record import Record

_TIMEOUT_S = 3600.0


def pairs_of(records: Sequence[Record]) -> list[tuple[str, str]]:
    """(picture, reference) of every picture whose prompt and seed the first record, the baseline, has drawn too."""
    if not records:
        return []
    references = {(p.prompt, p.seed): p.sha256 for p in records[0].rounds[0].pictures}
    found = {
        (picture.sha256, references[picture.prompt, picture.seed]): None
        for record in records
        for picture in record.rounds[0].pictures
        if (picture.prompt, picture.seed) in references
    }
    return list(found)


def add_figures(records: Sequence[Record], store: Store, launcher: Launcher) -> int:
    """Compute and store the figures that are not stored yet; returns how many pictures that were.

    The work is done in a worker, so that this process imports no torch.
    """
    known = store.figures()
    todo = [pair for pair in pairs_of(records) if pair not in known]
    if not todo:
        return 0
    request = {"kind": "figures", "pictures": str((store.folder / "pictures").absolute()), "pairs": todo}
    ending = launcher.run(request, _TIMEOUT_S)
    if ending.value is None:
        raise WorkerError(f"the quality pass failed: {last_line(ending.log) or ending}")
    store.add_figures([PictureFigures.model_validate(row) for row in ending.value["figures"]])
    return len(todo)


def compute_figures(pictures: Path, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Figures of (picture, reference) pairs below the folder `pictures`. Pictures that are gone are left out."""
    from PIL import Image

    from vivace.measure.quality import paired_metrics, picture_metrics, pixels

    found = []
    for sha256, reference in pairs:
        paths = [picture_path(pictures, sha) for sha in (sha256, reference)]
        if not all(path.exists() for path in paths):
            continue
        picture, original = (pixels(Image.open(path)) for path in paths)
        against: dict[str, float] = {}
        reason = None
        if sha256 != reference:
            try:
                against = paired_metrics(picture, original)
            except ValueError as error:
                reason = str(error)
            if against.get("psnr_db") == float("inf"):
                # The same pixels in another file; the store names files, not pixels, by content.
                against, reason = {}, "the same pixels"
        row = PictureFigures(
            sha256=sha256, reference=reference, alone=picture_metrics(picture), against=against, reason=reason
        )
        found.append(row.model_dump(mode="json"))
    return found
