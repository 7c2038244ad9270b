"""`vivace merge`: several stores as one, in which runs stay apart and nothing is lost."""

import shutil
from pathlib import Path

import pytest

from tests.make import make_environment, make_round, make_trial
from tests.typed import run_vivace
from vivace.benchmark.store import Store
from vivace.benchmark.store.images import save_image
from vivace.foundation.spec.record import Sample

TRIALS = [make_trial("baseline"), make_trial("tiny_vae")]


def fill(folder: Path, seconds: float, machine: str = "a CPU") -> None:
    """Store a run of two recipes in two rounds, and an image."""
    environment = make_environment().model_copy(update={"cpu": machine})
    with Store.create(folder) as store:
        store.start_run(f"vivace bench, {seconds} s", TRIALS, environment, rounds=2)
        for trial in TRIALS:
            for index in range(2):
                sample = Sample(
                    picture=0, total_s=seconds, cpu_s=0, stages_s={"steps": 1}, num_denoiser_calls=1
                )
                round_ = make_round(index).model_copy(update={"samples": (sample,) * 3})
                store.append(trial.key(environment), round_)
        save_image(folder / "pictures", b"the same")
        save_image(folder / "pictures", f"{seconds} s".encode())


def medians(folder: Path) -> list[list[float]]:
    with Store.read_only(folder) as store:
        return [
            [record.rounds[-1].samples[0].total_s for record in compared.records]
            for compared in store.comparisons()
        ]


def test_runs_of_two_machines_stay_apart(tmp_path: Path) -> None:
    fill(tmp_path / "a", 1.0, "one")
    fill(tmp_path / "b", 2.0, "another")
    done = run_vivace(tmp_path, "merge", "a", "b", "-o", "c")
    assert "2 runs, 8 rounds" in done.stdout
    assert "3 images" in done.stdout
    assert medians(tmp_path / "c") == [[2.0, 2.0], [1.0, 1.0]]
    assert medians(tmp_path / "a") == [[1.0, 1.0]], "only read"


def test_rounds_of_one_machine_add_up_and_stay_paired(tmp_path: Path) -> None:
    fill(tmp_path / "a", 1.0)
    fill(tmp_path / "b", 2.0)
    run_vivace(tmp_path, "merge", "a", "b", "-o", "c")
    with Store.read_only(tmp_path / "c") as store:
        rounds = [store.rounds(key) for key in store.runs()[0].keys]
    assert [sorted(of) for of in rounds] == [[0, 1, 2, 3]] * 2
    assert {index: r.samples[0].total_s for index, r in rounds[1].items()} == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}
    assert [r.index for r in rounds[0].values()] == [0, 1, 2, 3]


def test_a_copy_adds_nothing(tmp_path: Path) -> None:
    fill(tmp_path / "a", 1.0)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert "1 runs, 4 rounds" in run_vivace(tmp_path, "merge", "a", "b", "-o", "c").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("a", "b", "-o", "a"), "not empty and was not changed"),
        (("a", "./a", "-o", "c"), "given twice"),
    ],
)
def test_nothing_is_overwritten(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    fill(tmp_path / "a", 1.0)
    fill(tmp_path / "b", 2.0)
    assert says in run_vivace(tmp_path, "merge", *arguments, code=2).stderr
    assert medians(tmp_path / "a") == [[1.0, 1.0]]
    assert not (tmp_path / "c").exists()
