"""The calls of a workload: their prompts or embeddings, their images, their generators."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vivace.benchmark.store.images import read_sources
from vivace.foundation.spec.workload import Workload
from vivace.models.sources import image_arguments
from vivace.runtime.calls import Call as Call
from vivace.runtime.calls import encode, generators_of, prompts_of
from vivace.runtime.session import Session

PromptArguments = Callable[[Call], dict[str, Any]]


class Arguments:
    """Arguments of a workload's calls, besides a session's defaults.

    Args:
        pipeline: that the model is published for.
        sources: folder of the images that the workload starts from; needed only if it does.

    Raises:
        VivaceError: an image is missing, or was changed.
    """

    def __init__(self, workload: Workload, pipeline: str, sources: Path | None) -> None:
        self._workload = workload
        self._pipeline = pipeline
        self._pictures: dict[str, Any] = {}
        if workload.sources:
            assert sources is not None
            self._pictures = read_sources(sources, workload)

    def of(self, session: Session) -> PromptArguments:
        """Return a function from a call's index to its prompts, or their embeddings encoded once, and its images.

        Call it before each call: a benchmark draws few prompts many times, and they count as new each time, unless the
        workload says that they are repeated.
        """
        if self._workload.text != "embeddings":

            def prompts(call: Call) -> dict[str, Any]:
                if self._workload.text == "prompts":
                    session.forget_prompts()
                return prompts_of(call) | self._images_of(call)

            return prompts
        by_key: dict[tuple[int, ...], dict[str, Any]] = {}

        def encoded(call: Call) -> dict[str, Any]:
            key = tuple(index for index, _, _ in call)
            if key not in by_key:
                by_key[key] = encode(session, [prompt for _, prompt, _ in call])
            return by_key[key] | self._images_of(call)

        return encoded

    def _images_of(self, call: Call) -> dict[str, Any]:
        indices = [index for index, _, _ in call]
        return image_arguments(self._pipeline, self._workload, indices, self._pictures)


def draw(session: Session, call: Call, prompt_arguments: dict[str, Any], **overrides: Any) -> Any:
    """Generate a call's images, each with its own generator; return the pipeline's output.

    Args:
        prompt_arguments: the prompts or embeddings, as keyword arguments.
        overrides: other arguments of the pipeline's call.
    """
    return session(**prompt_arguments, **generators_of(call), **overrides)


def num_graphs() -> int:
    """Return the number of graphs that torch.compile has made in this process."""
    import sys

    if "torch._dynamo.utils" not in sys.modules:
        return 0
    return int(sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"])
