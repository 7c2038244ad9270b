"""The worker process: JSON lines in on standard input, JSON lines out on standard output.

    python -m vivace.benchmark.worker --fork              imports once, then forks one child per request
    python -m vivace.benchmark.worker --fork --try-gpu    the same, unless a child cannot use the GPU
    python -m vivace.benchmark.worker                     serves its requests itself, in a fresh process

A forked child starts in milliseconds and shares the imported libraries, which take seconds; a parent that has only
imported is safe to fork. CUDA's driver does not survive a fork once a process has woken it. `vivace.benchmark.driver`
keeps it asleep, but what libraries do when they are imported is their own affair: so a first child tries the GPU, if
there is one, and `ready` says how that ended; if badly, the launcher starts a fresh process for each request.

Requests: {"kind": "environment", "device": ..., "threads": ...}
          {"kind": "figures", "pictures": FOLDER, "keys": [...], "scorer": ..., "device": ..., "lpips": ...,
           "threads": ...}
          {"kind": "pictures", "trial": ..., "number": n, "pictures": FOLDER, "threads": ...}
          {"kind": "largest_batch", "trial": ..., "threads": ...}
          {"kind": "rehearsal", "trial": ..., "plan": ..., "threads": ...}
          {"kind": "predictions", "trials": [...], "environment": ...}
          {"kind": "race", "device": ..., "threads": ..., "model": ..., "recipes": [...]}
          {"kind": "round", "trial": ..., "round": k, "plan": ..., "pictures": FOLDER, "log": FILE, "threads": ...}
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
from pathlib import Path
from typing import Any, TextIO

from vivace.benchmark.plan import Plan
from vivace.errors import Unsupported, VivaceError
from vivace.spec.environment import Environment
from vivace.spec.figures import FiguresKey
from vivace.spec.trial import Trial

_PR_SET_PDEATHSIG = 1


def main() -> None:
    die_with_parent()
    if is_abandoned():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the runner's to handle
    # Whatever a library prints to standard output must not get between the events.
    events = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    fork = "--fork" in sys.argv[1:]
    # Asks how many GPUs there are without waking the driver, which libraries do that look for one on import.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import_all()
    if fork and "--try-gpu" in sys.argv[1:]:
        fork = gpu_works_in_a_child()
    say(events, {"event": "ready", "forks": fork})
    for line in sys.stdin:
        request = json.loads(line)
        if fork:
            serve_in_child(request, events)
        else:
            say(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
            say(events, {"event": "ended", "status": 0})


def import_all() -> None:
    """Import what every trial needs. Nothing here may start a thread or touch a device."""
    from vivace.benchmark import round as _round
    from vivace.benchmark.driver import asleep
    from vivace.models.quiet import quiet

    assert _round is not None
    with quiet(), asleep():
        import diffusers
        import torchao.quantization
        import transformers

        # These modules load their classes when first named.
        for module, name in (
            (diffusers, "StableDiffusionPipeline"),
            (diffusers, "AutoencoderTiny"),
            (transformers, "CLIPTextModel"),
            (transformers, "CLIPTokenizerFast"),
        ):
            getattr(module, name)
        assert torchao.quantization.quantize_ is not None


def gpu_works_in_a_child() -> bool:
    """Whether a forked child of this process can use the GPU; True where there is none."""
    import torch

    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda").item()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def serve_in_child(request: dict[str, Any], events: TextIO) -> None:
    """Fork, serve in the child, wait for its end, and say how it ended."""
    events.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setpgid(0, 0)  # so that its helpers (compile workers) can be killed with it
            die_with_parent()
            say(events, {"event": "started", "pid": os.getpid()})
            serve(request, events)
            status = 0
        except Exception:  # noqa: BLE001  the process boundary
            traceback.print_exc()  # to the log: `os._exit` ends the process without a word
        finally:
            events.flush()
            os._exit(status)
    _, wait_status = os.waitpid(pid, 0)
    # A child that was killed halfway through a line leaves it open.
    events.write("\n")
    say(events, {"event": "ended", "status": wait_status})


def serve(request: dict[str, Any], events: TextIO) -> None:
    import torch

    if request.get("log"):
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
    if request.get("threads"):
        torch.set_num_threads(request["threads"])
    if request["kind"] == "round":
        from vivace.benchmark.round import measure_round

        value = measure_round(
            Trial.model_validate(request["trial"]),
            request["round"],
            Plan.model_validate(request["plan"]),
            Path(request["pictures"]),
            lambda event: say(events, event),
        ).model_dump(mode="json")
    elif request["kind"] == "figures":
        from vivace.benchmark.figures import compute_figures

        keys = [FiguresKey.model_validate(key) for key in request["keys"]]
        rows = compute_figures(
            Path(request["pictures"]), keys, request["scorer"], request["device"], request["lpips"]
        )
        value = {"figures": [row.model_dump(mode="json") for row in rows]}
    elif request["kind"] == "pictures":
        from vivace.benchmark.figures import draw_pictures

        trial = Trial.model_validate(request["trial"])
        value = draw_pictures(trial, request["number"], Path(request["pictures"]))
    elif request["kind"] == "largest_batch":
        from vivace.benchmark.fitting import largest_batch

        trial = Trial.model_validate(request["trial"])
        try:
            value = {"batch": largest_batch(trial, lambda event: say(events, event))}
        except VivaceError as error:
            value = {"error": str(error)}
    elif request["kind"] == "rehearsal":
        from vivace.benchmark.round import rehearse

        trial, plan = Trial.model_validate(request["trial"]), Plan.model_validate(request["plan"])
        try:
            value = {"why_not": rehearse(trial, plan)}
        except VivaceError as error:
            value = {"error": str(error)}
    elif request["kind"] == "predictions":
        from vivace.benchmark.planned import predict_all

        trials = [Trial.model_validate(trial) for trial in request["trials"]]
        value = {"predictions": predict_all(trials, Environment.model_validate(request["environment"]))}
    else:
        value = ask_machine(request)
    say(events, {"event": "result", "value": value})


def ask_machine(request: dict[str, Any]) -> dict[str, Any]:
    """What the parent wants to know of the machine and does not ask itself, since it imports no torch."""
    from vivace.benchmark.race import race
    from vivace.measure.environment import environment
    from vivace.measure.machine import choose_device

    try:
        device = choose_device(request["device"])
    except Unsupported as error:
        return {"error": str(error)}
    if request["kind"] == "environment":
        return environment(device).model_dump(mode="json")
    return dict(race(request["model"], request["recipes"], device))


def is_abandoned() -> bool:
    """Whether the parent died before `die_with_parent`: nobody holds the other end of the pipe of requests any more."""
    poll = select.poll()
    poll.register(sys.stdin.fileno(), select.POLLIN)
    return any(event & select.POLLHUP and not event & select.POLLIN for _, event in poll.poll(0))


def say(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


def die_with_parent() -> None:
    """Linux: be killed when the parent process dies, so that a killed benchmark leaves nothing running."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
