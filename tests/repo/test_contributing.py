"""The example in CONTRIBUTING.md works in a copy of the package."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vivace.architectures.family import Family, Pipeline

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "vivace"
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()


def block(language: str) -> str:
    (text,) = re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)
    return str(text)


def add_lines(text: str, diff: str) -> str:
    """Add each line before or after its neighbour in the diff, which must occur once in the text."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line.startswith(" ")) + "\n"
        new = "\n".join(line[1:] for line in lines) + "\n"
        assert text.count(old) == 1, f"the example's context is gone: {old!r}"
        text = text.replace(old, new)
    return text


def registered(text: str, diff: str) -> str:
    """Return the list of techniques with the example; unchanged if somebody who followed the guide has added it."""
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    return text if all(f"{line}\n" in text for line in added) else add_lines(text, diff)


def with_example(package: Path, copy: Path) -> None:
    """Copy the package and add the example to the copy."""
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__", "weights"))
    (copy / "models" / "weights").symlink_to(PACKAGE / "models" / "weights")
    (copy / "techniques" / "text_length.py").write_text(block("python"))
    registry = copy / "techniques" / "__init__.py"
    registry.write_text(registered(registry.read_text(), block("diff")))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an import folder with the package and the example."""
    folder = tmp_path_factory.mktemp("source")
    with_example(PACKAGE, folder / "vivace")
    return folder


def run(source: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(source), str(ROOT)])}
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, cwd=source
    )


_COMMANDS = """
import json, tempfile
from pathlib import Path
from tests.typed import run_vivace
folder = Path(tempfile.mkdtemp())
commands = [
    (0, "techniques", "text_length", "--json"),
    (0, "techniques", "text_length"),
    (2, "generate", "a star", "--recipe", "text_length(4)"),
]
done = [run_vivace(folder, *arguments, code=code) for code, *arguments in commands]
print(json.dumps([(each.returncode, each.stdout, each.stderr) for each in done]))
"""


@pytest.mark.long
def test_the_technique_is_listed_and_explained(source: Path) -> None:
    listed, explained, wrong = json.loads(run(source, "-c", _COMMANDS).stdout)
    assert json.loads(listed[1])[0]["knobs"][0]["tune"] == [128, 256]
    assert "FluxPipeline, max_sequence_length" in explained[1]
    assert wrong[0] == 2
    assert "tokens must be a whole number, at least 8" in wrong[2]


def contract(source: Path, which: str) -> str:
    """Run the contract suite on the copy of the tree, and return what pytest says last."""
    done = run(source, "-m", "pytest", "-n0", "-m", "", "-k", which, "-c", str(ROOT / "pyproject.toml"),
               "--rootdir", str(ROOT), "-p", "no:cacheprovider", str(ROOT / "tests" / "contract"))  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.long
def test_the_contract_holds_for_it(source: Path) -> None:
    from tests.flow_models import EDITING, MODELS

    number = int(re.search(r"(\d+) passed", contract(source, "text_length"))[1])
    assert number >= 8 + 2 * len((*MODELS, *EDITING)), "every variant on every model"


def test_the_fields_that_it_names_are_those_of_a_family() -> None:
    section = GUIDE.partition("## Adding a model")[2].partition("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("   | `")]
    fields = {name for _, first, *_ in rows for name in re.findall(r"`(\w+)`", first)}
    assert len(fields) > 8
    assert fields <= {each.name for each in dataclasses.fields(Family)}
    in_brackets = {name for row in rows for name in re.findall(r"\(?`(\w+)`[,)]", row[2])}
    assert in_brackets <= {each.name for each in dataclasses.fields(Pipeline)} | {"cfg_cutoff", "parallel"}
    for name in re.findall(r"`(\w+\.py)`", section):
        assert list((PACKAGE / "architectures").glob(name)) or list((ROOT / "tests").rglob(name)), name
