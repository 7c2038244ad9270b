"""The worker process: answers requests of `worker_requests` as `vivace.foundation.processes.resident` describes.

A parent that has only imported libraries is safe to fork, as long as none of them has initialised CUDA.
`without_cuda_init` prevents the known case. To catch others, a first child tries the GPU, if there is one, and
the `ready` event says whether forking works. If it does not, the launcher starts a fresh process for each request.

Its own events: {"event": "phase", ...}, {"event": "sample", ...}, {"event": "result", "value": ...}
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

from vivace.benchmark.rounds.worker_requests import (
    AnyRequest,
    EnvironmentRequest,
    FiguresRequest,
    GpusRequest,
    ImagesRequest,
    LargestBatchRequest,
    PredictionsRequest,
    ProfileRequest,
    RaceRequest,
    RehearsalRequest,
    RoundRequest,
    SupportRequest,
    WorkerRequest,
    WorkRequest,
    parse_request,
)
from vivace.errors import VivaceError
from vivace.foundation.processes import resident
from vivace.foundation.processes.protocol import send_event
from vivace.foundation.processes.resident import fork_child, status_of_child

AnyOf = TypeVar("AnyOf", bound=WorkerRequest)


def main() -> None:
    serve_requests(parse_request, serve)


def serve_requests(parse: Callable[[str], AnyOf], serve: Callable[[AnyOf, TextIO], None]) -> None:
    """Serve requests with the libraries of all trials imported; see `vivace.foundation.processes.resident`."""
    # PyTorch then counts GPUs without initialising CUDA; some libraries count them on import.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    resident.serve_requests(parse, serve, import_all, lambda: gpu_works_in_a_child())


def import_all() -> None:
    """Import the libraries that every trial needs, without starting a thread or touching a device."""
    from vivace.architectures import CATALOGUE
    from vivace.architectures.entry import Embedded
    from vivace.benchmark.rounds import round as _round
    from vivace.measure.machine import without_cuda_init
    from vivace.models.quiet import quiet

    assert _round is not None
    with quiet(), without_cuda_init():
        import diffusers
        import torchao.quantization
        import transformers

        # These modules import their classes on first access.
        for entry in CATALOGUE.values():
            if isinstance(entry.origin, Embedded):
                getattr(diffusers, entry.pipeline)
        for name in ("CLIPTextModel", "CLIPTokenizerFast"):
            getattr(transformers, name)
        assert torchao.quantization.quantize_ is not None


def gpu_works_in_a_child() -> bool:
    """Return whether a forked child of this process can use the GPU; True if there is no GPU."""
    import torch

    from vivace.measure.accelerator import available_gpu

    def use_gpu() -> int:
        if (device := available_gpu()) is not None:
            torch.zeros(1, device=device).item()
        return 0

    return status_of_child(fork_child(use_gpu)) == 0


def serve(request: AnyRequest, events: TextIO) -> None:
    """Compute the answer to a request and send it as a `result` event."""
    import torch

    if request.log is not None:
        resident.print_to(request.log)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        value = answer(request, lambda event: send_event(events, event))
    except VivaceError as error:
        value = {"error": str(error)}
    send_event(events, {"event": "result", "value": value})


def answer(request: AnyRequest, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the answer to a request."""
    sources = None if request.sources is None else Path(request.sources)
    match request:
        case RoundRequest(trial=trial, round=index, timing=timing, pictures=images):
            from vivace.benchmark.rounds.round import measure_round

            folder = None if images is None else Path(images)
            round_ = measure_round(trial, index, timing, folder, report, sources)
            return round_.model_dump(mode="json")
        case FiguresRequest(pictures=images, keys=keys, scorer=scorer, device=device, lpips=lpips):
            from vivace.benchmark.rounds.quality_pass import compute_figures

            rows = compute_figures(Path(images), keys, scorer, device, lpips, report, sources)
            return {"figures": [row.model_dump(mode="json") for row in rows]}
        case ImagesRequest(trial=trial, number=number, pictures=images):
            from vivace.benchmark.rounds.round import draw_images

            return draw_images(trial, number, Path(images), report, sources)
        case LargestBatchRequest(trial=trial):
            from vivace.benchmark.rounds.runner import largest_batch

            return {"batch": largest_batch(trial, report, sources)}
        case RehearsalRequest(trial=trial, timing=timing):
            from vivace.benchmark.rounds.round import rehearse

            return {"why_not": rehearse(trial, timing, sources)}
        case PredictionsRequest(trials=trials, environment=measured_on):
            from vivace.benchmark.rounds.work import predict_all

            return {"predictions": predict_all(trials, measured_on)}
        case WorkRequest(trial=trial, environment=measured_on, hits=hits, denoiser_calls=calls):
            from vivace.benchmark.rounds.work import count_work

            return count_work(trial, measured_on, hits, calls).model_dump(mode="json")
        case ProfileRequest(trial=trial, timing=timing, calls=calls, environment=measured_on, trace=trace):
            from vivace.benchmark.profiles import profiled

            file = None if trace is None else Path(trace)
            profile = profiled(trial, timing, calls, measured_on, file, report, sources)
            return profile.model_dump(mode="json")
        case EnvironmentRequest(device=device):
            from vivace.measure.machine import choose_device
            from vivace.measure.this_environment import environment

            return environment(choose_device(device)).model_dump(mode="json")
        case GpusRequest():
            from vivace.measure.machine import visible_gpus

            return {"gpus": [place.model_dump(mode="json") for place in visible_gpus()]}
        case SupportRequest(device=device, model=model, recipes=recipes, task=task, batch=batch):
            from vivace.benchmark.rounds.support import support_of

            return support_of(model, recipes, device, task, batch).to_json()
        case RaceRequest(device=device, model=model, recipes=recipes):
            from vivace.benchmark.rounds.round import race
            from vivace.measure.machine import choose_device

            return dict(race(model, recipes, choose_device(device)))


if __name__ == "__main__":
    main()
