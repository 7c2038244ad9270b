"""Targets for techniques that are tested without a Session."""

from collections.abc import Sequence
from typing import Any

from vivace.machinery.technique import Machine, ModelFacts, Placement, Request, Target, Technique

CPU = Machine("cpu", "CPU", None, None)


def target_of(
    machine: Machine | None = None,
    pipe: Any = None,
    *,
    on_host: bool = False,
    prompts: Sequence[str] = (),
    later: Sequence[Technique] = (),
    **facts: Any,
) -> Target:
    """Return a target for a pipeline on a machine (None: a CPU); `facts` are fields of ModelFacts."""
    return Target(
        Placement(machine or CPU, on_host=on_host),
        pipe,
        ModelFacts(**facts),
        Request(prompts=tuple(prompts), later=tuple(later)),
    )
