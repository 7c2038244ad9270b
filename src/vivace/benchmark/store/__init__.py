"""The store: a folder with one SQLite file of rounds and a folder of images named by the hash of their content.

Each round is appended as soon as it ends (WAL, synchronous=FULL), so a stored round survives a SIGKILL and a power cut.
A round is identified by its trial's key and its index, so it cannot be stored twice.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from vivace.benchmark.rounds.schedule import comparable
from vivace.benchmark.store.compared import Compared, Purpose
from vivace.benchmark.store.compared import Invocation as Invocation
from vivace.benchmark.store.images import image_path
from vivace.errors import StoreError
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.figures import FiguresKey, ImageFigures, NoiseFloor, QualityPass
from vivace.foundation.spec.record import Outcome, Record, Round
from vivace.foundation.spec.trial import Model, Trial

_APPLICATION_ID = 0x76697661  # "viva"
_SCHEMA_VERSION = 5
_LOCKED_S = 30.0  # maximum wait for another process's lock
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
    keys TEXT NOT NULL,
    scorer TEXT,
    rounds INTEGER,
    purpose TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS figures (
    key TEXT PRIMARY KEY,
    row TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS noise_floors (
    key TEXT PRIMARY KEY,
    row TEXT NOT NULL
) STRICT;
"""
# Version 1 had no figures; version 2 stored them without prompt and scorer. They are computed again when next needed.
# Version 3 did not store the requested rounds of a run, version 4 not its purpose.
_UPGRADES = {
    2: ("DROP TABLE IF EXISTS figures", "ALTER TABLE runs ADD COLUMN scorer TEXT"),
    3: ("ALTER TABLE runs ADD COLUMN rounds INTEGER",),
    4: (
        "ALTER TABLE runs ADD COLUMN purpose TEXT",
        "UPDATE runs SET purpose = 'pairs' WHERE command LIKE 'vivace compare%'",
        "UPDATE runs SET purpose = iif(rounds > 1, 'final', 'screening') WHERE command LIKE 'vivace tune%'",
    ),
}


