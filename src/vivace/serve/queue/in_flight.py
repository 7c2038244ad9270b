"""Jobs of a worker: sent by one message, drawn by one call, and ended by one event."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vivace.serve.queue.image_folder import remove_images
from vivace.serve.queue.jobs import Drawn, ImageJob, JobError, Ledger, State
from vivace.serve.queue.messages import Draw, SentPicture, image_file

LOG = logging.getLogger("vivace.serve")
_AHEAD_S = 0.25
"""Seconds before the end of the current jobs at which the next are sent, so that the worker does not wait."""


@dataclass(eq=False)
class InFlight:
    """Jobs of one message.

    Attributes:
        is_nearly_drawn: so that the next message may be sent.
        has_begun: whether the worker has begun to draw.
        is_compiling: whether the worker said so after its last step.
        is_called: whether its session has returned; the image comes later, and the next message is begun.
    """

    jobs: list[ImageJob]
    is_nearly_drawn: bool = False
    has_begun: bool = False
    is_compiling: bool = False
    is_called: bool = False

    @property
    def id(self) -> str:
        return self.jobs[0].id

    @property
    def kind(self) -> tuple[Any, ...]:
        """What the time of the first of its kind depends on: compiled code and graphs."""
        first = self.jobs[0]
        return first.task, first.size, len(self.jobs), first.lora is None, "negative_prompt" in first.call

    @property
    def has_ended(self) -> bool:
        return all(job.has_ended for job in self.jobs)

    def message(self, folder: Path) -> Draw:
        """Return the message to the worker, and write the images that the job starts from."""
        first = self.jobs[0]
        pictures = []
        for number, picture in enumerate(first.pictures):
            path = image_file(folder, first.id, f"from-{number}")
            path.write_bytes(picture.pixels)
            pictures.append(
                SentPicture(picture.argument, picture.mode, picture.width, picture.height, str(path))
            )
        return Draw(
            ids=tuple(job.id for job in self.jobs),
            prompts=tuple(job.prompt for job in self.jobs),
            seeds=tuple(job.seed for job in self.jobs),
            call=first.call,
            lora=None if first.lora is None else (str(first.lora.path), first.lora.scale),
            partials=first.partials,
            task=first.task,
            pictures=tuple(pictures),
        )

    @property
    def has_retried(self) -> bool:
        """Whether a worker died while it drew one of the jobs."""
        return any(job.attempts for job in self.jobs)

    def begin(self) -> None:
        self.has_begun = True
        self.is_nearly_drawn = self.jobs[0].predicted_s <= _AHEAD_S

    def note_call(self) -> None:
        """Note that the worker's session takes the next message."""
        self.is_called = self.is_nearly_drawn = True

    def note_step(self, event: dict[str, Any]) -> None:
        """Forward a step, with its partial images."""
        first, step = self.jobs[0], event["step"]
        left_s = first.predicted_s * (1 - step / max(1, first.steps))
        self.is_nearly_drawn |= step >= first.steps - 1 or left_s <= _AHEAD_S
        for job in self.jobs:
            if job.on_step is not None:
                job.on_step(step)
        for job, image in zip(self.jobs, event.get("images", ()), strict=False):
            try:
                partial = read_drawn(job, image, {})
            except OSError as error:
                LOG.warning("%s: a partial image is lost: %s", job.id, error.strerror)
                continue
            if job.on_partial is not None and not job.has_ended:
                job.on_partial(step, partial)

    def note_end(
        self,
        event: dict[str, Any],
        ledger: Ledger,
        on_drawn: Callable[[ImageJob, dict[str, Any]], None],
    ) -> list[ImageJob]:
        """End the jobs as the worker's last event says; return those to draw again, each alone."""
        message = str(event.get("message"))
        if event["event"] in ("refused", "failed") and len(self.jobs) > 1:
            again = [job for job in self.jobs if not job.has_ended]
            for job in again:
                job.is_alone = True
                ledger.move(job, State.WAITING)
            LOG.warning("%d images failed together and are drawn one by one: %s", len(self.jobs), message)
            return again
        if event["event"] == "drawn":
            for job, image in zip(self.jobs, event["images"], strict=True):
                try:
                    drawn = read_drawn(job, image, event["phases"], tuple(event.get("notes", ())))
                except OSError as error:
                    ledger.fail(job, JobError(500, f"the image is lost: {error.strerror}"))
                    continue
                if not job.has_ended:
                    on_drawn(job, event)
                    ledger.finish(job, drawn)
            return []
        for job in self.jobs:
            match event["event"]:
                case "cancelled":
                    ledger.fail(job, JobError(499, "the request was cancelled"), State.CANCELLED)
                case "refused":
                    ledger.fail(job, JobError(400, message))
                case _:
                    LOG.error("%s failed: %s", job.id, message)
                    ledger.fail(job, JobError(500, f"drawing failed: {message}"))
        return []

    def clear(self, folder: Path) -> None:
        """Remove the files of the images that the jobs start from, and those that nobody reads any more."""
        remove_images(folder, (job.id for job in self.jobs))


def read_drawn(
    job: ImageJob, image: dict[str, Any], phases: dict[str, float], notes: tuple[str, ...] = ()
) -> Drawn:
    """Return an image of an event, and remove its file."""
    path = Path(image["file"])
    pixels = path.read_bytes()
    path.unlink()
    return Drawn(pixels, image["width"], image["height"], job.seed, phases, notes)
