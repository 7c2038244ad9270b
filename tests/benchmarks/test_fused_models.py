"""Models with and without a fused form: which recipes are compared, and that the page of targets has their records."""

from pathlib import Path

import click.testing
import pytest

import vivace
from benchmarks.fused_models import RECIPES, fused_models
from docgen.targets import LINES, Target, fastest_of
from tests import flow_models
from tests.make import make_record, make_round
from vivace.foundation.spec.record import Record
from vivace.recipes.resolve import resolve

SANA = ("sana-1600m", "sana-sprint-1600m")


@pytest.mark.parametrize("name", SANA)
def test_recipes_name_components_that_the_model_has(name: str) -> None:
    parts = {"denoiser" if part == "transformer" else part for part in flow_models.pipeline(name).components}
    for text in RECIPES[name]:
        recipe = resolve(text)
        assert recipe.same_picture
        assert {target for technique in recipe for target in technique.targets} <= parts


def test_a_record_of_a_model_without_fused_form_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = {"baseline": 0.8, RECIPES[SANA[0]][1]: 0.3}

    def bench(model: str, recipes: list[str], **_: object) -> list[Record]:
        (recipe,) = recipes
        record = make_record(recipe, make_round(0, (taken[recipe],) * 3))
        trial = record.trial
        size = {"height": 1024, "width": 1024, "num_inference_steps": 20}
        update = {
            "model": trial.model.model_copy(update={"name": model}),
            "workload": trial.workload.model_copy(update=size),
        }
        return [record.model_copy(update={"trial": trial.model_copy(update=update)})]

    monkeypatch.setattr(vivace, "bench", bench)
    path = tmp_path / f"fused-model-{SANA[0]}.json"
    (tmp_path / "new-prompts.jsonl").touch()
    arguments = [SANA[0], "--first", "2", "--rounds", "1", "--device", "cpu", "--record", str(path)]
    ended = click.testing.CliRunner().invoke(fused_models, arguments, standalone_mode=False)
    assert ended.return_value == 0, ended.output
    (line,) = [line for line in LINES if line.model == SANA[0]]
    (fastest,) = fastest_of(Target(line.what, line.model, line.steps, "", "", 0.0), tmp_path)
    assert (fastest.record, fastest.latency.point) == (path.name, pytest.approx(0.3))