class Store:
    """Rounds, images and metrics in a folder. Allows one writer at a time, and readers at any time.

    Open it with `Store.create` (for writing) or `Store.read_only`.
    """

    def __init__(self, folder: Path, connection: sqlite3.Connection) -> None:
        self.folder = folder
        self._connection = connection

    @classmethod
    def create(cls, folder: Path) -> Store:
        """Open a store for writing; create it if there is none."""
        path = folder / "records.sqlite"
        if folder.exists() and not folder.is_dir():
            raise StoreError(f"the store {folder} is a file; give --store a folder")
        # List the folder only once: another process may be creating the store.
        entries = [each.name for each in folder.iterdir()] if folder.is_dir() else []
        if entries and not any(name.startswith(path.name) for name in entries):
            raise StoreError(
                f"{folder} is not empty and not a vivace store (no records.sqlite); give --store another folder"
            )
        with store_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK):
                raise StoreError(
                    f"the store {folder} is read-only; give --store a folder that can be written"
                )
            is_new = not path.exists() or path.stat().st_size == 0
            if not is_new:
                _check_is_store(path)
            connection = sqlite3.connect(path, timeout=_LOCKED_S, isolation_level=None)
            _enable_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            version = _SCHEMA_VERSION if is_new else connection.execute("PRAGMA user_version").fetchone()[0]
            if is_new or version < _SCHEMA_VERSION:
                _create_schema(connection, version)
            (folder / "pictures").mkdir(exist_ok=True)
            # Fail before anything is measured if the store can be opened but not written.
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
        return cls(folder, connection)

    @classmethod
    def read_only(cls, folder: Path) -> Store:
        """Open a store for reading."""
        path = folder / "records.sqlite"
        if not path.is_file():
            raise StoreError(
                f"no store at {folder} (no records.sqlite); `vivace bench` creates one; --store chooses the folder"
            )
        if _check_is_store(path) < _SCHEMA_VERSION:
            cls.create(folder).close()  # which upgrades it
        with store_errors(folder):
            connection = sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=_LOCKED_S)
        return cls(folder, connection)

    @property
    def images(self) -> str:
        return str((self.folder / "pictures").absolute())

    @property
    def sources(self) -> str:
        return str((self.folder / "sources").absolute())

    def close(self) -> None:
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_run(
        self,
        command: str,
        trials: list[Trial],
        environment: Environment,
        scorer: str | None = None,
        rounds: int | None = None,
        purpose: Purpose = Purpose.COMPARISON,
    ) -> Invocation:
        """Store a new invocation and its trials, the baseline first; return the invocation."""
        keys = self.add_trials(trials, environment)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        with self._transaction():
            self._connection.execute(
                "INSERT INTO runs (started_at, command, keys, scorer, rounds, purpose) VALUES (?, ?, ?, ?, ?, ?)",
                (started_at, command, json.dumps(keys), scorer, rounds, purpose.value),
            )
        return Invocation(started_at, command, keys, scorer, rounds, purpose)

    def add_trials(self, trials: Sequence[Trial], environment: Environment) -> tuple[str, ...]:
        """Store trials, so that rounds of them can be appended; return their keys."""
        keys = tuple(trial.key(environment) for trial in trials)
        with self._transaction():
            for key, trial in zip(keys, trials, strict=True):
                self._connection.execute(
                    "INSERT OR IGNORE INTO trials VALUES (?, ?, ?)",
                    (key, trial.model_dump_json(), environment.model_dump_json()),
                )
        return keys

    def environments(self, trial: Trial) -> list[Environment]:
        with store_errors(self.folder):
            rows = self._connection.execute(
                "SELECT environment FROM trials WHERE trial = ? ORDER BY rowid", (trial.model_dump_json(),)
            )
            return [Environment.model_validate_json(text) for (text,) in rows]

    def append(self, key: str, round_: Round) -> None:
        """Store a finished round durably. An earlier attempt at the same round is replaced."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)",
                (key, round_.index, round_.model_dump_json()),
            )

    def rounds(self, key: str) -> dict[int, Round]:
        with store_errors(self.folder):
            rows = self._connection.execute("SELECT row FROM rounds WHERE key = ? ORDER BY round", (key,))
            return {r.index: r for r in (Round.model_validate_json(text) for (text,) in rows)}

    def add_all(self, other: Store) -> None:
        """Add all that another store holds. Rounds that are here already are not added again.

        Where both have other rounds of one trial, all new ones get indices beyond those here, by the same distance, so
        that a recipe's stay paired with its baseline's.
        """
        with self._transaction():
            here, there = self._connection, other._connection
            for table, columns in (("trials", 3), ("figures", 2), ("noise_floors", 2)):
                marks = ", ".join("?" * columns)
                here.executemany(
                    f"INSERT OR IGNORE INTO {table} VALUES ({marks})", there.execute(f"SELECT * FROM {table}")
                )
            runs = "SELECT started_at, command, keys, scorer, rounds, purpose FROM runs ORDER BY id"
            old = set(here.execute(runs))
            here.executemany(
                "INSERT INTO runs (started_at, command, keys, scorer, rounds, purpose) VALUES (?, ?, ?, ?, ?, ?)",
                [run for run in there.execute(runs) if run not in old],
            )
            rounds = "SELECT key, round, row FROM rounds"
            own = {(key, index): row for key, index, row in here.execute(rounds)}
            known = {(key, row) for (key, _), row in own.items()}
            new = [each for each in there.execute(rounds) if (each[0], each[2]) not in known]
            shift = 0
            if any((key, index) in own for key, index, _ in new):
                shift = 1 + max(index for _, index in own)
            for key, index, row in new:
                if shift:
                    moved = Round.model_validate_json(row).model_copy(update={"index": index + shift})
                    row = moved.model_dump_json()
                here.execute("INSERT INTO rounds VALUES (?, ?, ?)", (key, index + shift, row))

    def contents(self) -> dict[str, set[tuple[str, ...]]]:
        """Return what identifies each run, round, figure and image."""
        columns = {"runs": "started_at, command, keys", "rounds": "key, row", "figures": "key"}
        with store_errors(self.folder):
            found = {
                table: {*self._connection.execute(f"SELECT {identity} FROM {table}")}
                for table, identity in columns.items()
            }
            files = [
                path for kind in ("pictures", "sources") for path in (self.folder / kind).glob("*/*.png")
            ]
            return found | {"images": {(str(path.relative_to(self.folder)),) for path in files}}

    def runs(self) -> list[Invocation]:
        with store_errors(self.folder):
            rows = self._connection.execute(
                "SELECT started_at, command, keys, scorer, rounds, purpose FROM runs ORDER BY id"
            )
            return [
                Invocation(
                    at, command, tuple(json.loads(keys)), by, rounds, Purpose(purpose or Purpose.COMPARISON)
                )
                for at, command, keys, by, rounds, purpose in rows
            ]

    def comparisons(self, *, repeated: bool = False) -> Iterator[Compared]:
        """Yield the comparisons, the newest first, those that were repeated or resumed only on request."""
        figures = self.figures()
        yielded: set[tuple[str, ...]] = set()
        for run in reversed(self.runs()):
            if run.keys in yielded and not repeated:
                continue
            yielded.add(run.keys)
            if records := comparable([self.record(key) for key in run.keys], run.rounds):
                quality = QualityPass(figures, run.scorer, self.noise_floor(run.keys[0]))
                yield Compared(tuple(records), quality, run)

    def goes_on(self, keys: Sequence[str]) -> bool:
        """Return whether the last run of these trials continues an interrupted one, with no other of the same baseline
        in between."""
        before = [run.keys for run in self.runs() if run.keys[0] == keys[0]]
        return before[-2:] == [tuple(keys)] * 2

    def record(self, key: str) -> Record | None:
        """Return the Record of a trial; None if no round of it is stored."""
        with store_errors(self.folder):
            row = self._connection.execute(
                "SELECT trial, environment FROM trials WHERE key = ?", (key,)
            ).fetchone()
        rounds = self.rounds(key)
        if row is None or not rounds:
            return None
        with store_errors(self.folder):
            return Record(
                trial=Trial.model_validate_json(row[0]),
                environment=Environment.model_validate_json(row[1]),
                rounds=tuple(rounds.values()),
            )

    def add_figures(self, rows: Sequence[ImageFigures]) -> None:
        """Store metrics of images; those with the same key are replaced."""
        with self._transaction():
            for row in rows:
                self._connection.execute(
                    "INSERT OR REPLACE INTO figures VALUES (?, ?)", (row.key.digest(), row.model_dump_json())
                )

    def figures(self) -> dict[FiguresKey, ImageFigures]:
        with store_errors(self.folder):
            rows = self._connection.execute("SELECT row FROM figures")
            figures = [ImageFigures.model_validate_json(text) for (text,) in rows]
            return {row.key: row for row in figures}

    def set_noise_floor(self, key: str, floor: NoiseFloor) -> None:
        """Store the noise floor of the baseline trial with that key; an earlier one is replaced."""
        with self._transaction():
            self._connection.execute(
                "INSERT OR REPLACE INTO noise_floors VALUES (?, ?)", (key, floor.model_dump_json())
            )

    def noise_floor(self, key: str) -> NoiseFloor | None:
        """Return the noise floor of the baseline trial with that key; None if there is none."""
        with store_errors(self.folder):
            row = self._connection.execute("SELECT row FROM noise_floors WHERE key = ?", (key,)).fetchone()
            return None if row is None else NoiseFloor.model_validate_json(row[0])

    def quality_pass(self, run: Invocation) -> QualityPass:
        return QualityPass(self.figures(), run.scorer, self.noise_floor(run.keys[0]))

    def image_path(self, sha256: str) -> Path:
        return image_path(self.folder / "pictures", sha256)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with store_errors(self.folder):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK")
                raise


def _enable_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Retry in a loop: SQLite's timeout does not apply to this lock where two processes create the same store."""
    deadline = time.monotonic() + _LOCKED_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.005)


