"""A worker that the benches of many tests share, because starting one takes seconds of imports.

It only imports, and serves each request in a forked child, so it keeps no state of an earlier test. The child first
takes the environment variables and the folder of the test, and calls `set_up` of the module that the test's own
worker would be.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

from vivace.benchmark.rounds import worker
from vivace.benchmark.rounds.worker_requests import WORKER, parse_request
from vivace.foundation.processes import resident
from vivace.foundation.processes.launcher import Ending, Launcher

_ROOT = str(Path(__file__).parents[1])
COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path.insert(0, {_ROOT!r}); from tests.shared_worker import main; main()",
)
SET_UP = "VIVACE_TEST_SET_UP"
"""The environment variable with the path of a file that has the next request's variables, folder and module."""


def module_of(command: tuple[str, ...]) -> str | None:
    """Return the module that sets up what a worker's command line has besides `vivace.benchmark.rounds.worker`.

    Raises:
        KeyError: the command is that of another kind of worker.
    """
    from tests import faulty_worker, narrow

    return {WORKER: None, faulty_worker.COMMAND: faulty_worker.__name__, narrow.COMMAND: narrow.__name__}[
        command
    ]


class SharedWorker:
    """The process. `launcher` returns what sends requests to it."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "set-up.json"
        self._launcher = Launcher(COMMAND, tries_gpu=False, variables={SET_UP: str(self._file)})

    def launcher(self, module: str | None) -> Sharing:
        return Sharing(self._launcher, self._file, module)

    def close(self) -> None:
        self._launcher.close()


class Sharing:
    """A launcher whose end leaves the process running.

    Args:
        module: its `set_up` runs before each request; None for a plain worker.
    """

    def __init__(self, launcher: Launcher, file: Path, module: str | None) -> None:
        self._launcher, self._file, self._module = launcher, file, module

    def __enter__(self) -> Sharing:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._launcher, name)

    def run(self, *request: Any, **options: Any) -> Ending:
        self._file.write_text(
            json.dumps({"variables": dict(os.environ), "folder": str(Path.cwd()), "module": self._module})
        )
        return self._launcher.run(*request, **options)


def serve(line: str, events: TextIO) -> None:
    """Serve a request in a child of this process."""
    set_up = json.loads(Path(os.environ[SET_UP]).read_text())
    os.environ.clear()
    os.environ.update(set_up["variables"])
    os.chdir(set_up["folder"])
    if set_up["module"] is not None:
        importlib.import_module(set_up["module"]).set_up()
    worker.serve(parse_request(line), events)


def prepare() -> None:
    """Import what every child would import for seconds, and read the models that most of them draw with."""
    import torchmetrics

    from tests.copies import read_embedded_models_once
    from vivace.models import find_model, load_pipeline

    assert torchmetrics is not None
    worker.import_all()
    read_embedded_models_once()
    for model in ("tiny-sd", "tiny-flux"):
        load_pipeline(find_model(model), "cpu")


def main() -> None:
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as `vivace.benchmark.rounds.worker` does
    resident.serve_requests(str, serve, prepare, worker.gpu_works_in_a_child)
