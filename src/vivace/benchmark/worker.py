"""The worker process: reads requests as JSON lines on standard input, writes events as JSON lines on standard output.

    python -m vivace.benchmark.worker --fork              imports once, then forks one child per request
    python -m vivace.benchmark.worker --fork --try-gpu    the same, unless a forked child cannot use the GPU
    python -m vivace.benchmark.worker                     serves its requests itself

A forked child starts in milliseconds and shares the imported libraries, which take seconds to import. A parent that
has only imported libraries is safe to fork, as long as none of them has initialised CUDA. `vivace.benchmark.driver`
prevents the known case. To catch others, a first child tries the GPU, if there is one, and the `ready` event says
whether forking works. If it does not, the launcher starts a fresh process for each request.

Requests: see `vivace.benchmark.requests`.
Events:   {"event": "ready", "forks": true|false}, {"event": "started", "pid": ...}, {"event": "phase", ...},
          {"event": "sample", ...}, {"event": "result", "value": ...}, {"event": "ended", "status": WAIT_STATUS}
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO, TypeVar

from vivace.benchmark.requests import (
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

_PR_SET_PDEATHSIG = 1
AnyOf = TypeVar("AnyOf", bound=WorkerRequest)


def main() -> None:
    serve_requests(parse_request, serve)


def serve_requests(parse: Callable[[str], AnyOf], serve: Callable[[AnyOf, TextIO], None]) -> None:
    """Serve the requests of this process, as its arguments say (see the top of this module), until its input ends.

    Args:
        parse: turns a line into a request.
        serve: computes the answer and writes it to the events.
    """
    die_with_parent()
    if is_abandoned():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the runner handles Ctrl-C
    # Standard output carries events only; what libraries print goes to standard error.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    fork = "--fork" in sys.argv[1:]
    # PyTorch then counts GPUs without initialising CUDA; some libraries count them on import.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import_all()
    if fork and "--try-gpu" in sys.argv[1:]:
        fork = gpu_works_in_a_child()
    send_event(events, {"event": "ready", "forks": fork})
    for line in sys.stdin:
        request = parse(line)
        if fork:
            serve_in_child(request, serve, events)
        else:
            send_event(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
            send_event(events, {"event": "ended", "status": 0})


def import_all() -> None:
    """Import the libraries that every trial needs, without starting a thread or touching a device."""
    from vivace.benchmark import round as _round
    from vivace.benchmark.driver import without_cuda_init
    from vivace.models.quiet import quiet

    assert _round is not None
    with quiet(), without_cuda_init():
        import diffusers
        import torchao.quantization
        import transformers

        # These modules import their classes on first access.
        for module, name in (
            (diffusers, "StableDiffusionPipeline"),
            (diffusers, "AutoencoderTiny"),
            (transformers, "CLIPTextModel"),
            (transformers, "CLIPTokenizerFast"),
        ):
            getattr(module, name)
        assert torchao.quantization.quantize_ is not None


def gpu_works_in_a_child() -> bool:
    """Whether a forked child of this process can use the GPU; True if there is no GPU."""
    import torch

    from vivace.measure.accelerator import available_gpu

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if (device := available_gpu()) is not None:
                torch.zeros(1, device=device).item()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def serve_in_child(request: AnyOf, serve: Callable[[AnyOf, TextIO], None], events: TextIO) -> None:
    """Fork a child that serves the request, wait for it, and send its exit status."""
    events.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)  # so that its compile workers can be killed with it
            die_with_parent()
            send_event(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
            status = 0
        except Exception:  # noqa: BLE001  the process boundary
            traceback.print_exc()  # to the log: `os._exit` prints nothing
        finally:
            events.flush()
            os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    # End the line that a killed child may have left incomplete.
    events.write("\n")
    send_event(events, {"event": "ended", "status": wait_status})


def serve(request: AnyRequest, events: TextIO) -> None:
    """Compute the answer to a request and send it as a `result` event."""
    import torch

    if request.log is not None:
        log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        value = answer(request, lambda event: send_event(events, event))
    except VivaceError as error:
        value = {"error": str(error)}
    send_event(events, {"event": "result", "value": value})


def answer(request: AnyRequest, report: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Return the answer to a request.

    Args:
        report: called with progress events.

    Raises:
        VivaceError: the request cannot be answered here. Failures of a round are outcomes, not errors.
    """
    sources = None if request.sources is None else Path(request.sources)
    match request:
        case RoundRequest(trial=trial, round=index, timing=timing, pictures=pictures):
            from vivace.benchmark.round import measure_round

            folder = None if pictures is None else Path(pictures)
            round_ = measure_round(trial, index, timing, folder, report, sources)
            return round_.model_dump(mode="json")
        case FiguresRequest(pictures=pictures, keys=keys, scorer=scorer, device=device, lpips=lpips):
            from vivace.benchmark.image_figures import compute_figures

            rows = compute_figures(Path(pictures), keys, scorer, device, lpips, report, sources)
            return {"figures": [row.model_dump(mode="json") for row in rows]}
        case ImagesRequest(trial=trial, number=number, pictures=pictures):
            from vivace.benchmark.figures import draw_pictures

            return draw_pictures(trial, number, Path(pictures), report, sources)
        case LargestBatchRequest(trial=trial):
            from vivace.benchmark.fitting import largest_batch

            return {"batch": largest_batch(trial, report, sources)}
        case RehearsalRequest(trial=trial, timing=timing):
            from vivace.benchmark.round import rehearse

            return {"why_not": rehearse(trial, timing, sources)}
        case PredictionsRequest(trials=trials, environment=measured_on):
            from vivace.benchmark.planned import predict_all

            return {"predictions": predict_all(trials, measured_on)}
        case WorkRequest(trial=trial, environment=measured_on, hits=hits, denoiser_calls=calls):
            from vivace.benchmark.work import count_work

            return count_work(trial, measured_on, hits, calls).model_dump(mode="json")
        case ProfileRequest(trial=trial, timing=timing, calls=calls, environment=measured_on, trace=trace):
            from vivace.benchmark.profiled import profiled

            file = None if trace is None else Path(trace)
            profile = profiled(trial, timing, calls, measured_on, file, report, sources)
            return profile.model_dump(mode="json")
        case EnvironmentRequest(device=device):
            from vivace.measure.environment import environment
            from vivace.measure.machine import choose_device

            return environment(choose_device(device)).model_dump(mode="json")
        case GpusRequest():
            from vivace.measure.machine import visible_gpus

            return {"gpus": [place.model_dump(mode="json") for place in visible_gpus()]}
        case SupportRequest(device=device, model=model, recipes=recipes, task=task, batch=batch):
            from vivace.benchmark.support import support_of

            return support_of(model, recipes, device, task, batch).to_json()
        case RaceRequest(device=device, model=model, recipes=recipes):
            from vivace.benchmark.race import race
            from vivace.measure.machine import choose_device

            return dict(race(model, recipes, choose_device(device)))


def is_abandoned() -> bool:
    """Whether the parent died before `die_with_parent`: the other end of the request pipe is closed."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))


def send_event(events: TextIO, event: dict[str, Any]) -> None:
    """Write an event as a line of JSON."""
    events.write(json.dumps(event) + "\n")
    events.flush()


def die_with_parent() -> None:
    """Have Linux kill this process when its parent dies, so that a killed benchmark leaves nothing running."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
