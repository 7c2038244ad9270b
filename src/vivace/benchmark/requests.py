"""Requests to worker processes. Each is one line of JSON and is answered by one value."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.spec.figures import FiguresKey
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial
from vivace.spec.workload import Task


class WorkerRequest(Spec):
    """Base of all requests.

    Attributes:
        threads: number of CPU threads; None for torch's default.
        log: file for the worker's standard output and error; set by the launcher.
        sources: folder of the pictures that trials start from; None if none does.
    """

    threads: int | None = None
    sources: str | None = None
    log: str | None = None


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
    """A CLIP model's folder, the prompt set that serves as other prompts, and the folder of a second witness."""

    folder: str
    others: str
    witness: str | None = None


class FiguresRequest(WorkerRequest):
    """Return the `ImageFigures` of images. `device` is where the scorer runs."""

    kind: Literal["figures"] = "figures"
    pictures: str
    keys: tuple[FiguresKey, ...]
    scorer: Scorer | None
    device: str
    lpips: bool


class PredictionsRequest(WorkerRequest):
    """Return what `vivace plan` predicts for trials on the GPU of an environment."""

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
    """Return the `Profile` of a trial, of the median of `calls` calls.

    Attributes:
        trace: file for its Chrome trace; None to write none.
    """

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
    """Parse a request from a line of JSON."""
    return _PARSER.validate_json(line)
