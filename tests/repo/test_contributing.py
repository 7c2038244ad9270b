"""The example in CONTRIBUTING.md works in a copy of the package."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "vivace"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def block(language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)
    return str(found)


def add_lines(text: str, diff: str) -> str:
    """Add each line before or after its neighbour in the diff, which must occur once in the text."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line.startswith(" ")) + "\n"
        new = "\n".join(line[1:] for line in lines) + "\n"
        assert text.count(old) == 1, f"the example's context is gone: {old!r}"
        text = text.replace(old, new)
    return text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an import folder with the package and the example."""
    folder = tmp_path_factory.mktemp("source")
    copy = folder / "vivace"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    (copy / "models" / "weights").symlink_to(PACKAGE / "models" / "weights")
    (copy / "techniques" / "text_length.py").write_text(block("python"))
    registry = copy / "techniques" / "__init__.py"
    registry.write_text(add_lines(registry.read_text(), block("diff")))
    return folder


def run(source: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=source
    )


def test_the_technique_is_listed_and_explained(source: Path) -> None:
    listed = json.loads(run(source, "-m", "vivace", "techniques", "text_length", "--json").stdout)
    assert listed[0]["knobs"][0]["tune"] == [128, 256]
    assert (
        "FluxPipeline, max_sequence_length" in run(source, "-m", "vivace", "techniques", "text_length").stdout
    )
    wrong = run(source, "-m", "vivace", "generate", "a star", "--recipe", "text_length(4)")
    assert wrong.returncode == 2
    assert "tokens must be a whole number, at least 8" in wrong.stderr


_DRAW = """
import numpy, torch, vivace
from vivace.errors import Unsupported
def draw(recipe):
    session = vivace.load("tiny-flux", recipe, device="cpu")
    found = session("a red circle", generator=torch.Generator().manual_seed(0), num_inference_steps=2, output_type="np")
    return session.effects, found.images
effects, short = draw("text_length(16)")
assert effects == {"text_length": {"text_tokens": 16, "text_tokens_before": 32}}, effects
assert not numpy.array_equal(short, draw("baseline")[1])
try:
    vivace.load("tiny-sd", "text_length(16)")
except Unsupported as error:
    print(error)
"""


@pytest.mark.soak
def test_it_does_what_it_declares(source: Path) -> None:
    done = run(source, "-c", _DRAW)
    assert done.returncode == 0, done.stderr
    assert (
        "text_length: StableDiffusionPipeline pads prompts to a length that cannot be chosen" in done.stdout
    )


@pytest.mark.soak
def test_the_contract_holds_for_it(source: Path) -> None:
    suite = ROOT / "tests" / "contract" / "test_technique_contract.py"
    done = run(source, "-m", "pytest", "-n0", "-m", "", "-k", "text_length", "-c", str(ROOT / "pyproject.toml"),
               "--rootdir", str(ROOT), "-p", "no:cacheprovider", str(suite))  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    assert "8 passed" in done.stdout


def test_the_family_that_it_shows_is_the_one_in_the_package() -> None:
    assert block("py") == (PACKAGE / "families" / "cogview4.py").read_text()
