"""Scripts of the transformers after FLUX.1, run: diffusers loads a small pipeline, and draws what vivace draws."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import pytest

from tests import exported
from tests.flow_models import EDITING, MODELS, PROMPT, _small, draw, pipeline, session, source
from tests.narrow import small_areas
from vivace.architectures import CATALOGUE
from vivace.foundation.spec.study import WorkloadRequest
from vivace.foundation.spec.trial import Model
from vivace.models.find import LocatedModel
from vivace.recipes.resolve import resolve
from vivace.runtime import export, pipelines, workloads
from vivace.runtime.export import source_files
from vivace.runtime.workloads import workload_of

RECIPES = (
    "baseline",
    "attention(math)+compile(blocks=repeated, backend=eager)+steps(3)",
    "quantize(int8)+taylorseer(hits=0.5)",
)


def _marks(model: str, recipe: str) -> Any:
    if (model, recipe) == ("z-image-turbo", "baseline"):
        return ()
    return pytest.mark.soak if model in EDITING else pytest.mark.long


def _cases() -> list[Any]:
    return [
        pytest.param(
            model,
            recipe,
            id=f"{recipe}-{model}",
            marks=_marks(model, recipe),
        )
        for model in (*MODELS, *EDITING)
        for recipe in RECIPES
    ]


@pytest.mark.parametrize(("model", "recipe"), _cases())
def test_it_draws_what_vivace_draws(
    model: str, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (pipelines, workloads):  # the small processor needs no torchvision
        monkeypatch.setattr(module, "check_installed", lambda *_: None)
    file = tmp_path / "source.png"
    request = WorkloadRequest()
    if model in EDITING:
        source().save(file)
        request = WorkloadRequest(task="edit", images=(str(file),))
    opened = session(model, recipe)
    expected = draw(opened, max_sequence_length=None)[0]
    with _small(model):
        located = LocatedModel(Model(name=model, source="hub", revision="main"), tmp_path, CATALOGUE[model])
        workload = workload_of(located, request)
        with mock.patch.object(export, "pipeline_for", return_value=pipeline(model)):
            written = export.write_script(
                located,
                resolve(recipe),
                "cpu",
                prompt=PROMPT,
                seed=0,
                threads=1,
                workload=workload,
                sources=source_files(located, workload, request),
            )
    assert f'"{CATALOGUE[model].origin.repo}"' in written.text
    assert written.own == ([] if "taylorseer" not in recipe else ["taylorseer(hits=0.5)"])
    with ExitStack() as stack:
        for module, name, small_area in small_areas():
            stack.enter_context(mock.patch.object(module, name, small_area))
        loads = mock.patch.object(
            diffusers.DiffusionPipeline, "from_pretrained", return_value=pipeline(model)
        )
        stack.enter_context(loads)
        picture = exported.run(written.text, tmp_path)
    assert picture.shape == expected.shape
    difference = np.abs(picture.astype(float) - np.round(expected * 255)).max()
    assert difference <= 1
    file.unlink(missing_ok=True)
    exported.check(tmp_path)
