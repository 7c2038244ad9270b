"""A worker that generates images with one recipe on one embedded model, in a separate process per request.

Result:   {"outcome": measured | unsupported | no_effect, "reason": ..., "warnings": [...], "psnr_db": ...,
           "repeat_psnr_db": ..., "faults": [...], and the evidence that `tell` names}; other errors end the process.
"""

import os
import sys
from typing import Any, TextIO

from vivace.benchmark.rounds.worker_requests import WorkerRequest

COMMAND = (sys.executable, __file__)

PROMPTS = ["a red circle above a blue square", "a green triangle"]
"""Two, because slicing needs a batch, and images of a batch must not affect each other."""
EQUAL_DB = 200.0
"""Stands for equal images, whose PSNR is infinite."""


class DrawRequest(WorkerRequest):
    """Generate with a recipe.

    Attributes:
        device: "cpu" or "cuda"; the model is copied to it in fp32, whatever its catalogue says.
        reference: a .npy file of float32 (N, H, W, 3) in 0 .. 1; written if `is_reference`, else read.
        code: a folder for compiled code: what earlier runs left behind would hide that something does not compile.
        tell: entries of the evidence that go into the result, where there are such.
    """

    model: str
    recipe: str
    device: str
    steps: int
    reference: str
    is_reference: bool
    code: str
    tell: tuple[str, ...]


def draw(request: DrawRequest) -> dict[str, Any]:
    """Generate twice with the same noise, and compare the second result with the reference and with the first.

    Twice, because caches, hooks and schedules must start anew with each call, and because a prompt is only found
    in a cache the second time.
    """
    import numpy as np
    import torch

    from vivace.errors import NoEffect, Unsupported
    from vivace.machinery.compilation.compiled_code import VARIABLE
    from vivace.measure.image_metrics import faults, pixels
    from vivace.models import find_model, load_pipeline
    from vivace.recipes.resolve import resolve
    from vivace.runtime.opening import session_of

    os.environ[VARIABLE] = request.code
    located = find_model(request.model)
    try:
        pipe = load_pipeline(located, "cpu").to(request.device)
        session = session_of(
            pipe, located, resolve(request.recipe), request.device, {"num_inference_steps": request.steps}
        )
        pictures = []
        for _ in range(2):
            noise = [torch.Generator().manual_seed(k) for k in range(len(PROMPTS))]
            pictures.append(np.asarray(session(PROMPTS, generator=noise, output_type="np").images))
    except Unsupported as error:
        return without_picture("unsupported", str(error))
    except NoEffect as error:
        return without_picture("no_effect", str(error))
    if request.is_reference:
        np.save(request.reference, pictures[1])
    evidence = session.evidence()
    reason = session.refuted(evidence)
    return {
        "outcome": "measured" if reason is None else "no_effect",
        "reason": reason,
        "warnings": session.warnings,
        "psnr_db": _psnr_db(pictures[1], np.load(request.reference)),
        "repeat_psnr_db": _psnr_db(pictures[1], pictures[0]),
        "faults": sorted({fault for picture in pictures[1] for fault in faults(pixels(picture))}),
        **{name: evidence[name] for name in request.tell if name in evidence},
    }


def without_picture(outcome: str, reason: str) -> dict[str, Any]:
    """Return a row without images to compare."""
    return {
        "outcome": outcome,
        "reason": reason,
        "warnings": [],
        "psnr_db": None,
        "repeat_psnr_db": None,
        "faults": [],
    }


def _psnr_db(pictures: Any, others: Any) -> float | None:
    """Return the PSNR of the worse image; None if one is not finite, which is a fault."""
    import numpy as np

    if not (np.isfinite(pictures).all() and np.isfinite(others).all()):
        return None
    error = float(np.mean((pictures.astype(np.float64) - others) ** 2, axis=(1, 2, 3)).max())
    return EQUAL_DB if error == 0 else round(min(EQUAL_DB, -10 * float(np.log10(error))), 2)


def serve(request: DrawRequest, events: TextIO) -> None:
    import torch

    from vivace.foundation.processes.protocol import send_event
    from vivace.foundation.processes.resident import print_to

    assert request.log is not None
    assert request.threads is not None
    print_to(request.log)
    torch.set_num_threads(request.threads)
    send_event(events, {"event": "result", "value": draw(request)})


if __name__ == "__main__":
    # Imported once, before the forks: the compiler's front end alone takes seconds to import.
    import torch._dynamo
    import torchmetrics

    from vivace.benchmark.rounds.worker import serve_requests
    from vivace.runtime import session

    del torch, torchmetrics, session
    serve_requests(DrawRequest.model_validate_json, serve)
