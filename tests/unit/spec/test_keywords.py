"""Type checkers know the keywords and results of what is called most."""

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pytest

import vivace
import vivace.benchmark
from vivace.foundation.spec.study import QualityRequest, Study, StudyKeywords, WorkloadRequest

ROOT = Path(__file__).parents[3]


def test_the_keywords_are_the_fields_of_a_study() -> None:
    parts = {*Study.model_fields, *WorkloadRequest.model_fields, *QualityRequest.model_fields}
    assert set(get_type_hints(StudyKeywords)) == (parts - {"models", "recipes", "enabled"}) | {"batch"}


@pytest.mark.parametrize("call", [vivace.bench, vivace.compare, vivace.profile, Study.of])
def test_no_keyword_passes_unchecked(call: object) -> None:
    assert callable(call)
    (rest,) = (
        parameter
        for parameter in inspect.signature(call).parameters.values()
        if parameter.kind is parameter.VAR_KEYWORD
    )
    assert str(rest.annotation).startswith("Unpack[")


@pytest.mark.long
def test_a_mistyped_keyword_is_an_error_and_a_session_returns_images(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    code = [
        ("import vivace", ""),
        ("from vivace.foundation.spec import study", ""),
        ("vivace.bench('tiny-sd', ['baseline'], num_inference_step=1)", "Unexpected keyword argument"),
        ("vivace.bench('tiny-sd', ['baseline'], num_inference_steps='1')", "incompatible type"),
        ("vivace.bench('tiny-sd', ['baseline'], num_inference_steps=1, prompts=['a'], quality=False)", ""),
        ("vivace.compare('tiny-sd', 'baseline', 'tiny_vae', hieght=1)", "Unexpected keyword argument"),
        ("vivace.profile('tiny-sd', guidance=1)", "Unexpected keyword argument"),
        ("study.Study.of('tiny-sd', ['baseline'], sede=1)", "Unexpected keyword argument"),
        ("vivace.load('tiny-sd', devise='cpu')", "Unexpected keyword argument"),
        ("drawn = vivace.load('tiny-sd')('a red circle')", ""),
        ("drawn.images[0].save('circle.png')", ""),
        ("drawn.pictures", "has no attribute"),
        ("vivace.load('tiny-sd')('a', return_dict=False)[0]", ""),
    ]
    path = tmp_path / "used.py"
    path.write_text("".join(f"{line}\n" for line, _ in code))
    settings = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *settings, "--follow-imports", "silent", str(path)],
        capture_output=True, text=True, check=False, cwd=ROOT,
    )  # fmt: skip
    errors = {int(line.split(":")[1]): line for line in done.stdout.splitlines() if ": error:" in line}
    for number, (line, says) in enumerate(code, 1):
        assert (says in errors.get(number, "")) if says else number not in errors, f"{line}: {done.stdout}"


@pytest.mark.parametrize("package", [vivace, vivace.benchmark])
def test_names_that_are_imported_late_are_all_there(package: ModuleType) -> None:
    assert set(package._MODULES) == set(package.__all__) - {"__version__"}
    assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


def test_an_error_is_caught_without_importing_what_can_raise_it() -> None:
    code = "import sys, vivace; vivace.VivaceError; print([name for name in sys.modules if 'vivace' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['vivace', 'vivace.errors']"
