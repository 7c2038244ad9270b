"""Find the largest batch that fits in a GPU's memory, by trying.

A batch that fits in a process after many tries may not fit in a fresh one. PyTorch's allocator releases a segment of
memory only when no tensor is left in it. Whether a small tensor (SDXL's VAE, cast to fp32 and back in each call; a
library's workspace) gets a separate segment or splits a large one depends on what was allocated and freed before. So
the batch found in one process is a candidate. It is accepted after a rehearsal of a measured round in a separate
process (see `vivace.benchmark.rounds.runner.ask_largest_batch`).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.foundation.spec.trial import Trial

LARGEST = 4096


def largest(fits: Callable[[int], bool], guess: Callable[[], int] | None = None, limit: int = LARGEST) -> int:
    """Return the largest batch that fits, 0 if not even one image does.

    Tries the guess, or doubles the batch until it does not fit, then bisects until the gap is under a sixteenth. A
    finer search does not pay: batches of 61 and 63 take the same time per image, and each try costs a call.

    Args:
        fits: tries a batch.
        guess: estimates the largest batch; called after batches of 1 and 2 have fitted.
        limit: the largest batch to try.
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
        is_held = try_batch(near)
        while not is_held and is_open():
            is_held = try_batch(max(bad - step, good + 1))
            step *= 2
    while bad > limit and is_open():
        try_batch(min(good + step, limit))
        step *= 2
    while is_open():
        try_batch((good + bad) // 2)
    return good


def reduce_until(batch: int, holds: Callable[[int], bool]) -> int:
    """Reduce the batch by a sixteenth at a time until `holds` accepts it; return 0 if it accepts none."""
    while batch and not holds(batch):
        batch -= max(1, batch // 16)
    return batch


def largest_batch(trial: Trial, report: Callable[[dict[str, Any]], None], sources: Path | None = None) -> int:
    """Return the largest batch of a trial that fits in this process, 0 if not even one image does.

    Runs in the worker, on a GPU. It loads the model and the recipe once and tries calls of one step plus decoding,
    each after emptying the allocator's cache. One step is enough: the denoiser needs the same memory at every step.

    Args:
        trial: its own batch is ignored.
    """
    import gc

    import torch

    from vivace.benchmark.rounds.round import OpenTrial, explain
    from vivace.foundation.spec.record import Outcome

    opened = OpenTrial(trial, sources)
    peaks: dict[int, int] = {}

    def fits(batch: int) -> bool:
        report({"event": "phase", "phase": "batch", "done": batch})
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        call = trial.workload.model_copy(update={"batch": batch}).calls()[0]
        try:
            opened.try_call(call)
        except Exception as error:
            # Libraries with their own allocators raise other exceptions for it.
            if explain(error)[0] is not Outcome.OUT_OF_MEMORY:
                raise
            # The traceback keeps the tensors of the failed call alive.
            gc.collect()
            return False
        peaks[batch] = torch.cuda.max_memory_allocated()
        return True

    def guess() -> int:
        """Extrapolate from batches of 1 and 2, leaving 5 % for fragmentation."""
        gc.collect()
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        each = max(1, peaks[2] - peaks[1])
        return int(1 + (free + torch.cuda.memory_reserved() - peaks[1]) * 0.95 / each)

    return largest(fits, guess)
