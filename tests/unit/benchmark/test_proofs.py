"""The records that prove a recipe: its own and its baseline's, of the newest run that measured both."""

from pathlib import Path

from tests.make import make_environment, make_round, make_trial
from vivace.benchmark.store import Store, proving_records
from vivace.foundation.spec.record import Outcome, Round


def run(folder: Path, *rounds: tuple[str, Round]) -> None:
    with Store.create(folder) as store:
        trials = [make_trial(recipe) for recipe, _ in rounds]
        keys = store.start_run("vivace bench", trials, make_environment(), rounds=1).keys
        for key, (_, round_) in zip(keys, rounds, strict=True):
            store.append(key, round_)


def test_the_baseline_and_the_recipe(tmp_path: Path) -> None:
    model = make_trial("bf16").model
    assert proving_records(tmp_path, model, "dtype(bf16)") == ()
    run(tmp_path, ("baseline", make_round(0)), ("bf16", make_round(0)), ("tiny_vae", make_round(0)))
    records = proving_records(tmp_path, model, "dtype(bf16)")
    assert [record.trial.recipe.text for record in records] == ["baseline", "dtype(bf16)"]
    assert proving_records(tmp_path, model, "dtype(fp16)") == ()
    assert proving_records(tmp_path, model.model_copy(update={"revision": "1" * 16}), "dtype(bf16)") == ()


def test_a_recipe_that_failed_is_no_proof(tmp_path: Path) -> None:
    failed = make_round(0, outcome=Outcome.CRASHED, reason="it broke")
    run(tmp_path, ("baseline", make_round(0)), ("bf16", failed))
    assert proving_records(tmp_path, make_trial("bf16").model, "dtype(bf16)") == ()
