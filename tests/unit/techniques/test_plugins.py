"""Techniques and families of other packages, by entry points of a distribution that is not installed for real."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

TECHNIQUE = """
from typing import ClassVar
from vivace.machinery.technique import Effect, Stage, Technique, TechniqueFacts

class TheirCache(Technique):
    name: ClassVar[str] = "their_cache"
    summary: ClassVar[str] = "caches as they like"
    declared: ClassVar[TechniqueFacts] = TechniqueFacts(stage=Stage.KERNEL, owns="their cache", same_picture=True)

    def unsupported(self, target):
        return None

    def apply(self, target):
        return Effect(changed={"cached": 1})
"""


@pytest.fixture
def run(tmp_path: Path):
    """A distribution that adds a technique and a family, and two that cannot be loaded; returns what Python prints."""
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[vivace.techniques]\ntheir_cache = theirs:TheirCache\nbroken = theirs_broken:Cache\nwrong = json:loads\n"
        "[vivace.architectures]\ntheir_family = theirs_family:THEIRS\n"
    )
    (tmp_path / "theirs.py").write_text(TECHNIQUE)
    (tmp_path / "theirs_broken.py").write_text("raise RuntimeError('no such library')\n")
    (tmp_path / "theirs_family.py").write_text(
        "from dataclasses import replace\nfrom vivace.architectures.z_image import Z_IMAGE\n"
        "THEIRS = replace(Z_IMAGE, name='theirs', denoiser='TheirTransformer', models=())\n"
    )

    def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
        code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); " + arguments[0]
        return subprocess.run(
            [sys.executable, "-c", code, *arguments[1:]], capture_output=True, text=True, check=True
        )

    return run_python


@pytest.mark.long
def test_what_others_add_is_there_with_its_origin_and_what_is_broken_is_named(run) -> None:
    done = run(
        "from vivace.__main__ import main; sys.exit(main())", "techniques", "--device", "cpu", "--json"
    )
    origins = {each["name"]: each["origin"] for each in json.loads(done.stdout)}
    assert (origins["their_cache"], origins["compile"]) == ("theirs", "vivace")
    assert "broken of theirs is not loaded: RuntimeError: no such library" in done.stderr
    assert "wrong of theirs is not loaded: TypeError: json:loads is no Technique" in done.stderr


def test_a_recipe_and_a_family_of_others(run) -> None:
    code = (
        "from vivace.recipes.resolve import resolve; from vivace.architectures import FAMILIES, family_of; "
        "print(resolve('their_cache+compile').text, FAMILIES[-1].name, "
        "family_of(type('TheirTransformer', (), {})()).name)"
    )
    assert run(code).stdout.split() == ["compile+their_cache", "theirs", "theirs"]
