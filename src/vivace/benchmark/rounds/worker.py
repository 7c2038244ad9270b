"""The worker process: answers requests of `worker_requests` as `vivace.foundation.processes.resident` describes.

A parent that has only imported libraries is safe to fork, as long as none of them has initialised CUDA.
`without_cuda_init` prevents the known case. To catch others, a first child tries the GPU, if there is one, and
the `ready` event says whether forking works. If it does not, the launcher starts a fresh process for each request.

Its own events: {"event": "phase", ...}, {"event": "sample", ...}, {"event": "result", "value": ...}
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TextIO, TypeVar

from vivace.benchmark.rounds.worker_requests import WorkerRequest, parse_request
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


def serve(request: WorkerRequest, events: TextIO) -> None:
    """Compute the answer to a request and send it as a `result` event."""
    import torch

    if request.log is not None:
        resident.print_to(request.log)
    if request.threads is not None:
        torch.set_num_threads(request.threads)
    try:
        value = request.answer(lambda event: send_event(events, event))
    except VivaceError as error:
        value = {"error": str(error)}
    send_event(events, {"event": "result", "value": value})


if __name__ == "__main__":
    main()
