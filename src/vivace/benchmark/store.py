"""The store: a folder with one SQLite file of rounds and a folder of pictures named by their content.

Each round is appended the moment it ends (WAL, synchronous=FULL): what has been reported as stored survives a
SIGKILL and a power cut. A round's identity is its trial's key and its index, so it can never be doubled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from vivace.errors import StoreError
from vivace.spec.environment import Environment
from vivace.spec.figures import PictureFigures
from vivace.spec.record import Record, Round
from vivace.spec.trial import Trial

DEFAULT_STORE = ".vivace"
_APPLICATION_ID = 0x76697661  # "viva"
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS trials (
    key TEXT PRIMARY KEY,
    trial TEXT NOT NULL,
    environment TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS rounds (
    key TEXT NOT NULL REFERENCES trials (key),
    round INTEGER NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (key, round)
) STRICT;
CREATE TABLE IF NOT EXISTS runs (
    id INTEGER PRIMARY KEY,
    started_at TEXT NOT NULL,
    command TEXT NOT NULL,
    keys TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS figures (
    sha256 TEXT NOT NULL,
    reference TEXT NOT NULL,
    row TEXT NOT NULL,
    PRIMARY KEY (sha256, reference)
) STRICT;
"""


class Run:
    """One invocation: its command line, and its trials' keys in order, the baseline first."""

    def __init__(self, started_at: str, command: str, keys: tuple[str, ...]) -> None:
        self.started_at = started_at
        self.command = command
        self.keys = keys


class Store:
    """Open with `Store.create` (for writing) or `Store.read_only`. One writer at a time; readers any time."""

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection

    @classmethod
    def create(cls, folder: Path) -> Store:
        """Open for writing, making the folder if there is none.

        Raises:
            StoreError: not a store of ours, of a newer version, damaged, read-only, or no space.
        """
        path = folder / "records.sqlite"
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"the store {folder} is a file; give --store a folder")
        if folder.is_dir() and not path.exists() and any(folder.iterdir()):
            raise StoreError(
                f"{folder} is not empty and not a vivace store (no records.sqlite); give --store another folder"
            )
        with _explained(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise StoreError(
                    f"the store {folder} is read-only; give --store a folder that can be written"
                )
            is_new = not path.exists() or path.stat().st_size == 0
            if not is_new:
                _check_ours(path)
            connection = sqlite3.connect(path, timeout=30, isolation_level=None)
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            if is_new or connection.execute("PRAGMA user_version").fetchone()[0] < _SCHEMA_VERSION:
                _create_schema(connection)  # version 1 had no table of figures
            (folder / "pictures").mkdir(exist_ok=True)
            # A store that can be opened but not written must say so before anything is measured.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        return cls(folder, connection)

    @classmethod
    def read_only(cls, folder: Path) -> Store:
        """Open for reading.

        Raises:
            StoreError: there is none, or it is not ours or damaged.
        """
        path = folder / "records.sqlite"
        if not path.is_file():
            raise StoreError(
                f"no store at {folder} (no records.sqlite); `vivace bench` makes one, --store names it"
            )
        _check_ours(path)
        with _explained(folder):
            connection = sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=30)
        return cls(folder, connection)

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_run(self, command: str, trials: list[Trial], environment: Environment) -> None:
        """Note the command line and the order of its trials; the first is the baseline."""
        with self._transaction():
            for trial in trials:
                self._connection.execute(
                    "INSERT OR IGNORE INTO trials VALUES (?, ?, ?)",
                    (trial.key(environment), trial.model_dump_json(), environment.model_dump_json()),
                )
            keys = json.dumps([trial.key(environment) for trial in trials])
            self._connection.execute(
                "INSERT INTO runs (started_at, command, keys) VALUES (?, ?, ?)",
                (datetime.now(UTC).isoformat(timespec="seconds"), command, keys),
            )

    def append(self, key: str, round_: Round) -> None:
        """Store a finished round, durable on return. An earlier try of the same round is replaced."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)",
                (key, round_.index, round_.model_dump_json()),
            )

    def rounds(self, key: str) -> dict[int, Round]:
        """The stored rounds of a trial by index."""
        with _explained(self.folder):
            rows = self._connection.execute("SELECT row FROM rounds WHERE key = ? ORDER BY round", (key,))
            return {r.index: r for r in (Round.model_validate_json(text) for (text,) in rows)}

    def runs(self) -> list[Run]:
        """All invocations, the oldest first."""
        with _explained(self.folder):
            rows = self._connection.execute("SELECT started_at, command, keys FROM runs ORDER BY id")
            return [Run(at, command, tuple(json.loads(keys))) for at, command, keys in rows]

    def record(self, key: str) -> Record | None:
        """The Record of a trial, or None if no round of it is stored."""
        with _explained(self.folder):
            row = self._connection.execute(
                "SELECT trial, environment FROM trials WHERE key = ?", (key,)
            ).fetchone()
        rounds = self.rounds(key)
        if row is None or not rounds:
            return None
        with _explained(self.folder):
            return Record(
                trial=Trial.model_validate_json(row[0]),
                environment=Environment.model_validate_json(row[1]),
                rounds=tuple(rounds.values()),
            )

    def add_figures(self, rows: list[PictureFigures]) -> None:
        """Store figures of pictures; those of the same pair are replaced."""
        with self._transaction():
            for row in rows:
                self._connection.execute(
                    "INSERT OR REPLACE INTO figures VALUES (?, ?, ?)",
                    (row.sha256, row.reference, row.model_dump_json()),
                )

    def figures(self) -> dict[tuple[str, str], PictureFigures]:
        """All figures by (picture, reference); none from a store of version 1 that is only read."""
        with _explained(self.folder):
            if self._connection.execute("PRAGMA user_version").fetchone()[0] < 2:
                return {}
            rows = self._connection.execute("SELECT row FROM figures")
            found = [PictureFigures.model_validate_json(text) for (text,) in rows]
            return {(row.sha256, row.reference): row for row in found}

    def picture_path(self, sha256: str) -> Path:
        return picture_path(self.folder / "pictures", sha256)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with _explained(self.folder):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise


def picture_path(pictures: Path, sha256: str) -> Path:
    """Where a picture of that content lies below the folder `pictures`."""
    return pictures / sha256[:2] / f"{sha256}.png"


def save_picture(pictures: Path, png: bytes) -> str:
    """Write a PNG under its content's sha256, durable and never half-written; returns the sha256."""
    sha256 = hashlib.sha256(png).hexdigest()
    path = picture_path(pictures, sha256)
    if path.exists():
        return sha256
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(png)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return sha256


