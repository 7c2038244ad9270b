"""The largest batch that fits in a GPU's memory, found by trying.

What fits in a process after many tries need not fit in a fresh one. PyTorch's allocator gives a segment of memory back
only when nothing lies in it, and whether a small tensor (SDXL's VAE, cast to fp32 and back in each call; a library's
workspace) lands in a segment of its own or in the middle of one that is wanted whole depends on what was allocated and
freed before. So what is found by trying in one process is a candidate; it counts once it has gone through a rehearsal
of a measured round in a process of its own (see `vivace.benchmark.runner.ask_largest_batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vivace.spec.trial import Trial

LARGEST = 4096


def largest(fits: Callable[[int], bool], guess: Callable[[], int] | None = None, limit: int = LARGEST) -> int:
    """The largest batch that fits, 0 if not even one picture does.

    Tries what is guessed, or doubles until it does not fit; then halves the gap until it is under a sixteenth: batches
    of 61 and 63 pictures take the same time a picture, and each try costs a call.

    Args:
        guess: asked once two pictures have fitted.
    """
    good, bad = 0, limit + 1

    def try_batch(batch: int) -> bool:
        nonlocal good, bad
        if fits(batch):
            good = batch
        else:
            bad = batch
        return good == batch

    def is_open() -> bool:
        return bad - good > max(1, good // 16)

    if not (try_batch(1) and try_batch(2)):
        return good
    step = good
    if guess is not None:
        near = min(max(guess(), good + 1), limit)
        step = max(1, near // 16)
        found = try_batch(near)
        while not found and is_open():
            found = try_batch(max(bad - step, good + 1))
            step *= 2
    while bad > limit and is_open():
        try_batch(min(good + step, limit))
        step *= 2
    while is_open():
        try_batch((good + bad) // 2)
    return good


def settled(batch: int, holds: Callable[[int], bool]) -> int:
    """The batch, made smaller by a sixteenth at a time until it holds; 0 if not even one picture does."""
    while batch and not holds(batch):
        batch -= max(1, batch // 16)
    return batch


def largest_batch(trial: Trial, report: Callable[[dict[str, Any]], None]) -> int:
    """In the worker, on a GPU: load the trial's model and recipe once and try calls of one step and the decoding, each
    with emptied memory. The denoiser needs the same memory at every step.

    Returns what fitted once here, 0 if not even one picture did.
    """
    import gc

    import torch

    from vivace.benchmark.round import explain, open_trial, try_call
    from vivace.spec.record import Outcome

    session = open_trial(trial)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        report({"event": "phase", "phase": "batch", "done": batch})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call = trial.workload.model_copy(update={"batch": batch}).calls()[0]
        try:
            try_call(session, call, trial.workload.text)
        except Exception as error:
            # Libraries that allocate for themselves have errors of their own for it.
            if explain(error)[0] is not Outcome.OUT_OF_MEMORY:
                raise
            # The traceback holds the tensors of the failed call.
            gc.collect()
            return False
        peaks[batch] = torch.cuda.max_memory_allocated()
        return True

    def guess() -> int:
        """Memory grows by the same amount with each picture, and pieces of it lie unused between others."""
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        each = max(1, peaks[2] - peaks[1])
        return int(1 + (free + torch.cuda.memory_reserved() - peaks[1]) * 0.95 / each)

    return largest(fits, guess)