def _create_schema(connection: sqlite3.Connection, version: int) -> None:
    """Create or upgrade the tables in one transaction. Safe if two processes do it at the same time."""
    connection.execute("BEGIN IMMEDIATE")
    if (
        version < _SCHEMA_VERSION
        and connection.execute("PRAGMA user_version").fetchone()[0] == _SCHEMA_VERSION
    ):
        connection.execute("ROLLBACK")
        return
    upgrades = [s for old, statements in _UPGRADES.items() if 0 < version <= old for s in statements]
    for statement in [*upgrades, *(s for s in _SCHEMA.split(";") if s.strip())]:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
    connection.execute("COMMIT")


def _check_is_store(path: Path) -> int:
    """Return the format of a store's file, which is not changed. An empty database (killed during creation) passes."""
    folder = path.parent
    try:
        with contextlib.closing(
            sqlite3.connect(path.absolute().as_uri() + "?mode=ro", uri=True, timeout=_LOCKED_S)
        ) as probe:
            # One transaction, since another process may be creating the store.
            probe.isolation_level = None
            probe.execute("BEGIN")
            application = probe.execute("PRAGMA application_id").fetchone()[0]
            version = probe.execute("PRAGMA user_version").fetchone()[0]
            tables = {
                name for (name,) in probe.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
    except sqlite3.DatabaseError as error:
        raise StoreError(
            f"{path} cannot be read as a vivace store ({error}); it was not changed. Give --store another folder"
        ) from None
    if not tables and application in (0, _APPLICATION_ID):
        return int(version)
    if application != _APPLICATION_ID:
        raise StoreError(
            f"{path} is another program's database; it was not changed. Give --store another folder"
        )
    if version > _SCHEMA_VERSION:
        raise StoreError(
            f"the store {folder} was written by a newer vivace (format {version}); update vivace"
        )
    if not {"trials", "rounds", "runs"} <= tables:
        raise StoreError(f"the store {folder} is damaged: tables are missing. Give --store another folder")
    return int(version)


@contextlib.contextmanager
def store_errors(folder: Path) -> Iterator[None]:
    """Turn errors of SQLite and the file system into StoreErrors that say what to do."""
    try:
        yield
    except StoreError:
        raise
    except sqlite3.OperationalError as error:
        text = str(error)
        if "full" in text:
            problem = (
                "the disk is full; free some space and run the same command again, finished rounds are kept"
            )
        elif "readonly" in text or "unable to open" in text:
            problem = "it cannot be written; check its permissions, or give --store another folder"
        elif "locked" in text:
            problem = "another vivace is writing to it; wait for that, or give --store another folder"
        else:
            problem = text
        raise StoreError(f"the store {folder}: {problem}") from error
    except sqlite3.DatabaseError as error:
        raise StoreError(f"the store {folder} is damaged ({error}); give --store another folder") from error
    except (ValidationError, json.JSONDecodeError) as error:
        first = str(error).splitlines()[0]
        raise StoreError(f"the store {folder} holds a row that this vivace cannot read ({first})") from error
    except OSError as error:
        raise StoreError(f"the store {folder}: {error.strerror or error}") from error


def proving_records(folder: Path, model: Model, recipe: str) -> tuple[Record, ...]:
    """Return the baseline's record and the recipe's (its canonical text) from the newest run that measured both; else
    nothing."""
    if not (folder / "records.sqlite").is_file():
        return ()
    with Store.read_only(folder) as store:
        for compared in store.comparisons(repeated=True):
            records = compared.records
            own = [r for r in records[1:] if r.trial.model == model and r.trial.recipe.text == recipe]
            if own and records[0].outcome is own[0].outcome is Outcome.MEASURED:
                return records[0], own[0]
    return ()
