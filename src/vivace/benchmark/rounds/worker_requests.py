"""Requests to worker processes. Each is answered by one value, which the worker makes with the request's `answer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

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

Report = Callable[[dict[str, Any]], None]
WORKER = (sys.executable, "-m", "vivace.benchmark.rounds.worker")
"""The command line of the worker that answers them."""


class WorkerRequest(LoggedRequest):
    """Base of all requests.

    Attributes:
        threads: number of CPU threads; None for torch's default.
        sources: folder of the images that trials start from; None if none does.
    """

    kind: str = ""
    threads: int | None = None
    sources: str | None = None

    def answer(self, report: Report) -> dict[str, Any]:
        raise NotImplementedError

    @property
    def source_folder(self) -> Path | None:
        return None if self.sources is None else Path(self.sources)


class EnvironmentRequest(WorkerRequest):
    """Return the `Environment` of a device: "auto", "cpu" or "cuda"."""

    kind: Literal["environment"] = "environment"
    device: str

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.measure.machine import choose_device
        from vivace.measure.this_environment import environment

        return environment(choose_device(self.device)).model_dump(mode="json")


class GpusRequest(WorkerRequest):
    """Return the GPUs that this process may use, as `Place`s."""

    kind: Literal["gpus"] = "gpus"

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.measure.machine import visible_gpus

        return {"gpus": [place.model_dump(mode="json") for place in visible_gpus()]}


class RaceRequest(WorkerRequest):
    """Return the seconds of a short call of each recipe that works here (see `benchmark.race`)."""

    kind: Literal["race"] = "race"
    device: str
    model: str
    recipes: tuple[str, ...]

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.round import race
        from vivace.measure.machine import choose_device

        return dict(race(self.model, self.recipes, choose_device(self.device)))


class SupportRequest(WorkerRequest):
    """Return why recipes cannot work on a device and a model, and the model's components (`benchmark.support`)."""

    kind: Literal["support"] = "support"
    device: str
    model: str
    recipes: tuple[str, ...]
    task: Task | None = None
    batch: int | None = None

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.support import support_of

        return support_of(self.model, self.recipes, self.device, self.task, self.batch).to_json()


class RoundRequest(WorkerRequest):
    """Measure one `Round` of a trial. `pictures` is the folder to save its images below; None to save none."""

    kind: Literal["round"] = "round"
    trial: Trial
    round: int
    timing: Timing
    pictures: str | None

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.round import measure_round

        folder = None if self.pictures is None else Path(self.pictures)
        measured = measure_round(self.trial, self.round, self.timing, folder, report, self.source_folder)
        return measured.model_dump(mode="json")


class LargestBatchRequest(WorkerRequest):
    """Return the largest batch of the trial that fits in the GPU's memory."""

    kind: Literal["largest_batch"] = "largest_batch"
    trial: Trial

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.runner import largest_batch

        return {"batch": largest_batch(self.trial, report, self.source_folder)}


class RehearsalRequest(WorkerRequest):
    """Return None if a round of the trial fits in the GPU's memory, else the reason."""

    kind: Literal["rehearsal"] = "rehearsal"
    trial: Trial
    timing: Timing

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.round import rehearse

        return {"why_not": rehearse(self.trial, self.timing, self.source_folder)}


class ImagesRequest(WorkerRequest):
    """Generate the first `number` images of a trial, untimed. `pictures` is the store's folder of images."""

    kind: Literal["pictures"] = "pictures"
    trial: Trial
    number: int
    pictures: str

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.round import draw_images

        return draw_images(self.trial, self.number, Path(self.pictures), report, self.source_folder)


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

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.quality_pass import compute_figures

        folder, sources = Path(self.pictures), self.source_folder
        rows = compute_figures(folder, self.keys, self.scorer, self.device, self.lpips, report, sources)
        return {"figures": [row.model_dump(mode="json") for row in rows]}


class PredictionsRequest(WorkerRequest):
    """Return the predictions of `vivace plan` for trials on the GPU of an environment."""

    kind: Literal["predictions"] = "predictions"
    trials: tuple[Trial, ...]
    environment: Environment

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.work import predict_all

        return {"predictions": predict_all(self.trials, self.environment)}


class WorkRequest(WorkerRequest):
    """Return the `Work` of a trial (see `benchmark.work.count_work`)."""

    kind: Literal["work"] = "work"
    trial: Trial
    environment: Environment
    hits: float | None
    denoiser_calls: int

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.rounds.work import count_work

        return count_work(self.trial, self.environment, self.hits, self.denoiser_calls).model_dump(
            mode="json"
        )


class ProfileRequest(WorkerRequest):
    """Return the `Profile` of a trial, of the median of `calls` calls; `trace` is the file for its Chrome trace."""

    kind: Literal["profile"] = "profile"
    trial: Trial
    timing: Timing
    calls: int
    environment: Environment
    trace: str | None

    def answer(self, report: Report) -> dict[str, Any]:
        from vivace.benchmark.profiles import profiled

        file = None if self.trace is None else Path(self.trace)
        profile = profiled(
            self.trial, self.timing, self.calls, self.environment, file, report, self.source_folder
        )
        return profile.model_dump(mode="json")


_KINDS = {each.model_fields["kind"].default: each for each in WorkerRequest.__subclasses__()}


def parse_request(line: str | bytes) -> WorkerRequest:
    return _KINDS[json.loads(line)["kind"]].model_validate_json(line)


def ask(
    launcher: Launcher,
    request: WorkerRequest,
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
