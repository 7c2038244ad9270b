"""The folder of one proof: the images as received, by content, and a JSON line for each.

An interrupted run goes on, since each image is kept at once. After a complete run the same command begins anew, since a
server may draw other images tomorrow; with `reuse` the old images are used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from vivace.errors import StoreError
from vivace.foundation.untrusted.destinations import replace, write_new
from vivace.foundation.untrusted.files import parse_json, read_bytes
from vivace.proofs.sides.side import DrawingFailure, DrawJob, DrawnImage

Letter = Literal["a", "b"]
_LINES = "drawn.jsonl"
_ENDED = "ended"
_LOADS = {"a": "loads_a.json", "b": "loads_b.json"}
_IMAGE = re.compile(r"[0-9a-f]{64}\.\w+")
_MAX_BYTES = 500_000_000


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
    """The images of both sides. `since` is the time of the first, `num_resumed` the number drawn by earlier runs.

    Args:
        folder: of all proofs.
        identity: of the comparison: both sides and their settings.
        reuse: use the images of a complete run.

    Raises:
        StoreError: it cannot be written or read.
    """

    def __init__(self, folder: Path, identity: str, reuse: bool = False) -> None:
        self.folder = folder / hashlib.sha256(identity.encode()).hexdigest()[:16]
        try:
            (self.folder / "images").mkdir(parents=True, exist_ok=True)
            if (self.folder / _ENDED).exists() and not reuse:
                self._clear()
            (self.folder / _ENDED).unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(f"--store {folder} cannot be written: {error.strerror or error}") from error
        replace(self.folder / "proof.json", (identity + "\n").encode())
        self.since = ""
        self.reload()
        self.num_resumed = sum(image.path is not None for image in self._images.values())

    def image(self, side: Letter, job: DrawJob) -> KeptImage | None:
        """Return an image, or the reason why there is none; None if it was never tried."""
        return self._images.get(_key(side, job))

    def is_drawn(self, side: Letter, job: DrawJob) -> bool:
        image = self.image(side, job)
        return image is not None and image.path is not None

    def keep(self, side: Letter, job: DrawJob, image: DrawnImage) -> None:
        names = ("suffix", "seconds", "faults", "notes", "settings")
        about = {name: getattr(image, name) for name in names}
        self._append(side, job, {"sha256": self.keep_file(image).sha256} | about)

    def keep_file(self, image: DrawnImage) -> KeptImage:
        """Store only the file of an image that is drawn anew each time."""
        sha256 = hashlib.sha256(image.content).hexdigest()
        path = self._path(sha256, image.suffix)
        write_new(path, image.content)
        return KeptImage(path, sha256, image.seconds, image.faults, image.notes)

    def keep_failure(self, side: Letter, job: DrawJob, failure: DrawingFailure) -> None:
        """Store the reason why an image was not drawn; a later run tries again."""
        self._append(side, job, {"reason": str(failure), "request": failure.request})

    def loads_file(self, side: Letter) -> Path:
        return self.folder / _LOADS[side]

    def reload(self) -> None:
        """Read the entries that another process has stored."""
        self._images: dict[str, KeptImage] = {}
        for line in self._lines():
            self.since = self.since or str(line.get("at", ""))
            image = self._kept(line)
            if image.path is None or image.path.is_file():
                self._images[line["key"]] = image

    def end(self) -> None:
        replace(self.folder / _ENDED, f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}\n".encode())

    def _append(self, side: Letter, job: DrawJob, fields: dict[str, Any]) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        line: dict[str, Any] = {"key": _key(side, job), "at": at} | fields
        content = (json.dumps(line) + "\n").encode()
        try:
            with (self.folder / _LINES).open("ab") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"{self.folder} cannot be written: {error.strerror or error}") from error
        self._images[line["key"]] = self._kept(json.loads(content))

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the entries. An incomplete last line, as an interruption leaves it, is dropped from the file."""
        path = self.folder / _LINES
        if not path.exists():
            return
        try:
            content = read_bytes(path, _MAX_BYTES)
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                replace(path, whole)
            for text in whole.splitlines():
                line = parse_json(text)
                if not isinstance(line, dict) or not isinstance(line.get("key"), str):
                    raise ValueError("a line is not a record of an image")
                yield line
        except (OSError, ValueError) as error:
            raise StoreError(f"{path} cannot be read: {error}; remove its folder to begin anew") from error

    def _kept(self, line: dict[str, Any]) -> KeptImage:
        if "sha256" not in line:
            return KeptImage(None, reason=str(line.get("reason")), request=str(line.get("request", "")))
        sha256, suffix = str(line["sha256"]), str(line["suffix"])
        faults, notes = tuple(line["faults"]), tuple(line["notes"])
        path = self._path(sha256, suffix)
        return KeptImage(path, sha256, line["seconds"], faults, notes, settings=line.get("settings"))

    def _path(self, sha256: str, suffix: str) -> Path:
        return self.folder / "images" / f"{Path(sha256).name}{Path(suffix).name}"

    def _clear(self) -> None:
        """Remove the files of this class, and nothing else."""
        for path in (self.folder / "images").iterdir():
            if _IMAGE.fullmatch(path.name):
                path.unlink(missing_ok=True)
        for name in (_LINES, *_LOADS.values()):
            (self.folder / name).unlink(missing_ok=True)


def _key(side: Letter, job: DrawJob) -> str:
    return json.dumps([side, job.prompt, job.seed, asdict(job.settings), job.repeat], ensure_ascii=False)


def file_digest(path: Path) -> str:
    """Return a suffix of a side's identity: which content the file that defines it has; "" if there is none."""
    return f"@{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" if path.is_file() else ""
