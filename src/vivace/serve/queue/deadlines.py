"""Waiting for a job until its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, State


async def drawn_in_time(job: ImageJob, cancel: Callable[[ImageJob, JobError, State], None]) -> Drawn:
    """Wait for a job until its deadline.

    Args:
        cancel: ends the job with an error.

    Raises:
        JobError: it ended without an image.
    """
    left = job.deadline - time.monotonic()
    try:
        return await asyncio.wait_for(asyncio.shield(job.result), max(0.0, left))
    except TimeoutError:
        where = "while it waited" if job.state is State.WAITING else "while it was drawn"
        error = JobError(504, f"the time of the request ended {where}")
        cancel(job, error, State.FAILED)
        raise error from None
