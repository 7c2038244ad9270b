"""The largest batch that fits in a GPU's memory, found by trying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.spec.trial import Trial

LARGEST = 4096


def largest(fits: Callable[[int], bool], limit: int = LARGEST) -> int:
    """The largest batch that fits, 0 if not even one picture does.

    Doubles until it does not fit, then halves the gap until it is under a sixteenth: batches of 61 and 63 pictures
    take the same time a picture, and each try costs a call.
    """
    good, bad = 0, 1
    while bad <= limit and fits(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, limit + 1)
    while good and bad - good > max(1, good // 16):
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


def settled(batch: int, holds: Callable[[int], bool]) -> int:
    """The batch, made smaller by a sixteenth at a time until it holds; 0 if not even one picture does."""
    while batch and not holds(batch):
        batch -= max(1, batch // 16)
    return batch


def largest_batch(trial: Trial, report: Callable[[dict[str, Any]], None]) -> int:
    """In the worker, on a GPU: load the trial's model and recipe once and try calls of one step and the decoding.

    The denoiser needs the same memory at every step. What fits once into emptied memory need not fit again into what
    the first call has split up, so the batch that is found must hold for three calls in a row, as a measurement makes
    them.
    """
    import gc

    import torch

    from vivace.benchmark.round import open_trial, try_call

    session = open_trial(trial)

    def fits(batch: int, calls: int = 1) -> bool:
        report({"event": "phase", "phase": "batch", "done": batch})
        torch.cuda.empty_cache()
        call = trial.workload.model_copy(update={"batch": batch}).calls()[0]
        try:
            for _ in range(calls):
                try_call(session, call, trial.workload.text)
        except torch.OutOfMemoryError:
            # The traceback holds the tensors of the failed call.
            gc.collect()
            return False
        return True

    return settled(largest(fits), lambda batch: fits(batch, calls=3))
