"""The keywords of what is called most, and names that are imported late."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import vivace
import vivace.benchmark
from vivace.errors import UsageError
from vivace.foundation.spec.study import WorkloadRequest


def test_a_notebook_completes_the_keywords() -> None:
    bench, compare, profile = (
        {*inspect.signature(call).parameters} for call in (vivace.bench, vivace.compare, vivace.profile)
    )
    assert {"device", "timing", "launcher", *WorkloadRequest.model_fields} <= bench & compare & profile
    assert {"store", "fail_if"} <= compare - profile
    assert {"scorer", "until"} <= bench - compare


@pytest.mark.parametrize(
    "call",
    [
        lambda: vivace.bench("tiny-sd", ["baseline"], num_inference_step=1),
        lambda: vivace.compare("tiny-sd", "baseline", "tiny_vae", num_inference_step=1),
        lambda: vivace.profile("tiny-sd", num_inference_step=1),
    ],
)
def test_a_mistyped_keyword_is_an_error(
    call: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="num_inference_steps"):
        call()
    assert not [*tmp_path.iterdir()]


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
