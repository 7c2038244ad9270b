"""Requests to worker processes. Each is answered by one value."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from vivace.errors import Unsupported, UnusableModel, WorkerError
from vivace.foundation.processes.launcher import Launcher, OnEvent, last_line
from vivace.foundation.processes.protocol import LoggedRequest
from vivace.foundation.spec.base import Spec
from vivace.foundation.spec.environment import Environment
from vivace.foundation.spec.figures import FiguresKey
from vivace.foundation.spec.timing import Timing
from vivace.foundation.spec.trial import Trial
from vivace.foundation.spec.workload import Task
from vivace.models.reading_limits import complaint
from vivace.models.scorers import LocatedScorer

WORKER = (sys.executable, "-m", "vivace.benchmark.rounds.worker")
"""The command line of the worker that answers them."""


class WorkerRequest(LoggedRequest):
    """Base of all requests.

    Attributes:
        threads: number of CPU threads; None for torch's default.
        sources: folder of the images that trials start from; None if none does.
    """

    threads: int | None = None
    sources: str | None = None


class EnvironmentRequest(WorkerRequest):
    """Return the `Environment` of a device: "auto", "cpu" or "cuda"."""

    kind: Literal["environment"] = "environment"
    device: str


class GpusRequest(WorkerRequest):
    """Return the GPUs that this process may use, as `Place`s."""

    kind: Literal["gpus"] = "gpus"


class RaceRequest(WorkerRequest):
    """Return the seconds of a short call of each recipe that works here (see `benchmark.race`)."""

    kind: Literal["race"] = "race"
    device: str
    model: str
    recipes: tuple[str, ...]


class SupportRequest(WorkerRequest):
    """Return why recipes cannot work on a device and a model, and the model's components (`benchmark.support`)."""

    kind: Literal["support"] = "support"
    device: str
    model: str
    recipes: tuple[str, ...]
    task: Task | None = None
    batch: int | None = None


class RoundRequest(WorkerRequest):
    """Measure one `Round` of a trial. `pictures` is the folder to save its images below; None to save none."""

    kind: Literal["round"] = "round"
    trial: Trial
    round: int
    timing: Timing
    pictures: str | None


class LargestBatchRequest(WorkerRequest):
    """Return the largest batch of the trial that fits in the GPU's memory."""

    kind: Literal["largest_batch"] = "largest_batch"
    trial: Trial


class RehearsalRequest(WorkerRequest):
    """Return None if a round of the trial fits in the GPU's memory, else the reason."""

    kind: Literal["rehearsal"] = "rehearsal"
    trial: Trial
    timing: Timing


class ImagesRequest(WorkerRequest):
    """Generate the first `number` images of a trial, untimed. `pictures` is the store's folder of images."""

    kind: Literal["pictures"] = "pictures"
    trial: Trial
    number: int
    pictures: str


class Scorer(Spec):
    """What scores images: the folder of a CLIP model, or of a function's module with its name, and of a second witness.

    `others` is the prompt set that serves as other prompts.
    """

    folder: str
    others: str
    function: str | None = None
    witness: str | None = None

    @classmethod
    def of(cls, located: LocatedScorer) -> Scorer:
        witness = None if located.witness is None else str(located.witness.folder)
        function = located.name if located.is_function else None
        return cls(folder=str(located.folder), others=located.prompt_set, function=function, witness=witness)


class FiguresRequest(WorkerRequest):
    """Return the `ImageFigures` of images. `device` is where the scorer runs."""

    kind: Literal["figures"] = "figures"
    pictures: str
    keys: tuple[FiguresKey, ...]
    scorer: Scorer | None
    device: str
    lpips: bool


class PredictionsRequest(WorkerRequest):
    """Return the predictions of `vivace plan` for trials on the GPU of an environment."""

    kind: Literal["predictions"] = "predictions"
    trials: tuple[Trial, ...]
    environment: Environment


class WorkRequest(WorkerRequest):
    """Return the `Work` of a trial (see `benchmark.work.count_work`)."""

    kind: Literal["work"] = "work"
    trial: Trial
    environment: Environment
    hits: float | None
    denoiser_calls: int


class ProfileRequest(WorkerRequest):
    """Return the `Profile` of a trial, of the median of `calls` calls; `trace` is the file for its Chrome trace."""

    kind: Literal["profile"] = "profile"
    trial: Trial
    timing: Timing
    calls: int
    environment: Environment
    trace: str | None


AnyRequest = (
    EnvironmentRequest
    | GpusRequest
    | RaceRequest
    | SupportRequest
    | RoundRequest
    | LargestBatchRequest
    | RehearsalRequest
    | ImagesRequest
    | FiguresRequest
    | PredictionsRequest
    | WorkRequest
    | ProfileRequest
)
_PARSER: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="kind")])


def parse_request(line: str | bytes) -> AnyRequest:
    return _PARSER.validate_json(line)


def ask(
    launcher: Launcher,
    request: AnyRequest,
    timeout_s: float,
    on_event: OnEvent = lambda _: None,
    reads: str | None = None,
) -> dict[str, Any]:
    """Return the value of a request, or raise if it failed; `reads` is the model that it reads, for messages."""
    ending = launcher.run(request, timeout_s, on_event)
    kind = request.kind.replace("_", " ")
    if ending.excess is not None:
        raise UnusableModel(complaint(reads or "the model", ending.excess))
    if ending.timed_out:
        raise WorkerError(f"the worker process took longer than {timeout_s:g} s ({kind})")
    if ending.value is None:
        raise WorkerError(f"the worker process failed ({kind}): {last_line(ending.log) or ending}")
    if "error" in ending.value:
        raise Unsupported(ending.value["error"])
    return ending.value


def start_launcher(device: str, worker: Sequence[str] = WORKER) -> Launcher:
    """Return a launcher for rounds on `device` ("auto", "cpu" or "cuda")."""
    return Launcher(worker, tries_gpu=device != "cpu")
