"""The wheel has the embedded models and templates, and not the code that trains or tests them."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Return the file names of a wheel, built without network from a copy of its sources."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("src", "tinyworld", "benchmarks"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    (copy / "tests").mkdir()
    (copy / "tests" / "test_nothing.py").touch()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(made)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = made.glob("vivace-*-py3-none-any.whl")
    assert wheel.stat().st_size < 54_000_000
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_has_every_file_of_the_package(names: set[str]) -> None:
    package = ROOT / "src"
    files = {
        str(path.relative_to(package))
        for path in (package / "vivace").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert {name for name in names if ".dist-info/" not in name} == files


@pytest.mark.parametrize(
    "name",
    [
        "vivace/py.typed",
        "vivace/answers/templates/page.html",
        "vivace/answers/templates/style.css",
        "vivace/answers/templates/sorting.js",
        "vivace/models/weights/tiny-sd/unet/diffusion_pytorch_model.safetensors",
        "vivace/models/weights/tiny-flux/transformer/diffusion_pytorch_model.safetensors",
        "vivace/models/weights/tiny-clip/model.safetensors",
    ],
)
def test_the_wheel_has_files_that_are_not_code(names: set[str], name: str) -> None:
    assert name in names
