"""The baseline's images that a witness is calibrated on: drawn once, kept as files, and continued after an
interruption."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vivace.errors import StoreError, UsageError
from vivace.foundation.stats import MIN_GROUPS
from vivace.foundation.untrusted.destinations import replace

if TYPE_CHECKING:
    from vivace.runtime.request import CheckedRequest

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
