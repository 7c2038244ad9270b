"""Draw from source images in a worker: image-to-image and inpainting, or editing by weights trained for it."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from vivace.architectures import pipeline_named
from vivace.errors import VivaceError
from vivace.foundation.spec.workload import Task
from vivace.machinery.technique import call_parameters
from vivace.models.find import LocatedModel
from vivace.models.sources import example_images
from vivace.models.tasks import own_task, rounds_up
from vivace.runtime.calls import accepted_by
from vivace.runtime.session import Session
from vivace.serve.worker.speeds import in_few_steps

_SHARED: tuple[Task, ...] = ("image", "inpaint")
_WARM_STEPS = 2


@dataclass
class Editing:
    """Sessions that draw from images, by their task, and why others are not served; `published` is the class of the
    pipeline that the model is published for."""

    published: str
    sessions: dict[Task, Session] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, located: LocatedModel, session: Session, task: Task | None) -> Editing:
        """Return the sessions that draw from images: one opened for the only task, or those of all its weights do."""
        editing = cls(located.pipeline)
        opened = task or own_task(located.pipeline)
        if opened != "text":
            editing.sessions[opened] = session
        elif task is None:
            for other in _SHARED:
                editing._try(other, lambda other=other: session.sharing_weights(other, located.model.name))  # type: ignore[misc]
        return editing

    def warm(self, sizes: Iterable[tuple[int, int]], report: Callable[[str], None]) -> None:
        """Draw once at each size, so that later images compile nothing; a task that does not work is not served."""
        for task, session in list(self.sessions.items()):
            for width, height in sizes:
                report(f"warming {task} at {width}x{height}")
                if not self._try(task, lambda: _draw(session, width, height)):  # noqa: B023 - called at once
                    break

    def state(self) -> dict[str, Any]:
        """Return the facts that the server needs, as plain data."""
        sessions = list(self.sessions.values())
        takes = set.intersection(*(accepted_by(session.pipe) for session in sessions)) if sessions else set()
        strengths = [
            parameter.default
            for session in sessions
            if (parameter := call_parameters(session.pipe).get("strength")) is not None
            and parameter.default is not inspect.Parameter.empty
        ]
        known = [pipeline_named(type(session.pipe).__name__) for session in sessions]
        return {
            "tasks": sorted(self.sessions),
            "refused": self.refused,
            "takes": sorted(takes),
            "strength": float(strengths[0]) if strengths else None,
            "rounds_up": rounds_up(self.published),
            "most_images": max((each.most_images for each in known if each is not None), default=1),
        }

    def _try(self, task: Task, do: Callable[[], Session | None]) -> bool:
        """Run a function for a task; note the reason if it fails."""
        try:
            made = do()
        except VivaceError as error:
            self.refused[task] = str(error)
        except Exception as error:  # noqa: BLE001 - a task that breaks must not end the others
            traceback.print_exc()
            self.refused[task] = f"{type(error).__name__}: {error}"
        else:
            if made is not None:
                self.sessions[task] = made
            return True
        self.sessions.pop(task, None)
        return False


def _draw(session: Session, width: int, height: int) -> None:
    import torch

    size = {"width": width, "height": height}
    call: dict[str, Any] = size | example_images(type(session.pipe).__name__, size)
    if "strength" in accepted_by(session.pipe):
        call["strength"] = 1.0

    def draw(steps: int) -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        session("an apple", num_inference_steps=steps, generator=generator, **call)

    in_few_steps(session, _WARM_STEPS, draw)
