"""`vivace prove`, as tests call it."""

import json
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner, Result

from tests.images_server import serving
from vivace.cli import app

SHAPES = "python:tests.drawn_shapes:draw"
PROMPTS = [f"a {word} shape" for word in ("red", "blue", "green", "purple", "yellow", "orange")]
SETTINGS = ("--height", "96", "--width", "96", "--steps", "8", "--guidance-scale", "4")


def prove(
    folder: Path, a: str, b: str, *more: str, prompts: Sequence[str] = PROMPTS, seeds: int | None = 1
) -> Result:
    """Run the command. No prompts are those of the folders; no seeds are the command's own."""
    command = ["prove", a, b, "--store", str(folder / "store"), "--scorer", "none", *more]
    if prompts:
        (folder / "prompts.txt").write_text("\n".join(prompts))
        command += ["--prompts", str(folder / "prompts.txt")]
    command += [] if seeds is None else ["--seeds", str(seeds)]
    return CliRunner().invoke(app, command, standalone_mode=False)


def answer(result: Result) -> dict:
    assert result.exception is None, result.output
    return json.loads(result.stdout)


def proof_of(
    folder: Path, a: str, b: str, *more: str, prompts: Sequence[str] = PROMPTS, seeds: int | None = 1
) -> dict:
    """Return the command's JSON."""
    return answer(prove(folder, a, b, "--format", "json", *more, prompts=prompts, seeds=seeds))


def against_server(
    folder: Path, fault: str, *more: str, a: str = SHAPES, fields: str = "", seeds: int = 1
) -> dict:
    """Return the JSON of a proof against the tests' server with a fault."""
    with serving(fault) as server:
        return proof_of(folder, a, server.url + fields, *SETTINGS, *more, seeds=seeds)


def failed(proof: dict) -> dict[str, str]:
    """Return the reasons of the checks that failed, by name."""
    return {check["name"]: check["reason"] for check in proof["checks"] if check["status"] == "failed"}
