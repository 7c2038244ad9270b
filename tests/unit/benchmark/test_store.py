"""The store keeps every acknowledged row, and never changes files that are not its own."""

import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.make import make_environment, make_round, make_trial
from vivace.benchmark.store import Store
from vivace.benchmark.store.compared import Purpose
from vivace.benchmark.store.images import image_path, save_image
from vivace.errors import StoreError
from vivace.foundation.spec.figures import NoiseFloor, QualityPass


def test_rounds_are_read_as_they_were_written(tmp_path: Path) -> None:
    trial, environment = make_trial("tiny_vae"), make_environment()
    key = trial.key(environment)
    with Store.create(tmp_path / "s") as store:
        store.start_run("vivace bench ...", [trial], environment)
        store.append(key, make_round(0))
        store.append(key, make_round(1, times=(2.0, 2.1, 2.2)))
    with Store.read_only(tmp_path / "s") as store:
        record = store.record(key)
        assert record is not None
        assert record.trial == trial
        assert record.environment == environment
        assert [r.index for r in record.rounds] == [0, 1]
        assert record.rounds[1] == make_round(1, times=(2.0, 2.1, 2.2))
        assert [run.command for run in store.runs()] == ["vivace bench ..."]
        assert store.runs()[0].keys == (key,)


def _as_version_1(connection: sqlite3.Connection) -> None:
    _as_version_3(connection)
    connection.execute("DROP TABLE noise_floors")
    connection.execute("ALTER TABLE runs DROP COLUMN scorer")
    connection.execute("DROP TABLE figures")


def _as_version_2(connection: sqlite3.Connection) -> None:
    _as_version_1(connection)
    connection.execute("CREATE TABLE figures (sha256 TEXT, reference TEXT, row TEXT) STRICT")
    connection.execute("INSERT INTO figures VALUES ('a', 'b', '{}')")


def _as_version_3(connection: sqlite3.Connection) -> None:
    _as_version_4(connection)
    connection.execute("ALTER TABLE runs DROP COLUMN rounds")


def _as_version_4(connection: sqlite3.Connection) -> None:
    connection.execute("ALTER TABLE runs DROP COLUMN purpose")


@pytest.mark.parametrize(
    ("version", "make_old"),
    [(1, _as_version_1), (2, _as_version_2), (3, _as_version_3), (4, _as_version_4)],
)
def test_a_store_of_an_earlier_format_is_read(
    tmp_path: Path, version: int, make_old: Callable[[sqlite3.Connection], None]
) -> None:
    trial, environment = make_trial("baseline"), make_environment()
    with Store.create(tmp_path) as store:
        store.start_run("x", [trial], environment)
        store.append(trial.key(environment), make_round(0))
    with sqlite3.connect(tmp_path / "records.sqlite") as connection:
        make_old(connection)
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with Store.read_only(tmp_path) as store:
        assert store.quality_pass(store.runs()[0]) == QualityPass()
        assert store.record(trial.key(environment)) is not None
    with Store.create(tmp_path) as store:
        assert store.figures() == {}
        store.start_run("y", [trial], environment, scorer="clip@1", rounds=2)
        store.set_noise_floor("k", NoiseFloor(recipe="attention(math)", reason="no"))
        assert [(run.scorer, run.rounds) for run in store.runs()] == [(None, None), ("clip@1", 2)]
        assert store.record(trial.key(environment)) is not None


@pytest.mark.parametrize(
    ("command", "rounds", "purpose"),
    [
        ("vivace bench", 2, Purpose.COMPARISON),
        ("vivace compare a b", 3, Purpose.PAIRS),
        ("vivace tune tiny-sd", 1, Purpose.SCREENING),
        ("vivace tune tiny-sd", 2, Purpose.FINAL),
    ],
)
def test_the_purpose_of_a_run_of_an_earlier_format_follows_from_its_command(
    tmp_path: Path, command: str, rounds: int, purpose: Purpose
) -> None:
    trial = make_trial("baseline")
    with Store.create(tmp_path) as store:
        store.start_run(command, [trial], make_environment(), rounds=rounds)
    with sqlite3.connect(tmp_path / "records.sqlite") as connection:
        _as_version_4(connection)
        connection.execute("PRAGMA user_version = 4")
    connection.close()
    with Store.read_only(tmp_path) as store:
        assert [run.purpose for run in store.runs()] == [purpose]
    with Store.create(tmp_path) as store:
        assert [run.purpose for run in store.runs()] == [purpose]


def test_a_repeated_run_is_compared_once(tmp_path: Path) -> None:
    trial, other, environment = make_trial("baseline"), make_trial("bf16"), make_environment()
    with Store.create(tmp_path) as store:
        for trials in ([trial], [trial, other], [trial]):
            store.start_run("x", trials, environment)
        store.append(trial.key(environment), make_round(0))
        store.append(other.key(environment), make_round(0))
        assert [len(compared.records) for compared in store.comparisons()] == [1, 2]
        assert [len(compared.records) for compared in store.comparisons(repeated=True)] == [1, 2, 1]


def test_a_round_is_never_stored_twice(tmp_path: Path) -> None:
    trial, environment = make_trial("baseline"), make_environment()
    key = trial.key(environment)
    with Store.create(tmp_path) as store:
        store.start_run("x", [trial], environment)
        store.append(key, make_round(0, times=(1.0,)))
        store.append(key, make_round(0, times=(5.0,)))
        assert [s.total_s for s in store.rounds(key)[0].samples] == [5.0]