def _create_schema(connection: sqlite3.Connection) -> None:
    """All or nothing: a kill halfway leaves an empty file, which counts as new. Two may do it at once."""
    statements = [s for s in _SCHEMA.split(";") if s.strip()]
    connection.execute("BEGIN IMMEDIATE")
    for statement in statements:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check_ours(path: Path) -> None:
    """Look at a file without changing it; an empty one (a kill during creation) passes."""
    folder = path.parent
    try:
        with contextlib.closing(
            sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=30)
        ) as probe:
            application = probe.execute("PRAGMA application_id").fetchone()[0]
            version = probe.execute("PRAGMA user_version").fetchone()[0]
            tables = {
                name for (name,) in probe.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} cannot be read as a vivace store ({error}); it was left as it is. Give --store another folder"
        ) from None
    if not tables and application in (0, _APPLICATION_ID):
        return
    if application != _APPLICATION_ID:
        raise StoreError(
            f"{path} is another program's database; it was left as it is. Give --store another folder"
        )
    if version > _SCHEMA_VERSION:
        raise StoreError(
            f"the store {folder} was written by a newer vivace (format {version}); update vivace"
        )
    if not {"trials", "rounds", "runs"} <= tables:
        raise StoreError(f"the store {folder} is damaged: tables are missing. Give --store another folder")


@contextlib.contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what SQLite and the file system say into one clear message."""
    try:
        yield
    except StoreError:
        raise
    except sqlite3.OperationalError as error:
        text = str(error)
        if "full" in text:
            why = "the disk is full; free some space and run the same command again, finished rounds are kept"
        elif "readonly" in text or "unable to open" in text:
            why = "it cannot be written; check its permissions, or give --store another folder"
        elif "locked" in text:
            why = "another vivace is writing to it; wait for that, or give --store another folder"
        else:
            why = text
        raise StoreError(f"the store {folder}: {why}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the store {folder} is damaged ({error}); give --store another folder") from error
    except (ValidationError, json.JSONDecodeError) as error:
        first = str(error).splitlines()[0]
        raise StoreError(f"the store {folder} holds a row that this vivace cannot read ({first})") from error
    except OSError as error:
        raise StoreError(f"the store {folder}: {error.strerror or error}") from error
