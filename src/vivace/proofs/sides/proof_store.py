"""The folder of one proof: the images as received, by content, and a JSON file for each that was asked for.

An interrupted run goes on, since each image is kept at once. After a complete run the same command begins anew, since a
server may draw other images tomorrow; with `reuse` the old images are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vivace.errors import StoreError
from vivace.foundation.untrusted.destinations import replace, write_new
from vivace.foundation.untrusted.files import parse_json, read_bytes
from vivace.proofs.sides.side import DrawingFailure, DrawJob, DrawnImage

Letter = Literal["a", "b"]
_ENDED = "ended"
_LOADS = {"a": "loads_a.json", "b": "loads_b.json"}
_IMAGE = re.compile(r"[0-9a-f]{64}\.\w+")
_MAX_BYTES = 1_000_000


@dataclass(frozen=True)
class KeptImage:
    """An image and how it was drawn, or the reason why it was not, with the request."""

    path: Path | None
    sha256: str = ""
    seconds: float | None = None
    faults: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    reason: str = ""
    request: str = ""
    settings: dict[str, Any] | None = None


class ProofStore:
    """The images of both sides of one comparison. `since` is the time of the first, `num_resumed` the number drawn by
    earlier runs; `reuse` also uses the images of a complete run."""

    def __init__(self, folder: Path, identity: str, reuse: bool = False) -> None:
        self.folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
        self._images = self.folder / "images"
        try:
            self._images.mkdir(parents=True, exist_ok=True)
            if (self.folder / _ENDED).exists() and not reuse:
                self._clear()
            (self.folder / _ENDED).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"--store {folder} cannot be written: {error.strerror or error}") from error
        replace(self.folder / "proof.json", (identity + "\n").encode())
        drawn = [path for path in self._images.glob("*.json") if self._read(path).path is not None]
        self.num_resumed = len(drawn)
        first = min((path.stat().st_mtime for path in drawn), default=0.0)
        self.since = datetime.fromtimestamp(first, UTC).isoformat(timespec="seconds")

    def image(self, side: Letter, job: DrawJob) -> KeptImage | None:
        """Return an image, or the reason why there is none; None if it was never tried."""
        path = self._entry(side, job)
        return self._read(path) if path.exists() else None

    def is_drawn(self, side: Letter, job: DrawJob) -> bool:
        image = self.image(side, job)
        return image is not None and image.path is not None

    def keep(self, side: Letter, job: DrawJob, image: DrawnImage) -> None:
        kept = self.keep_file(image)
        names = ("suffix", "seconds", "faults", "notes", "settings")
        entry = {"sha256": kept.sha256} | {name: getattr(image, name) for name in names}
        replace(self._entry(side, job), json.dumps(entry).encode())

    def keep_file(self, image: DrawnImage) -> KeptImage:
        """Store only the file of an image that is drawn anew each time."""
        sha256 = hashlib.sha256(image.content).hexdigest()
        path = self._images / f"{sha256}{image.suffix}"
        write_new(path, image.content)
        return KeptImage(path, sha256, image.seconds, image.faults, image.notes)

    def keep_failure(self, side: Letter, job: DrawJob, failure: DrawingFailure) -> None:
        entry = {"reason": str(failure), "request": failure.request}
        replace(self._entry(side, job), json.dumps(entry).encode())

    def loads_file(self, side: Letter) -> Path:
        return self.folder / _LOADS[side]

    def end(self) -> None:
        replace(self.folder / _ENDED, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}\n".encode())

    def _entry(self, side: Letter, job: DrawJob) -> Path:
        key = json.dumps([side, job.prompt, job.seed, asdict(job.settings), job.repeat], ensure_ascii=False)
        return self._images / f"{hashlib.sha256(key.encode()).hexdigest()}.json"

    def _read(self, path: Path) -> KeptImage:
        try:
            entry = parse_json(read_bytes(path, _MAX_BYTES))
            if "sha256" not in entry:
                return KeptImage(None, reason=str(entry["reason"]), request=str(entry["request"]))
            name = f"{entry['sha256']}{entry['suffix']}"
            if not _IMAGE.fullmatch(name) or not (self._images / name).is_file():
                return KeptImage(None, reason="its file is gone")
            faults, notes = tuple(entry["faults"]), tuple(entry["notes"])
            return KeptImage(
                self._images / name,
                entry["sha256"],
                entry["seconds"],
                faults,
                notes,
                settings=entry["settings"],
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} cannot be read: {error}; remove its folder to begin anew") from error

    def _clear(self) -> None:
        for path in self._images.iterdir():
            if _IMAGE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for name in _LOADS.values():
            (self.folder / name).unlink(missing_ok=True)


def file_digest(path: Path) -> str:
    """Return a suffix of a side's identity: which content the file that defines it has; "" if there is none."""
    return f"@{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" if path.is_file() else ""
