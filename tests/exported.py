"""Write exported scripts, run them and compare them with vivace. For tests on a CPU."""

import contextlib
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.families import load
from vivace.models import find_model
from vivace.recipes.resolve import resolve
from vivace.runtime.export import Written, write_script
from vivace.runtime.opening import session_of

PROMPT = "a red circle above a blue square"
CALL = {"height": 64, "width": 64, "num_inference_steps": 4}


def write(model: str, recipe: str, **arguments: Any) -> Written:
    call = arguments.pop("call", CALL)
    return write_script(
        find_model(model), resolve(recipe), "cpu", prompt=PROMPT, seed=3, call=call, threads=1, **arguments
    )


def run(text: str, folder: Path) -> np.ndarray:
    """Run a script in this process, because a new one takes seconds to import, and return the image that it saves."""
    path = folder / f"draw_{len(list(folder.iterdir()))}.py"
    path.write_text(text)
    with contextlib.chdir(folder):
        runpy.run_path(str(path))
    with Image.open(folder / "picture.png") as picture:
        return np.asarray(picture)


def with_vivace(model: str, recipe: str, call: dict[str, Any] = CALL) -> np.ndarray:
    torch.set_num_threads(1)
    session = session_of(load(model), find_model(model), resolve(recipe), "cpu", call)
    return np.asarray(session(PROMPT, generator=torch.Generator().manual_seed(3)).images[0])


def check_it_draws_the_same(model: str, recipe: str, own: list[str], folder: Path) -> None:
    """Check that a script generates the same image as vivace, to one level of 255, and passes `check`.

    Args:
        own: the techniques that vivace itself has to draw, as `Written` names them.
        folder: an empty one.
    """
    call = {"height": 128, "width": 128}
    written = write(model, recipe, call=call)
    assert written.own == own
    picture = run(written.text, folder).astype(float)
    assert np.abs(picture - with_vivace(model, recipe, call)).max() <= 1
    check(folder)


def check(folder: Path) -> None:
    """Check that ruff neither reports nor reformats anything."""
    for command in (
        ["check", "--select", "E,F,W,I,N,UP,B,SIM,RUF,C4,PIE"],
        ["format", "--check", "--diff"],
    ):
        options = ["--isolated", "--line-length", "110", "--config", 'src=["nowhere"]']
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *options, str(folder)],
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
