"""A session of another task with the weights of an open one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from vivace.errors import Unsupported
from vivace.foundation.spec.workload import Task
from vivace.machinery.technique import ModelFacts, Placement, Stage, Target
from vivace.measure.machine import this_machine
from vivace.models.tasks import for_task, pipeline_of
from vivace.runtime.cancelling import CallInProgress
from vivace.runtime.noise import draw_noise_in_fp32

if TYPE_CHECKING:
    from vivace.runtime.session import Session


def sharing_weights(session: Session, task: Task, model: str) -> Session:
    """Return a session that does another task with the components of an open one; both stay usable, in turns.

    It draws what a session that was opened for the task draws with the same recipe, bit by bit, unless a technique
    adapts to the images: then it has adapted to the first session's task.

    Args:
        session: of a text-to-image pipeline that `open_session` returned.
        model: its name, for messages.

    Raises:
        Unsupported: diffusers has no such pipeline, or a technique belongs to the pipeline of the first session.
    """
    kind = pipeline_of(type(session.pipe).__name__, task, model)
    own = [technique.text for technique in session.recipe if technique.facts.belongs_to_pipeline]
    if own:
        raise Unsupported(
            f"{', '.join(own)} belongs to the text-to-image pipeline, and the task '{task}' has another; open the "
            f"model for that task alone, or leave {'it' if len(own) == 1 else 'them'} out"
        )
    pipe = for_task(session.pipe, kind)
    target = Target(
        Placement(this_machine(session.device)), pipe, ModelFacts(model, defaults=session.defaults)
    )
    for technique in session.recipe:
        if technique.facts.stage is Stage.SCHEDULE and (reason := technique.unsupported(target)) is not None:
            raise Unsupported(f"{technique.name}: {reason}")
    draw_noise_in_fp32(pipe, shares_scheduler=True)
    shared = copy.copy(session)
    shared.pipe = shared._called = pipe
    shared.on_step = None
    shared.warnings = []
    shared._calls = CallInProgress()
    return shared
