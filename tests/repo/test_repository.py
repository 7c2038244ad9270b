"""Checks of the repository: docs are current, exports exist, weights are small and safe."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

import vivace
from docgen import page_image

ROOT = Path(__file__).parents[2]
WEIGHTS = ROOT / "src" / "vivace" / "models" / "weights"


def test_exports_exist_and_other_names_do_not() -> None:
    for name in vivace.__all__:
        assert getattr(vivace, name) is not None
    assert set(dir(vivace)) == set(vivace.__all__)
    with pytest.raises(AttributeError, match="no attribute 'fast'"):
        vivace.fast  # noqa: B018
    assert callable(vivace.bench), "the function, not a module"


def test_importing_vivace_is_cheap() -> None:
    code = "import sys, vivace; print(sorted(m for m in ('torch', 'numpy', 'pydantic', 'rich') if m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_weights_are_safetensors_and_small() -> None:
    files = [p for p in WEIGHTS.rglob("*") if p.is_file()]
    assert files
    assert {p.suffix for p in files} <= {".safetensors", ".json", ".txt"}, "no pickles, no code"
    assert sum(p.stat().st_size for p in files) < 54_000_000


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert project["version"] == vivace.__version__ == sections[0]


def test_extras_are_installed_from_a_clone_and_exist() -> None:
    """The package is on no index, where another one may have its name."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [page for page in ROOT.glob("*.md") if page.name != "CHANGELOG.md"]
    texts = [*pages, *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py"), ROOT / "Containerfile"]
    named = set()
    for path in texts:
        text = path.read_text("utf-8")
        assert not re.search(r"vivace\[[a-z,]+\]|pip install '?vivace\b", text), path
        named |= {
            extra for extras in re.findall(r"['\"]\.\[([a-z,]+)\]['\"]", text) for extra in extras.split(",")
        }
    assert {"serve", "ray"} <= named <= set(known)


def test_links_within_the_docs_exist() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            if not link.startswith(("http", "mailto")):
                assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_constraints_pin_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    dependencies = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    for requirement in dependencies:
        name = re.split(r"[<>=\[ ]", requirement)[0].lower()
        assert name in pinned, requirement


def test_hooks_and_ci_run_the_tools_of_the_constraints() -> None:
    """A hook from another repository, or a tool that CI installs itself, would have another version."""
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {repo["repo"] for repo in hooks["repos"]} == {"local"}
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        assert hook["entry"].startswith((".venv/bin/", "make "))
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step.get("run") for job in workflow["jobs"].values() for step in job["steps"]]
    assert "bash .ci/run" in steps


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem
)
def test_issue_forms_are_valid(form: Path) -> None:
    content = yaml.safe_load(form.read_text())
    assert content["name"]
    assert content["description"]
    fields = [field for field in content["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_the_picture_of_the_readme_shows_its_record() -> None:
    """`python -m docgen.page_image` compares the page's speed-ups and verdicts with the record's."""
    assert "was the fastest" in page_image.page()


def test_the_record_of_the_readme_is_consistent() -> None:
    """The README's table is backed by raw samples, an environment and consistent figures."""
    rows = json.loads((ROOT / "results" / "demo-cpu.json").read_text())
    assert rows[0]["is_baseline"]
    for row in rows:
        assert row["outcome"] == "measured"
        assert row["environment"]["libraries"]["torch"]
        latency = row["latency"]
        samples = [s for round_ in latency["samples_s"] for s in round_]
        assert (len(samples), len(row["pictures"])) == (latency["n"], 13) == (6, 13)
        assert (latency["min_s"], latency["max_s"]) == (min(samples), max(samples))
        assert latency["ci95_s"][0] <= latency["median_s"] <= latency["ci95_s"][1]
        assert latency["min_s"] <= latency["median_s"] <= latency["max_s"]
        if not row["is_baseline"]:
            ratio = rows[0]["latency"]["median_s"] / latency["median_s"]
            assert row["speedup"]["ratio"] == pytest.approx(ratio, rel=1e-6)