def test_the_key_depends_on_trial_and_environment() -> None:
    environment = make_environment()
    other = environment.model_copy(update={"num_threads": 7})
    keys = {make_trial(r).key(e) for r in ("baseline", "tiny_vae") for e in (environment, other)}
    assert len(keys) == 4


def test_a_run_goes_on_with_the_one_before(tmp_path: Path) -> None:
    a, b, other = make_trial("baseline"), make_trial("bf16"), make_trial("baseline", model="tiny-flux")
    environment = make_environment()
    with Store.create(tmp_path) as store:
        keys = store.start_run("x", [a, b], environment).keys
        assert not store.goes_on(keys), "nothing came before"
        store.start_run("x", [other], environment)
        store.start_run("x", [a, b], environment)
        assert store.goes_on(keys)
        more = store.start_run("x", [a, b, make_trial("steps(20)")], environment).keys
        assert not store.goes_on(more), "a recipe was added"
        store.start_run("x", [a, b], environment)
        assert not store.goes_on(keys), "another comparison came between them"


def test_a_foreign_database_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE notes (text TEXT)")
    connection.close()
    before = path.read_bytes()
    for open_store in (Store.create, Store.read_only):
        with pytest.raises(StoreError, match="another program's database"):
            open_store(tmp_path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["records.sqlite"]


def test_a_file_that_is_not_a_database_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "records.sqlite"
    path.write_text("my diary\n" * 1000)
    for open_store in (Store.create, Store.read_only):
        with pytest.raises(StoreError, match="cannot be read as a vivace store"):
            open_store(tmp_path)
    assert path.read_text() == "my diary\n" * 1000


def test_reading_a_missing_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store.read_only(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_damaged_store(tmp_path: Path) -> None:
    with Store.create(tmp_path) as store:
        store.start_run("x", [make_trial("baseline")], make_environment())
    path = tmp_path / "records.sqlite"
    content = path.read_bytes()
    path.write_bytes(content[:4096] + b"\xff" * (len(content) - 4096))
    with pytest.raises(StoreError, match=r"damaged|cannot be read"), Store.create(tmp_path) as store:
        store.runs()


def test_a_store_of_a_newer_version(tmp_path: Path) -> None:
    Store.create(tmp_path).close()
    with sqlite3.connect(tmp_path / "records.sqlite") as connection:
        connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(StoreError, match="newer vivace"):
        Store.create(tmp_path)


def test_an_unreadable_row_is_named(tmp_path: Path) -> None:
    trial, environment = make_trial("baseline"), make_environment()
    with Store.create(tmp_path) as store:
        store.start_run("x", [trial], environment)
        store.append(trial.key(environment), make_round(0))
    with sqlite3.connect(tmp_path / "records.sqlite") as connection:
        connection.execute("UPDATE rounds SET row = '{\"index\": 0}'")
    connection.close()
    with Store.read_only(tmp_path) as store, pytest.raises(StoreError, match="cannot read"):
        store.record(trial.key(environment))


def test_a_full_disk_is_reported_and_loses_nothing(tmp_path: Path) -> None:
    trial, environment = make_trial("baseline"), make_environment()
    key = trial.key(environment)
    with Store.create(tmp_path) as store:
        store.start_run("x", [trial], environment)
        store.append(key, make_round(0))
        # SQLite's own size limit gives the same error as a full file system.
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StoreError, match="disk is full"):
            for index in range(1, 50):
                store.append(key, make_round(index, times=(1.0,) * 200))
    with Store.read_only(tmp_path) as store:
        assert 0 in store.rounds(key)


def test_a_read_only_folder() -> None:
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o555)
    try:
        pid = os.fork()
        if pid == 0:  # a child process without root's permission to write everywhere
            status = 1
            try:
                if os.geteuid() == 0:
                    os.setuid(65534)
                try:
                    Store.create(folder)
                except StoreError as error:
                    status = 0 if "read-only" in str(error) else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert not list(folder.iterdir())
    finally:
        folder.chmod(0o700)
        folder.rmdir()


def _create_all(folders: list[Path], barrier: Any, failed: Any) -> None:
    for folder in folders:
        barrier.wait()
        try:
            Store.create(folder).close()
        except StoreError as error:
            failed.put(f"{error} ({error.__cause__!r})")


def test_several_processes_create_one_store(tmp_path: Path) -> None:
    """Each process opens the empty folder before another has written to it; all use the same store."""
    trial, environment = make_trial("baseline"), make_environment()
    folders = [tmp_path / f"s{attempt}" for attempt in range(40)]
    fork = multiprocessing.get_context("fork")
    barrier, failed = fork.Barrier(4), fork.SimpleQueue()
    processes = [fork.Process(target=_create_all, args=(folders, barrier, failed)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert failed.empty(), failed.get()
    assert [process.exitcode for process in processes] == [0] * 4
    with Store.create(folders[0]) as store:
        store.start_run("x", [trial], environment)
        assert len(store.runs()) == 1


def test_images_are_named_by_their_content(tmp_path: Path) -> None:
    first = save_image(tmp_path, b"png bytes")
    assert save_image(tmp_path, b"png bytes") == first
    assert image_path(tmp_path, first).read_bytes() == b"png bytes"
    assert save_image(tmp_path, b"others") != first
    assert not list(tmp_path.rglob("*.part"))
