"""What a worker process is asked: one typed request, as a line of JSON, answered by one value."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from vivace.spec.base import Spec
from vivace.spec.environment import Environment
from vivace.spec.figures import FiguresKey
from vivace.spec.timing import Timing
from vivace.spec.trial import Trial


class Request(Spec):
    """What all requests share.

    Attributes:
        threads: CPU threads to work with; None leaves them to torch.
        log: file that takes the worker's standard output and error; set by the launcher.
    """

    threads: int | None = None
    log: str | None = None


class EnvironmentRequest(Request):
    """The `Environment` of a device: "auto", "cpu" or "cuda"."""

    kind: Literal["environment"] = "environment"
    device: str


class RaceRequest(Request):
    """Seconds for a short call of each recipe that works here (see `benchmark.race`)."""

    kind: Literal["race"] = "race"
    device: str
    model: str
    recipes: tuple[str, ...]


class RoundRequest(Request):
    """Measure one `Round` of a trial. `pictures` is the store's folder of pictures."""

    kind: Literal["round"] = "round"
    trial: Trial
    round: int
    timing: Timing
    pictures: str


class LargestBatchRequest(Request):
    """The largest batch of the trial that a call fits into the GPU's memory."""

    kind: Literal["largest_batch"] = "largest_batch"
    trial: Trial


class RehearsalRequest(Request):
    """Whether a round of the trial fits the GPU's memory in this process, and why not."""

    kind: Literal["rehearsal"] = "rehearsal"
    trial: Trial
    timing: Timing


class PicturesRequest(Request):
    """Draw the first `number` pictures of a trial, untimed."""

    kind: Literal["pictures"] = "pictures"
    trial: Trial
    number: int
    pictures: str


class Scorer(Spec):
    """A CLIP model's folder, and the prompt set whose prompts stand for other prompts."""

    folder: str
    others: str


class FiguresRequest(Request):
    """`PictureFigures` of pictures, alone and against their references. `device` is where the scorer runs."""

    kind: Literal["figures"] = "figures"
    pictures: str
    keys: tuple[FiguresKey, ...]
    scorer: Scorer | None
    device: str
    lpips: bool


class PredictionsRequest(Request):
    """What `vivace plan` predicts for trials on the GPU of an environment."""

    kind: Literal["predictions"] = "predictions"
    trials: tuple[Trial, ...]
    environment: Environment


AnyRequest = (
    EnvironmentRequest
    | RaceRequest
    | RoundRequest
    | LargestBatchRequest
    | RehearsalRequest
    | PicturesRequest
    | FiguresRequest
    | PredictionsRequest
)
_PARSER: TypeAdapter[AnyRequest] = TypeAdapter(Annotated[AnyRequest, Field(discriminator="kind")])


def parse_request(line: str | bytes) -> AnyRequest:
    """The request that a line of JSON holds."""
    return _PARSER.validate_json(line)
